"""Corners of modules that no other test walks into."""

import contextlib
import hashlib
import json
import math

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from safetensors.torch import save

from privot.data import load_dataset
from privot.data.client_data import load_client_data
from privot.data.dataset import Sensitive
from privot.data.public_images import load_public_images
from privot.data.spec import MAX_IMAGE_SIDE, Spec
from privot.data.tabular import SensitiveTable, read_table
from privot.errors import DataError, PlanError, SettingError
from privot.local.channels import Laplace, Projection
from privot.local.dataset import FILE_FORMAT, PrivatizedDataset, check_new_privatized_path
from privot.local.privatize import privatize
from privot.privacy.accounting import compute_privacy_cost
from privot.privacy.plan import Neighbours, Stage
from privot.privacy.pure_epsilon import randomized_response_event
from privot.privacy.sampling import Poisson
from privot.runtime import process_group
from privot.runtime.cuda_graphs import WARMUP_CALLS, GraphCache

CHANNEL = Laplace.calibrate(1.0, projection=Projection(shape=(1, 1, 2)))


@pytest.mark.parametrize("pure", [0.1, 1.0, 3.0])
def test_a_pure_epsilon_beside_a_gaussian_costs_what_the_integral_says(pure):
    """Of a coin that leans by e^pure and a Gaussian: the integral beside both sides of the coin."""
    noise = 0.8
    step = 1e-4
    event = dpa.ComposedDpEvent([randomized_response_event(1 / pure), dpa.GaussianDpEvent(noise)])
    cost = compute_privacy_cost(event, Neighbours.REPLACE)
    x = np.arange(-12, 12, step)
    scale = math.sqrt(2 * math.pi)
    p, q = (np.exp(-((x - mean) ** 2) / 2) / scale for mean in (1 / noise, 0.0))
    heads = 1 / (1 + math.exp(-pure))
    for epsilon in (pure, pure + 0.3, pure + 2.0):
        delta = sum(
            np.maximum(one * p - math.exp(epsilon) * other * q, 0).sum() * step
            for one, other in ((heads, 1 - heads), (1 - heads, heads))
        )
        assert cost.delta(epsilon).item() == pytest.approx(delta, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("mechanism", ["laplace", "randomized_response", "unheard of"])
def test_other_mechanisms_are_for_full_samples_alone(mechanism):
    with pytest.raises(PlanError, match=f"{mechanism} has no proof with Poisson sampling"):
        Stage("it", "privatize", 1.0, 1, Poisson(0.5), mechanism)
    with pytest.raises(PlanError, match="unheard of"):
        Stage("it", "privatize", 1.0, mechanism="unheard of")


# What is read


@pytest.mark.parametrize("resize", [1, MAX_IMAGE_SIDE])
def test_arrays_are_not_resized(tmp_path, resize):
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 1, 2, 2), np.uint8), y=np.arange(2))
    with pytest.raises(SettingError, match="only images of a folder"):
        load_dataset(tmp_path / "x.npz", resize=resize)


