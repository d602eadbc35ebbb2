"""Neighbouring data sets: the records of a run with and without canaries."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from privot.audit.canaries import IN_DISTRIBUTION_KINDS, generate_canaries
from privot.data.dataset import Public, Records, Sensitive
from privot.data.spec import Spec
from privot.data.subset import declare_subset
from privot.errors import SettingError
from privot.privacy.plan import Neighbours


class CommonRecords(NamedTuple):
    """Records that every run has.

    Attributes:
        images: Images as they are stored, [count, channels, height, width].
        labels: Classes, [count].
        client_ids: The client of each record, [count].
    """

    images: np.ndarray
    labels: np.ndarray
    client_ids: np.ndarray


def split_records(
    dataset: Sensitive | Public, canary_kind: str, count: int, seed: int
) -> tuple[CommonRecords, Records]:
    """Divide a data set into records that every run has and canaries.

    Canaries that are made of records leave the common records. The adversary knows all common
    records, also which client has them.

    Args:
        dataset: The data set.
        canary_kind: One of `CANARY_KINDS`.
        count: Number of canaries.
        seed: Seed of the choice.

    Returns:
        Common records, of which some may have to be replaced, and canaries.

    Raises:
        SettingError: If there are too few records.
    """
    rng = torch.Generator().manual_seed(seed)
    images = dataset._images
    labels = dataset._labels
    client_ids = dataset._assign_clients(np.arange(len(labels)))
    if canary_kind not in IN_DISTRIBUTION_KINDS:
        canary_records = generate_canaries(canary_kind, dataset.spec, count, rng)
        return CommonRecords(images, labels, client_ids), canary_records
    if count >= len(labels):
        raise SettingError(
            f"canaries={count}: {canary_kind} canaries are taken from the records, and there are "
            f"only {len(labels)} of them"
        )
    order = torch.randperm(len(labels), generator=rng)
    chosen = dataset._read_records(order[:count])
    remaining = order[count:].sort().values.numpy()
    canary_records = generate_canaries(
        canary_kind, dataset.spec, count, rng, images=chosen.images, labels=chosen.labels
    )
    common = CommonRecords(images[remaining], labels[remaining], client_ids[remaining])
    return common, canary_records


def build_run_dataset(
    spec: Spec,
    neighbours: Neighbours,
    records: CommonRecords,
    canary_records: Records,
    included: np.ndarray,
) -> Sensitive:
    """Build the data set of one run.

    With and without a canary, the data sets are neighbours by the given relation: the canary is an
    additional record, or replaces one record, or replaces all records of one client and class.

    Args:
        spec: What is declared of the whole data set.
        neighbours: The relation of the method.
        records: Records that every run has.
        canary_records: The canaries.
        included: Which canaries the run includes, bool [canaries].

    Returns:
        The data set.
    """
    images, labels, client_ids = records
    scale, digits = (255, 0) if images.dtype == np.uint8 else (1, 7)
    canary_images = (
        (canary_records.images.numpy()[included] * scale).round(digits).astype(images.dtype)
    )
    if neighbours is Neighbours.ADD_REMOVE:
        images = np.concatenate([images, canary_images])
        labels = np.concatenate([labels, canary_records.labels.numpy()[included]])
        # With several clients, canaries belong to the first one.
        canary_clients = np.zeros(len(canary_images), client_ids.dtype)
        client_ids = np.concatenate([client_ids, canary_clients])
    elif included.any():
        images = np.array(images)
        replaced = _find_replaced_indices(neighbours, records, int(canary_records.labels[0]))
        images[replaced] = canary_images[0]
    return Sensitive(
        images,
        labels,
        declare_run_spec(spec, neighbours, labels),
        name="the data set of an audit run",
        client_ids=None if spec.num_clients is None else client_ids,
    )


def declare_run_spec(spec: Spec, neighbours: Neighbours, labels: np.ndarray) -> Spec:
    """Declare the facts about the data set of a run.

    Under add-remove, declared counts would reveal whether a canary is included, so none is
    declared.

    Args:
        spec: What is declared of the whole data set.
        neighbours: The relation of the method.
        labels: Classes of the run's records.

    Returns:
        The declaration.
    """
    if neighbours is Neighbours.ADD_REMOVE:
        return replace(spec, size=None, class_sizes=None)
    return declare_subset(spec, labels)


def _find_replaced_indices(
    neighbours: Neighbours, records: CommonRecords, label: int
) -> np.ndarray:
    """Find the records that a canary replaces, of its own class so that class sizes stay the same.

    Args:
        neighbours: The relation of the method.
        records: Records that every run has.
        label: Class of the canary.

    Returns:
        The first record of the class; where a client is protected, all records of the class that
        its client has.
    """
    in_class = np.flatnonzero(records.labels == label)
    if not len(in_class):
        raise SettingError(f"class {label} has no record that a canary could replace")
    if neighbours is Neighbours.CLIENT:
        same_client = records.client_ids[in_class] == records.client_ids[in_class[0]]
        return in_class[same_client]
    return in_class[:1]
