"""Releases of shadows: from a random half of the candidates to what the method generates of it."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from torch import Tensor

from privot.attacks.shadows.config import PARALLEL_METHODS, ShadowConfig
from privot.attacks.shadows.store import ShadowStore
from privot.baselines.condensation import (
    ClassPool,
    count_images_per_class,
    explain_no_guarantee,
    initialize_images,
)
from privot.baselines.feature_means import choose_dm_learning_rate
from privot.baselines.parallel_matching import ParallelDistributionMatching
from privot.data.dataset import Records, Sensitive
from privot.data.spec import Spec
from privot.data.subset import declare_subset
from privot.errors import SettingError
from privot.io import to_jsonable, write_atomically
from privot.methods import make_method
from privot.privacy.guarantee import NoGuarantee
from privot.release import Release
from privot.release.artifact import Artifact
from privot.runtime import Progress, Runtime, Streams
from privot.synthesis import synthesize

MIN_SAVE_SECONDS = 0.2  # a state that is saved faster than this is saved every time
SAVE_INTERVAL_FACTOR = 20  # otherwise saving takes a twentieth of the time at most


def synthesize_sequentially(
    config: ShadowConfig,
    shadow_indices: list[int],
    membership: NDArray[np.bool_],
    runtime: Runtime,
    progress: Progress,
) -> None:
    """Run the method for one shadow after the other, as a data owner would.

    privacy: each run has a temporary ledger, since it is internal: its release is marked with the
    purpose ``shadow``, so that it does not verify as a release. The data sets' own ledgers list
    the runs (`privot.attacks.shadows.runner`).

    Args:
        config: What defines the shadows.
        shadow_indices: The shadows of the batch.
        membership: The half of each shadow, bool [shadows, candidates].
        runtime: Device and chunk sizes.
        progress: Passed to the method.
    """
    store = ShadowStore(config.folder)
    dataset = config.dataset
    method = make_method(config.method, config.settings)  # the same on every device
    for shadow_index in shadow_indices:
        if store.release_path(shadow_index).exists():
            continue
        images = dataset._images[membership[shadow_index]]
        labels = dataset._labels[membership[shadow_index]]
        half = Sensitive(
            images, labels, declare_subset(dataset.spec, labels), name="the half of a shadow"
        )
        with tempfile.TemporaryDirectory(dir=config.folder) as folder:
            release = synthesize(
                half,
                method,
                config.epsilon,
                ledger=f"{folder}/ledger.jsonl",
                seed=config.seed + 1 + shadow_index,
                runtime=runtime,
                progress=progress,
                purpose="shadow",
                on_warning=lambda text: None,
            )
        release.save(store.release_path(shadow_index))


def synthesize_in_parallel(
    config: ShadowConfig,
    shadow_indices: list[int],
    membership: NDArray[np.bool_],
    runtime: Runtime,
    progress: Progress,
) -> None:
    """Make the sets of a whole batch together, with one of `PARALLEL_METHODS`.

    Args:
        config: What defines the shadows.
        shadow_indices: The shadows of the batch.
        membership: The half of each shadow, bool [shadows, candidates].
        runtime: Device and chunk sizes.
        progress: Called with the steps of the method.
    """
    method: Any = make_method(config.method, config.settings)
    spec = config.dataset.spec
    images_per_class = _compute_images_per_class(config, method)
    records = config.dataset._read_records(slice(None), runtime.torch_device)
    initial_images = [
        _initialize_images(
            records, membership[index], spec, images_per_class, method.init, config.seed + 1 + index
        )
        for index in shadow_indices
    ]
    state_path = config.folder / f"state-{shadow_indices[0]:05d}.safetensors"
    sets = torch.stack(initial_images)
    if config.method == "distribution-matching":
        is_member = torch.from_numpy(membership[shadow_indices]).to(runtime.torch_device)
        matching = ParallelDistributionMatching(
            ClassPool(records, spec.num_classes),
            is_member,
            sets,
            spec,
            Streams(config.seed, runtime),
            batch_per_class=method.batch_per_class,
            augment=method.augment,
            learning_rate=method.learning_rate
            or choose_dm_learning_rate(method.init, images_per_class, method.steps),
            net_width=method.net_width,
            net_depth=method.net_depth,
        )
        saved_state = load_file(state_path) if state_path.exists() else None
        sets = matching.run(method.steps, progress, saved_state, _StateSaver(state_path))
    labels = torch.arange(spec.num_classes).repeat_interleave(images_per_class)
    _save_sets(config, shadow_indices, membership, sets.cpu(), labels)
    state_path.unlink(missing_ok=True)


class _StateSaver:
    """Saves the state of a long run, seldom enough that a slow disk does not delay it."""

    def __init__(self, path: Path):
        self.path = path
        self.last_save = time.monotonic()
        self.save_seconds = 0.0

    def __call__(self, state: dict[str, Tensor]) -> None:
        elapsed = time.monotonic() - self.last_save
        if (
            self.save_seconds >= MIN_SAVE_SECONDS
            and elapsed <= SAVE_INTERVAL_FACTOR * self.save_seconds
        ):
            return
        start = time.monotonic()
        tensors = {key: value.cpu().contiguous() for key, value in state.items()}
        write_atomically(self.path, save(tensors), private=True)
        self.last_save = time.monotonic()
        self.save_seconds = self.last_save - start


def _save_sets(
    config: ShadowConfig,
    shadow_indices: list[int],
    membership: NDArray[np.bool_],
    sets: Tensor,
    labels: Tensor,
) -> None:
    """Save a batch of sets as releases without a guarantee, marked as made for shadows.

    Args:
        config: What defines the shadows.
        shadow_indices: The shadows of the batch.
        membership: The half of each shadow, bool [shadows, candidates].
        sets: Images [shadows, size, channels, height, width] in [0, 1].
        labels: Labels of every set, [size].
    """
    store = ShadowStore(config.folder)
    method: Any = make_method(config.method, config.settings)
    spec = config.dataset.spec
    plan = method.plan(spec)
    no_guarantee = NoGuarantee(
        explain_no_guarantee(method.init)
        if config.method == "distribution-matching"
        else "these are real records"
    )
    for shadow_index, images in zip(shadow_indices, sets, strict=True):
        if store.release_path(shadow_index).exists():
            continue
        metadata = {
            "method": method.name,
            "settings": dataclasses.asdict(method),
            "plan": plan.to_json(),
            "event": str(plan.event()),
            "data": "",
            "purpose": "shadow",
            "seed": config.seed + 1 + shadow_index,
            "parallel_shadows": {"sets": len(shadow_indices), "seed": config.seed},
        }
        half_spec = declare_subset(spec, config.dataset._labels[membership[shadow_index]])
        release = Release(
            Artifact.from_images(images, labels), no_guarantee, half_spec, to_jsonable(metadata)
        )
        release.save(store.release_path(shadow_index))


def find_initial_candidates(config: ShadowConfig, shadow_index: int) -> NDArray[np.int64]:
    """Find the candidates that a set of a batch started from.

    Dong et al. (2022) attack these candidates in their Table 1.

    Args:
        config: What defines the shadows; sets must start from real images.
        shadow_index: The shadow.

    Returns:
        Indices of candidates, classes in order.

    Raises:
        SettingError: If sets of this method do not start from candidates.
    """
    method: Any = make_method(config.method, config.settings)
    if config.method not in PARALLEL_METHODS or method.init != "real":
        raise SettingError(
            f"{config.method}: its sets do not start from candidates. Use init=real or a real "
            "subset."
        )
    membership = ShadowStore(config.folder).load_membership()[shadow_index]
    chosen: NDArray[np.int64] = _choose_initial_indices(
        torch.from_numpy(config.dataset._labels),
        membership,
        config.dataset.spec,
        _compute_images_per_class(config, method),
        config.seed + 1 + shadow_index,
    ).numpy()
    return chosen


def _compute_images_per_class(config: ShadowConfig, method: Any) -> int:
    """Compute the images of each class of a set.

    A ratio is of half the candidates: the halves differ by a few records, but all sets of a batch
    have one size.
    """
    return count_images_per_class(
        method.images_per_class,
        method.ratio,
        config.dataset._count_records() // 2,
        config.dataset.spec.num_classes,
    )


def _initialize_images(
    records: Records,
    membership: NDArray[np.bool_],
    spec: Spec,
    images_per_class: int,
    init: str,
    seed: int,
) -> Tensor:
    """Compute the images that the method starts from with a seed and a half.

    Args:
        records: All candidates.
        membership: Which of them are in the half, bool [candidates].
        spec: Shape and classes.
        images_per_class: Images of each class.
        init: ``real`` or ``random``.
        seed: Public seed of the shadow.

    Returns:
        Images [num_classes * images_per_class, channels, height, width].
    """
    if init == "real":
        indices = _choose_initial_indices(records.labels, membership, spec, images_per_class, seed)
        return records.images[indices]
    # Random initial images do not depend on any record.
    rng = Streams(seed).make_rng("start")
    return initialize_images(records, spec, images_per_class, init, rng)[0]


def _choose_initial_indices(
    labels: Tensor, membership: NDArray[np.bool_], spec: Spec, images_per_class: int, seed: int
) -> Tensor:
    """Choose the records that the method starts from.

    The method's own function chooses among images that are the record indices, so no half of the
    images is copied.

    Args:
        labels: Labels of all candidates, [candidates].
        membership: Which of them are in the half, bool [candidates].
        spec: Shape and classes.
        images_per_class: Images of each class.
        seed: Public seed of the shadow.

    Returns:
        Indices of candidates, [num_classes * images_per_class].
    """
    indices = torch.from_numpy(np.flatnonzero(membership)).to(labels.device)
    index_records = Records(indices.view(-1, 1, 1, 1), labels[indices])
    rng = Streams(seed).make_rng("start")
    return initialize_images(index_records, spec, images_per_class, "real", rng)[0].flatten()
