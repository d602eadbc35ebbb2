"""The networks that are trained on synthetic images and tested on real ones, with their recipes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from privot.data.spec import Spec
from privot.nets.augment import AUGMENTATIONS, list_augmentations
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.classifiers.lenet import LeNet
from privot.nets.classifiers.resnet import ResNet18
from privot.nets.recipe import Recipe
from privot.nets.training import Classifier, train_classifier
from privot.progress import Progress, ignore_progress

DOWNSTREAM_NETWORKS: dict[str, tuple[Callable[..., Any], Recipe]] = {
    "cnn": (LeNet, Recipe(epochs=50, learning_rate=0.02, weight_decay=1e-4, lr_milestones=(40,))),
    # The evaluation of DSA and DM: 1000 epochs since there is augmentation.
    "convnet": (
        ConvNet,
        Recipe(
            epochs=1000,
            learning_rate=0.01,
            batch_size=256,
            weight_decay=5e-4,
            lr_milestones=(500,),
            half_precision=True,
            even_batches=True,
            augmentations=AUGMENTATIONS,
            num_repeats=5,
        ),
    ),
    "resnet": (
        ResNet18,
        Recipe(
            epochs=50,
            learning_rate=0.01,
            batch_size=256,
            use_adam=True,
            ema_decay=0.9999,
            half_precision=True,
        ),
    ),
}
# A recipe of more than 50 epochs gets fewer epochs on a set for which it would take more steps.
MAX_TRAINING_STEPS = 60_000 // 256 * 50


def train_downstream_network(
    name: str,
    images: Tensor,
    labels: Tensor,
    spec: Spec,
    device: torch.device,
    seed: int = 0,
    progress: Progress = ignore_progress,
    *,
    soft_labels: Tensor | None = None,
    repeats: int = 1,
) -> tuple[Classifier, str]:
    """Train a network of `DOWNSTREAM_NETWORKS` by its protocol on synthetic images.

    Args:
        name: A key of `DOWNSTREAM_NETWORKS`.
        images: Synthetic images [count, channels, height, width] in [0, 1].
        labels: Their labels [count].
        spec: Spec of the test data. It declares whether images may be mirrored.
        device: Where the network is trained.
        seed: Seed of the training.
        progress: Called after each epoch.
        soft_labels: Soft labels [count, classes], used instead of ``labels``.
        repeats: Number of independent trainings, which run batched.

    Returns:
        The classifier and the text of its protocol.
    """
    build = DOWNSTREAM_NETWORKS[name][0]
    recipe = shorten_recipe(DOWNSTREAM_NETWORKS[name][1], len(labels))
    augmentations = list_augmentations(spec.is_flip_invariant) if recipe.augmentations else ()
    recipe = replace(recipe, augmentations=augmentations, num_repeats=repeats)
    targets = labels
    if soft_labels is not None:  # the test data may have more classes
        targets = pad(soft_labels, (0, spec.num_classes - soft_labels.shape[1]))
    classifier = train_classifier(
        build,
        images,
        targets,
        spec.num_classes,
        recipe,
        device,
        seed=seed,
        progress=progress,
        stage=f"training {name}",
    )
    facts = [f"{build.__name__}, {recipe}"]
    if repeats > 1:
        facts.append("mean over the trainings, the error is their standard deviation")
    if soft_labels is not None:
        facts.append("soft labels")
    return classifier, "; ".join(facts)


def shorten_recipe(recipe: Recipe, num_samples: int) -> Recipe:
    """Reduce the epochs of a recipe that was made for small sets, if the set is large.

    Args:
        recipe: The recipe.
        num_samples: Number of training images.

    Returns:
        The recipe, with epochs and milestones scaled to at most `MAX_TRAINING_STEPS` steps if it
        has more than 50 epochs.
    """
    num_steps = recipe.epochs * recipe.steps_per_epoch(num_samples)
    if recipe.epochs <= 50 or num_steps <= MAX_TRAINING_STEPS:
        return recipe
    scale = MAX_TRAINING_STEPS / num_steps
    return replace(
        recipe,
        epochs=max(1, round(recipe.epochs * scale)),
        lr_milestones=tuple(round(milestone * scale) for milestone in recipe.lr_milestones),
    )
