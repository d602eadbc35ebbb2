"""What a run writes, prints, asks and raises depends on query results alone; and the test can see."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.file_leaks import find_file_leaks
from support.neighbour_files import CHANGES as FILE_CHANGES
from support.neighbour_files import READERS
from support.tiny_settings import choose_tiny_settings, has_no_mechanism
from testing.miniatures import HONEST, LEAKS, ClientCritics, Means

from privot.local import privatize
from privot.local.dataset import PrivatizedDataset
from privot.methods import list_methods, make_method
from privot.privacy.gate import Gate
from privot.testing.neighbours import CHANGES, UNCHANGED, find_leaks
from privot.testing.recorder import record_run
from privot.testing.tiny_data import choose_spec, make_records, seal_records

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")
# These differ from run to run, or are caught without another dataset.
CAUGHT_UNCHANGED = ("secret_random_numbers", "file_elsewhere", "ScheduleFromDraws")


def make_tiny_method(name, **settings):
    return make_method(name, {**choose_tiny_settings(name), **settings})


WITH_A_MECHANISM = [
    name for name in sorted(list_methods()) if not has_no_mechanism(make_tiny_method(name))
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """One folder for all runs, so that no path tells them apart, and no ledger of another test."""
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "home"))
    return tmp_path / "run"


def declare_for(leaking_class):
    """A declaration of no more than shape and classes, and clients if the method needs them."""
    return choose_spec(ClientCritics() if issubclass(leaking_class, ClientCritics) else Means())


# Methods


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_A_MECHANISM)
def test_methods_leak_nothing_around_the_gate(name, folder, trust):
    method = make_tiny_method(name)
    assert list(find_leaks(method, make_records(), choose_spec(method), folder)) == []
    note = "pairs of datasets without a difference around the gate, 12 kinds a method"
    trust("G3", note, len(CHANGES), of=len(CHANGES))


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        pytest.param(name, reader, marks=[] if reader == READERS[index % 4] else pytest.mark.slow)
        for index, name in enumerate(WITH_A_MECHANISM)
        for reader in READERS
    ],
)
def test_methods_leak_nothing_through_a_reader(name, reader, folder, trust, request):
    changes = FILE_CHANGES
    if not request.node.get_closest_marker("slow"):
        changes = {change: changes[change] for change in ("one replaced", "one removed")}
    method = make_tiny_method(name)
    arguments = method, make_records(), choose_spec(method), folder, reader, changes
    assert list(find_file_leaks(*arguments)) == []
    trust("G3", "methods run on neighbouring files without a difference", 1, of=1)


@pytest.mark.parametrize("reader", READERS)
def test_shards_that_follow_the_files_are_caught(reader, folder, monkeypatch, trust):
    """One file that changes its class moves others to other shards."""

    def get_file_order(dataset):
        return torch.arange(dataset._count_records())

    monkeypatch.setattr(Gate, "_get_secret_order", lambda gate: get_file_order(gate._dataset))
    monkeypatch.setattr(
        "support.file_leaks.coupled_orders",
        lambda one, two: (get_file_order(one).numpy(), get_file_order(two).numpy()),
    )
    method = make_tiny_method("gs-wgan")
    changes = {change: FILE_CHANGES[change] for change in ("one renamed", "one replaced")}
    arguments = method, make_records(), choose_spec(method), folder, reader, changes
    assert any("moves" in str(leak) for _, leak in find_file_leaks(*arguments))
    trust("G3", "planted positions caught, a reader each", 1, of=1)


@pytest.mark.slow
def test_clients_in_turn_with_several_critics_leak_nothing(folder):
    method = make_tiny_method(
        "federated-gs-wgan", unit="record", num_critics=2, clients_per_round=2
    )
    changes = ["one replaced", "one NaN", "one removed", "all replaced"]
    assert list(find_leaks(method, make_records(), choose_spec(method), folder, changes)) == []


# Miniatures


@pytest.mark.parametrize("miniature", HONEST, ids=lambda miniature: miniature.__name__)
def test_honest_miniatures_make_a_release_and_leak_nothing(miniature, folder):
    spec = choose_spec(miniature())
    recording = record_run(miniature(), seal_records(*make_records(), spec), folder)
    assert [event for event in recording.events if event[0] == "error"] == []
    assert recording.release
    assert all(math.isfinite(result.abs().max()) for result in recording.results)
    assert list(find_leaks(miniature(), make_records(), spec, folder)) == []


@pytest.mark.parametrize("name", LEAKS)
def test_planted_leaks_are_caught_by_the_data_alone(name, folder, trust):
    # Only shape and classes are declared: then even the size is a secret.
    method = LEAKS[name]()
    spec = declare_for(LEAKS[name])
    assert next(find_leaks(method, make_records(), spec, folder), None) is not None
    if name not in CAUGHT_UNCHANGED:
        assert list(find_leaks(method, make_records(), spec, folder, [UNCHANGED])) == []
    trust("G3", "planted leaks caught", 1, of=1)


def test_what_a_client_sends_beside_its_channel_is_caught(folder, monkeypatch):
    """A file that tells how bright the first record is, in a fact that no channel made."""
    datasets = []
    save = PrivatizedDataset.save

    def open_gate(dataset, *args, **options):
        datasets.append(dataset)
        return Gate(dataset, *args, **options)

    def save_with_a_log(sent, out):
        save(sent, out)
        brightness = datasets[-1]._read_records(slice(0, 1)).images.mean()
        Path(out).with_suffix(".log").write_text(str(brightness))

    monkeypatch.setattr(privatize, "Gate", open_gate)
    monkeypatch.setattr(PrivatizedDataset, "save", save_with_a_log)
    method = make_tiny_method("entropic-gan")
    leaks = find_leaks(method, make_records(), choose_spec(method), folder)
    assert next(leaks, None) is not None


def test_the_lists_are_complete():
    assert len(CHANGES) == 12
    assert len(LEAKS) == 39
    records = make_records()
    changed = [change(*records) for change in CHANGES.values()]
    assert all(
        not np.array_equal(images, records[0], equal_nan=True)
        or not np.array_equal(labels, records[1])
        for images, labels in changed
    )
