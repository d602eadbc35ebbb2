"""Leaks between datasets that are files: one renamed, moved to another class, added, removed."""

import dataclasses
import shutil

import numpy as np
from support.neighbour_files import (
    CHANGES,
    coupled_orders,
    make_entries,
    read_entries,
    write_entries,
)

from privot.privacy.plan import Neighbours
from privot.testing.neighbours import compare_runs
from privot.testing.recorder import LOCAL_SPEC, record_run
from privot.testing.tiny_data import is_local, seal_records


def find_file_leaks(method, records, spec, folder, reader, changes=CHANGES, runtime=None):
    """Yield (change, what differs) around the gate, for each change of the files.

    Runs have coupled secret orders; the first pair is also run in orders of its own.
    """
    images, labels = records
    spec = LOCAL_SPEC if is_local(method) else spec
    entries = make_entries((np.clip(images[:, 0], 0, 1) * 255).astype(np.uint8), labels)
    files = folder.with_name("files")
    relation = method.plan(spec).neighbours
    close_relation = "replace" if relation is Neighbours.LOCAL else str(relation)
    record_run(method, seal_records(images, labels, spec), folder, runtime=runtime)  # first use
    for index, (change, (way, edit)) in enumerate(changes.items()):
        shutil.rmtree(files, ignore_errors=True)
        pair = [
            read_dataset(write_entries(reader, files / name, content), spec)
            for name, content in (("before", entries), ("after", edit(entries)))
        ]
        if not all(agrees_with(dataset, spec) for dataset in pair):
            continue  # the declaration tells them apart
        for dataset in pair:
            dataset.spec = spec
        orders = coupled_orders(*pair)
        changed_index = find_changed_index(pair, orders)
        for is_coupled in (True, False)[: 1 if index else 2]:
            first, second = orders if is_coupled else (None, None)
            one = record_run(method, pair[0], folder, order=first, runtime=runtime)
            two = record_run(
                method, pair[1], folder, results=one.results, order=second, runtime=runtime
            )
            is_close = is_coupled and way in ("same", close_relation)
            leaks = compare_runs(one, two, is_close, changed_index)
            yield from ((change, leak) for leak in leaks)


def read_dataset(path, spec):
    """Read files without a declaration of their sizes."""
    return read_entries(path, dataclasses.replace(spec, size=None, class_sizes=None), "tiny")


def agrees_with(dataset, spec):
    """Whether records are as many as declared, of each class too."""
    class_sizes = tuple(np.bincount(dataset._labels, minlength=spec.num_classes).tolist())
    size = dataset._count_records()
    return spec.size in (None, size) and spec.class_sizes in (None, class_sizes)


def find_changed_index(pair, orders):
    """The first position at which the records differ; beyond the shorter dataset all do."""
    size = min(map(len, orders))
    contents = [
        np.column_stack([dataset._images[order].reshape(len(order), -1), dataset._labels[order]])
        for dataset, order in zip(pair, orders, strict=True)
    ]
    differs = (contents[0][:size] != contents[1][:size]).any(1)
    return int(np.argmax(np.append(differs, True)))
