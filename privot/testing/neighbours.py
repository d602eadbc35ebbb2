"""Find what tells a dataset from its neighbour, or from any other dataset, around the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from privot.data.spec import Spec
from privot.methods import Method
from privot.privacy.plan import Neighbours
from privot.testing.recorder import LOCAL_SPEC, Recording, get_array_order, record_run
from privot.testing.tiny_data import NUM_CLASSES, NUM_CLIENTS, SHAPE, is_local, seal_records

Arrays = tuple[np.ndarray, ...]  # images, labels and, where clients differ, client ids

UNCHANGED = "unchanged"  # the control: the dataset itself


def _make_other_records(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Make records that have nothing to do with the tiny dataset."""
    rng = np.random.default_rng(11)
    return rng.random((count, *SHAPE), np.float32), rng.integers(0, NUM_CLASSES, count)


def _replace_records(
    images: np.ndarray,
    labels: np.ndarray,
    which: int | slice,
    new: tuple[np.ndarray | float, np.ndarray],
) -> Arrays:
    """Replace some records.

    Args:
        images: Images [records, channels, height, width].
        labels: Labels [records].
        which: The indices of the records.
        new: Their new images and labels.

    Returns:
        New arrays.
    """
    images = images.copy()
    labels = labels.copy()
    images[which] = new[0]
    labels[which] = new[1]
    return images, labels


def _empty_one_class(images: np.ndarray, labels: np.ndarray) -> Arrays:
    """Move the records of class 2, as black images, to class 0."""
    is_moved = labels == 2
    return np.where(is_moved[:, None, None, None], 0, images), np.where(is_moved, 0, labels)


