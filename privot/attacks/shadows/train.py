"""Training of shadow classifiers: from releases to classifiers, and their observations on disk."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privot.attacks.shadows.config import PARALLEL_METHODS, ShadowConfig
from privot.attacks.shadows.observe import (
    WIDE_CHANNELS,
    TrainedModels,
    choose_classifier_width,
    observe,
)
from privot.attacks.shadows.releases import synthesize_in_parallel, synthesize_sequentially
from privot.attacks.shadows.store import ShadowStore, write_private_arrays
from privot.baselines.condensation import standardize_images
from privot.data.spec import Spec
from privot.measures.downstream_networks import DOWNSTREAM_NETWORKS, shorten_recipe
from privot.nets.augment import list_augmentations
from privot.nets.ensemble import Ensemble
from privot.nets.training import Recipe, train_ensemble
from privot.release import Release
from privot.runtime import Progress, Runtime, Streams, use_threads

# Classifiers that are trained and observed together: few enough that a crash loses little work,
# and enough that candidates are embedded rarely.
MODELS_PER_GROUP = 8


def prepare_batch(
    config: ShadowConfig, shadow_indices: list[int], runtime: Runtime, progress: Progress
) -> None:
    """Prepare what is missing of a batch of shadows; each group is stored when it is observed.

    Args:
        config: What defines the shadows.
        shadow_indices: The shadows of the batch.
        runtime: Device and chunk sizes.
        progress: Called with the number of complete shadows.
    """
    store = ShadowStore(config.folder)
    pending = [index for index in shadow_indices if not store.observation_path(index).exists()]
    if not pending:
        return
    membership = store.load_membership()
    is_narrow = choose_classifier_width(config.dataset.spec) < WIDE_CHANNELS
    with use_threads(1) if is_narrow else nullcontext():  # more threads slow such small nets down
        if not all(store.release_path(index).exists() for index in pending):
            synthesize_batch = (
                synthesize_in_parallel
                if config.method in PARALLEL_METHODS
                else synthesize_sequentially
            )
            synthesize_batch(config, shadow_indices, membership, runtime, progress)
        for start in range(0, len(pending), MODELS_PER_GROUP):
            group = pending[start : start + MODELS_PER_GROUP]
            _observe_group(config, group, membership, runtime, progress)


def build_classifier_recipe(epochs: int, num_images: int, flip_invariant: bool) -> Recipe:
    """Build the training recipe of a classifier, as in the condensation papers.

    Args:
        epochs: Epochs before `shorten_recipe`.
        num_images: Number of released images.
        flip_invariant: Whether images may be flipped.

    Returns:
        The recipe.
    """
    recipe = replace(
        DOWNSTREAM_NETWORKS["convnet"][1],
        num_repeats=1,
        epochs=epochs,
        lr_milestones=(epochs // 2,),
        augmentations=list_augmentations(flip_invariant),
    )
    return shorten_recipe(recipe, num_images)


def train_on_releases(
    releases: list[Release],
    seeds: list[int],
    spec: Spec,
    epochs: int,
    num_samples: int,
    runtime: Runtime,
    progress: Progress,
) -> TrainedModels:
    """Train a classifier on each release, all classifiers together, each with its own seed.

    Args:
        releases: The releases.
        seeds: Their seeds.
        spec: Shape and classes.
        epochs: Training epochs.
        num_samples: Images that a generator samples; a set is used as it is.
        runtime: Device and chunk sizes.
        progress: Called with the training steps.

    Returns:
        The classifiers and the images they were trained on.
    """
    device = runtime.torch_device
    training_sets = [
        _get_training_images(release, num_samples, seed, device)
        for release, seed in zip(releases, seeds, strict=True)
    ]
    images, labels, targets = (
        torch.stack(tensors).to(device) for tensors in zip(*training_sets, strict=True)
    )
    classifiers = _init_classifiers(spec, seeds).to(device)
    train_ensemble(
        classifiers,
        standardize_images(images.flatten(0, 1)).view_as(images),
        targets,
        build_classifier_recipe(epochs, labels.shape[1], spec.is_flip_invariant),
        [Streams(seed).make_rng("order") for seed in seeds],
        signed=False,
        progress=progress,
        stage="training classifiers",
    )
    return TrainedModels(classifiers.requires_grad_(False), images, labels)


def _observe_group(
    config: ShadowConfig,
    shadow_indices: list[int],
    membership: NDArray[np.bool_],
    runtime: Runtime,
    progress: Progress,
) -> None:
    """Train the classifiers of a few shadows, observe all candidates and store the observations.

    Args:
        config: What defines the shadows.
        shadow_indices: The shadows of the group.
        membership: The half of each shadow, bool [shadows, candidates].
        runtime: Device and chunk sizes.
        progress: Called with the number of complete shadows.
    """
    store = ShadowStore(config.folder)
    seeds = [config.seed + 1 + index for index in shadow_indices]
    releases = [store.load_release(index) for index in shadow_indices]
    models = train_on_releases(
        releases, seeds, config.dataset.spec, config.epochs, config.num_samples, runtime, progress
    )
    observed = observe(models, config.dataset, config.observations, runtime)
    correct = observed.pop("correct")
    for row, shadow_index in enumerate(shadow_indices):
        is_member = membership[shadow_index]
        facts = {
            "records": is_member.sum(),
            "accuracy_in": correct[row, is_member].mean(),
            "accuracy_out": correct[row, ~is_member].mean(),
        }
        arrays = {name: observation[row] for name, observation in observed.items()}
        arrays |= {name: np.asarray(value, np.float64) for name, value in facts.items()}
        write_private_arrays(store.observation_path(shadow_index), arrays)
        progress("shadows", store.count_completed(), config.num_shadows)


def _get_training_images(
    release: Release, num_samples: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Get what a classifier is trained on.

    Args:
        release: The release.
        num_samples: Images that a generator samples.
        seed: Seed of a generator's latents.
        device: Where a generator runs.

    Returns:
        Images, labels, and training targets: the soft labels of a set that has them, or the labels.
    """
    if release.artifact.kind == "set":
        tensors = release.artifact.tensors
        return tensors["images"], tensors["labels"], tensors.get("soft_labels", tensors["labels"])
    images, labels = release.sample(num_samples, seed=seed, device=device)
    return images, labels, labels


def _init_classifiers(spec: Spec, seeds: list[int]) -> Ensemble:
    """Initialize one classifier for each seed; it does not depend on the other classifiers."""
    width = choose_classifier_width(spec)
    singles = [
        Ensemble(
            1, spec.shape, spec.num_classes, width, generator=Streams(seed).make_rng("weights")
        )
        for seed in seeds
    ]
    classifiers = Ensemble(
        len(seeds), spec.shape, spec.num_classes, width, generator=torch.Generator()
    )
    with torch.no_grad():
        for name, parameter in classifiers.named_parameters():
            parameter.copy_(torch.cat([single.get_parameter(name) for single in singles]))
    return classifiers