@pytest.mark.parametrize("channels", [1, 3])
def test_public_images_take_the_channels_of_the_sensitive_ones(tmp_path, channels):
    """Grey is the mean of the colours, and colours are grey thrice."""
    images = np.random.default_rng(0).random((4, 4 - channels, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "public.npz", x=images, y=np.arange(4) % 2)
    spec = Spec((channels, 8, 8), 2)
    dataset = Sensitive(np.zeros((2, channels, 8, 8)), np.arange(2), spec, name="it")
    public, facts = load_public_images(str(tmp_path / "public.npz"), dataset)
    expected = images.mean(1, keepdims=True) if channels == 1 else images.repeat(3, 1)
    assert public.shape == (4, channels, 8, 8)
    assert torch.allclose(public, torch.from_numpy(expected), atol=1e-6)
    assert facts["count"] == 4


@pytest.mark.parametrize(
    ("labels", "shape", "message"),
    [([], (1, 2, 2), "labels"), ([0.5, 1], (1, 2, 2), "labels"), ([0, 2], (1, 3, 3), "own.npz")],
)
def test_a_client_s_file_is_of_the_declared_shape_with_sound_labels(
    tmp_path, labels, shape, message
):
    np.savez(tmp_path / "own.npz", x=np.zeros((len(labels), 1, 2, 2), np.uint8), y=labels)
    with pytest.raises(DataError, match=message):
        load_client_data(tmp_path / "own.npz", num_classes=3, shape=shape)


def test_a_table_is_an_npz_or_a_csv_of_finite_numbers(tmp_path):
    (tmp_path / "people.txt").write_text("1,2")
    np.savez(tmp_path / "y.npz", y=np.zeros((2, 2)))
    (tmp_path / "nan.csv").write_text("a,b\n1,2\nnan,3\n")
    for name, message in (
        ("people.txt", "a table is"),
        ("y.npz", "the array x is not in it"),
        ("nan.csv", r"nan\.csv: row 1"),
    ):
        with pytest.raises(DataError, match=message):
            read_table(tmp_path / name)


# Privatized records


def privatize_table(folder, **more):
    table = SensitiveTable(np.zeros((3, 2)))
    return privatize(table, CHANNEL, ledger=folder / "ledger.jsonl", **more)


def test_privatized_records_are_written_where_they_can_be_read(tmp_path):
    """Of a folder, files with another suffix and those that are not finished are not read."""
    for path, message in (("x.npz", "ends in"), ("no/x.safetensors", "does not exist or cannot")):
        with pytest.raises(DataError, match=message):
            check_new_privatized_path(tmp_path / path)
    folder = tmp_path / "sent"
    folder.mkdir()
    for name in ("a", "b"):
        privatize_table(tmp_path, out=folder / f"{name}.safetensors")
    (folder / "notes.txt").write_text("mine")
    (folder / ".c.safetensors").write_text("half of it")
    assert len(PrivatizedDataset.load(folder).values) == 6


@pytest.mark.parametrize("spec", [Spec((1, 1, 2), 1, 4), Spec((1, 1, 4), 1, 3)])
def test_a_sound_file_that_does_not_fit_its_spec_is_refused_by_name(tmp_path, spec):
    """Whoever can write a file can write its digest, so what it says is checked all the same."""
    values = privatize_table(tmp_path).values
    channel = CHANNEL.to_json()
    header = {"format": FILE_FORMAT, "channel": channel, "spec": spec.to_json(), "count": 3}
    content = json.dumps(header, sort_keys=True).encode() + values.numpy().tobytes()
    header["digest"] = hashlib.sha256(content).hexdigest()
    file = tmp_path / "sent.safetensors"
    file.write_bytes(save({"values": values}, {"privot": json.dumps(header)}))
    with pytest.raises(DataError, match=r"sent\.safetensors: .*(declares 4 records|does not fit)"):
        PrivatizedDataset.load(file)


# Graphs and processes


def test_a_captured_step_is_replayed_on_new_arguments(monkeypatch):
    """As if on a GPU: nothing runs during a capture, and replays read the newest arguments."""
    total = torch.zeros(())
    capturing = []
    graphs = []
    pools = []

    class Graph:
        def __init__(self):
            graphs.append(self)

        def replay(self):
            self.step()

    @contextlib.contextmanager
    def capture(graph, pool, capture_error_mode):
        capturing.append(graph)
        pools.append(pool)
        yield
        capturing.pop()

    def step(value, factor):
        if capturing:
            capturing[-1].step = lambda: total.add_(value * factor)
        else:
            total.add_(value * factor)
        return True

    handles = iter(("pool", "another"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    expected = 0
    for device in ("cpu", "cuda"):
        cache = GraphCache(torch.device(device))
        for turn in range(WARMUP_CALLS + 4):
            for factor in (1.0, 3.0):
                assert cache(step, "it", torch.tensor(float(turn)), factor) is True
                expected += turn * factor
                assert total == expected
            assert len(graphs) == 2 * (device == "cuda" and turn >= WARMUP_CALLS)
    assert pools == ["pool"] * 2


@pytest.fixture
def torchrun(monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, "12111", strict=True):
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_rank_that_is_no_integer_is_refused(torchrun):
    torchrun.setenv("RANK", "first")
    with pytest.raises(SettingError, match="Let torchrun set them"):
        process_group.read_torchrun_rank()


@pytest.mark.parametrize("error", [RuntimeError("10.0.0.1 refused"), ValueError("port")])
def test_processes_that_cannot_be_reached_are_reported_in_a_line(torchrun, error):
    def fail(*arguments, **more):
        raise error

    torchrun.setattr(torch.distributed, "is_initialized", lambda: False)
    torchrun.setattr(torch.distributed, "init_process_group", fail)
    message = rf"cannot be reached \({type(error).__name__}\)"
    with pytest.raises(process_group.ProcessGroupError, match=message):
        process_group.join_process_group(torch.device("cpu"), "run")


def test_a_process_group_of_the_caller_stays_open(torchrun):
    torchrun.setattr(torch.distributed, "is_initialized", lambda: True)
    torchrun.setattr(torch.distributed, "init_process_group", None)
    torchrun.setattr(torch.distributed, "broadcast", lambda value, source: None)
    torchrun.setattr(torch.distributed, "all_reduce", lambda value, kind: value.zero_())
    torchrun.setattr(torch.distributed, "destroy_process_group", None)
    group = process_group.join_process_group(torch.device("cpu"), "run")
    assert (group.rank, group.world_size, group.is_follower) == (1, 2, True)
    group.close()