# Other datasets by name. The removed record is the last one, so that a sampler that draws in the
# order of the records draws the others alike. The replaced one is the first, since the last may be
# left over by a split into shards. Doubling keeps every fraction.
CHANGES: dict[str, Callable[[np.ndarray, np.ndarray], Arrays]] = {
    "one replaced": lambda images, labels: _replace_records(
        images, labels, 0, (1.0, (labels[0] + 1) % NUM_CLASSES)
    ),
    "one removed": lambda images, labels: (images[:-1], labels[:-1]),
    "half replaced": lambda images, labels: _replace_records(
        images, labels, slice(0, len(labels) // 2), _make_other_records(len(labels) // 2)
    ),
    "all replaced": lambda images, labels: _make_other_records(len(labels)),
    "sign flipped": lambda images, labels: (1 - images, labels),
    "scaled": lambda images, labels: (images * np.float32(1e6), labels),
    "constant": lambda images, labels: (np.full_like(images, 0.5), labels),
    "duplicates": lambda images, labels: (images.repeat(2, 0), labels.repeat(2)),
    "one class empty": _empty_one_class,
    "labels permuted": lambda images, labels: (
        images,
        np.roll(labels, len(labels) // 2) * 2 % NUM_CLASSES,
    ),
    "one NaN": lambda images, labels: _replace_records(images, labels, 0, (np.nan, labels[0])),
    "reordered": lambda images, labels: (images[::-1].copy(), labels[::-1].copy()),
}


def _replace_client(images: np.ndarray, labels: np.ndarray, count: int) -> Arrays:
    """Give the first client ``count`` other records.

    Args:
        images: Images [records, channels, height, width].
        labels: Labels [records].
        count: The number of its new records.

    Returns:
        Images, labels and the client of each record.
    """
    client_ids = np.arange(len(labels)) % NUM_CLIENTS
    is_kept = client_ids > 0
    new_images, new_labels = _make_other_records(count)
    return (
        np.concatenate([images[is_kept], new_images]),
        np.concatenate([labels[is_kept], new_labels]),
        np.concatenate([client_ids[is_kept], np.zeros(count, int)]),
    )


# Where all records of a client are the unit of privacy.
CLIENT_CHANGES: dict[str, Callable[[np.ndarray, np.ndarray], Arrays]] = {
    "a client replaced": lambda images, labels: _replace_client(
        images, labels, len(labels[::NUM_CLIENTS])
    ),
    "a client with one record": lambda images, labels: _replace_client(images, labels, 1),
    "a client with many more": lambda images, labels: _replace_client(images, labels, 40),
}

# The changes that give a neighbour, whose true values must lie within the declared sensitivity.
NEIGHBOUR_CHANGES = {
    Neighbours.REPLACE: ("one replaced", "one NaN"),
    Neighbours.LOCAL: ("one replaced", "one NaN"),
    Neighbours.ADD_REMOVE: ("one removed",),
    Neighbours.CLIENT: ("one replaced", "one NaN", *CLIENT_CHANGES),
}


def change_records(change: str, images: np.ndarray, labels: np.ndarray, spec: Spec) -> Arrays:
    """Make the other dataset, with the sizes that the data owner declared.

    Only datasets that agree with the declaration can be mistaken for one another.

    Args:
        change: A name of `CHANGES` or `CLIENT_CHANGES`, or `UNCHANGED`.
        images: Images [records, channels, height, width].
        labels: Labels [records].
        spec: What the data owner declared.

    Returns:
        Images, labels and, for a change of a client, the client of each record.
    """
    if change in CLIENT_CHANGES:
        return CLIENT_CHANGES[change](images, labels)
    other = images
    other_labels = labels
    if change != UNCHANGED:
        other, other_labels = CHANGES[change](images, labels)
    if spec.size and len(other_labels) < spec.size:
        other = np.concatenate([other, np.zeros_like(images[:1])])
        other_labels = np.concatenate([other_labels, labels[-1:]])
    other = other[: spec.size]
    other_labels = other_labels[: spec.size]
    if spec.class_sizes:
        class_sizes = np.bincount(other_labels, minlength=spec.num_classes)
        if not np.array_equal(class_sizes, spec.class_sizes):
            other_labels = labels
    return other, other_labels


def find_leaks(
    method: Method,
    records: tuple[np.ndarray, np.ndarray],
    spec: Spec,
    folder: Path,
    changes: Iterable[str] | None = None,
) -> Iterator[tuple[str, object]]:
    """Run a method on a dataset and on others, and yield what tells them apart around the gate.

    Args:
        method: The method.
        records: Images and labels of the dataset.
        spec: What the data owner declares.
        folder: A folder for the runs; what lies in it is deleted.
        changes: Names of `CHANGES`; all that suit the method by default.

    Yields:
        (change, what differs). Nothing for an honest method.
    """
    spec = LOCAL_SPEC if is_local(method) else spec
    neighbours = method.plan(spec).neighbours
    if changes is None:
        changes = (*CHANGES, *(CLIENT_CHANGES if neighbours is Neighbours.CLIENT else ()))
    dataset = seal_records(*records, spec)
    record_run(method, dataset, folder)  # imports and caches of the first use depend on no record
    first_runs: dict[bool, Recording] = {}
    for change in changes:
        is_close = change in (UNCHANGED, *NEIGHBOUR_CHANGES[neighbours])
        if is_close not in first_runs:
            order = get_array_order(dataset) if is_close else None
            first_runs[is_close] = record_run(method, dataset, folder, order=order)
        first = first_runs[is_close]
        images, labels, *client_ids = change_records(change, *records, spec)
        other = seal_records(images, labels, spec, *client_ids)
        second = record_run(
            method,
            other,
            folder,
            results=first.results,
            order=get_array_order(other) if is_close else None,
        )
        outside = next(event for event in second.events if event[0] == "outside")
        if outside[1]:
            yield change, outside
        yield from ((change, leak) for leak in compare_runs(first, second, is_close))


def compare_runs(
    first: Recording, second: Recording, is_close: bool, changed_index: int = 0
) -> Iterator[object]:
    """Yield what tells two recordings apart.

    Args:
        first: A run on one dataset.
        second: The run on the other one, with the query results of the first.
        is_close: Whether the datasets are neighbours: then true values must lie within the
            declared sensitivity.
        changed_index: The position of the record that differs.

    Yields:
        Differing events, or a description.
    """
    if first.events != second.events:
        pairs = zip(first.events, second.events, strict=False)
        yield next((pair for pair in pairs if pair[0] != pair[1]), "one run shows more")
    elif first.release != second.release:
        yield "release"
    if not is_close:
        return
    for query_index, values in enumerate(zip(first.true_values, second.true_values, strict=False)):
        problem = _compare_values(*values, first, query_index, changed_index)
        if problem:
            yield f"query {query_index} {problem}"


def _compare_values(
    first: Tensor, second: Tensor, recording: Recording, query_index: int, changed_index: int
) -> str:
    """Describe how a true value moves more than it may.

    Args:
        first: The value of one dataset.
        second: The value of its neighbour.
        recording: The run on the first dataset.
        query_index: The index of the query.
        changed_index: The position of the record that differs, or of one of its client.

    Returns:
        A description; empty if the value keeps to its bound.
    """
    if first.shape != second.shape:
        return ""  # the events differ already
    sensitivity = recording.sensitivities[query_index]
    drawn_shards = recording.drawn_shards[query_index]
    clients = recording.queried_clients[query_index]
    num_shards = recording.shards_per_client[query_index]
    own_shard = changed_index % num_shards
    if clients is not None:
        own_shard = changed_index // NUM_CLIENTS % num_shards
        is_other = torch.tensor(clients) != changed_index % NUM_CLIENTS
        if (first != second)[is_other].any():
            return "moves in rows of another client"
        if is_other.all():
            return ""
        if drawn_shards is None:
            drawn_shards = torch.zeros(first.shape[:2], dtype=torch.int64)
        drawn_shards = drawn_shards.view(first.shape[:2])[~is_other].flatten()
        first = first[~is_other].flatten(0, 1)
        second = second[~is_other].flatten(0, 1)
    elif drawn_shards is None:
        first = first.flatten()[None]
        second = second.flatten()[None]
    distances = torch.linalg.vector_norm((first - second).flatten(1), dim=1)
    if drawn_shards is not None and distances[drawn_shards != own_shard].any():
        return "moves in rows that drew another shard"
    if distances.max() > sensitivity * (1 + 1e-9):
        return f"moves by {distances.max():.3g}, its declared sensitivity is {sensitivity:.3g}"
    return ""
