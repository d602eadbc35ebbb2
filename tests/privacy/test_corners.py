"""Corners of the trusted part that small changes of it had passed unnoticed, or that no other test walks into."""

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
from privot.errors import BudgetError, DataError, PlanError, SettingError
from privot.local.channels import Laplace, Projection
from privot.local.dataset import FILE_FORMAT, PrivatizedDataset, check_new_privatized_path
from privot.local.privatize import privatize
from privot.privacy.accounting import Neighbours, compute_privacy_cost
from privot.privacy.client_partition import client_partition
from privot.privacy.gate import Gate
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.pure_epsilon import randomized_response_event
from privot.privacy.sampling import Poisson
from privot.runtime import Runtime
from privot.runtime.process_group import SingleProcess, read_torchrun_rank

REPLACE = Neighbours.REPLACE
LOCAL = Neighbours.LOCAL
FREE = Budget(math.inf)


@pytest.mark.parametrize("pure", [0.1, 1.0, 3.0])
def test_a_pure_epsilon_beside_a_gaussian_costs_what_the_integral_says(pure):
    """A coin that leans by e^pure, and a Gaussian answer: the two outcomes of the coin, each beside the Gaussian's own integral."""
    noise = 0.8
    step = 1e-4
    found = compute_privacy_cost(
        dpa.ComposedDpEvent([randomized_response_event(1 / pure), dpa.GaussianDpEvent(noise)]),
        REPLACE,
    )
    x = np.arange(-12, 12, step)
    here, there = (
        np.exp(-((x - each) ** 2) / 2) / math.sqrt(2 * math.pi) for each in (1 / noise, 0.0)
    )
    heads = 1 / (1 + math.exp(-pure))
    for epsilon in (pure, pure + 0.3, pure + 2.0):
        sides = ((heads, 1 - heads), (1 - heads, heads))
        truth = sum(
            np.maximum(p * here - math.exp(epsilon) * q * there, 0).sum() * step for p, q in sides
        )
        assert found.delta(epsilon).item() == pytest.approx(truth, rel=1e-4, abs=1e-9), (
            "the profile of a sum is not that of its parts"
        )


@pytest.mark.parametrize("law", ["laplace", "randomized_response", "unheard of"])
def test_other_laws_are_for_whole_draws_alone(law):
    with pytest.raises(PlanError, match="has no proof with Poisson sampling"):
        Stage("it", "privatize", 1.0, 1, Poisson(0.5), law)


def test_a_law_that_nobody_knows_has_no_proof():
    with pytest.raises(PlanError, match="unheard of"):
        Stage("it", "privatize", 1.0, mechanism="unheard of")


def test_answers_of_each_record_need_a_declared_size(ledger):
    channel = Laplace.calibrate(1.0, projection=Projection(shape=(1, 2, 2)))
    box = Sensitive(np.zeros((3, 1, 2, 2)), np.zeros(3, int), Spec((1, 2, 2), 1))
    with pytest.raises(PlanError, match="declared public"):
        Gate(box, channel.plan(), ledger, FREE).privatize(channel)
    assert ledger.entries() == [], "nothing is charged for a refusal"


def test_records_do_not_go_to_several_processes(box, ledger):
    class Two(SingleProcess):
        world_size = 2

    plan = Plan((Stage("it", "sum_over_shards", 0.0),), REPLACE)
    with pytest.raises(PlanError, match="without torchrun"):
        Gate(box, plan, ledger, FREE, process_group=Two()).read_without_guarantee("no proof")
    assert ledger.entries() == [], "nothing is charged for a refusal"


def test_words_in_the_place_of_a_rank_are_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "first")
    with pytest.raises(SettingError, match="Let torchrun set them"):
        read_torchrun_rank()


def test_an_owner_with_too_few_records_for_its_parts_is_not_told_from_others(ledger):
    """Its second part has black images, and no record of another part."""
    images = np.ones((5, 1, 1, 1))
    owners = np.array([0, 0, 0, 0, 1])
    box = Sensitive(images, np.zeros(5, int), Spec((1, 1, 1), 1, num_clients=2), client_ids=owners)
    plan = Plan((Stage("it", "query_clients", 0.0),), REPLACE)
    gate = Gate(box, plan, ledger, FREE)
    gate.split_into_shards(4, {"it": torch.zeros(4)}, 3)
    assert gate._shards[0].images.flatten(1).tolist() == [[1.0] * 3] * 3 + [[0.0] * 3]


def test_a_draw_of_few_is_not_walked_as_if_it_were_of_all(ledger):
    """As many portions as the draw fills, and one at least: a portion that nobody is in would still be asked."""
    box = Sensitive(np.zeros((8, 1, 1, 1)), np.zeros(8, int), Spec((1, 1, 1), 1))
    gate = Gate(
        box,
        Plan((Stage("it", "sum", 1.0, 1, Poisson(1e-15)),), Neighbours.ADD_REMOVE),
        ledger,
        Budget(1e9),
        runtime=Runtime("cpu", 1),
    )
    assert [len(part.labels) for part in gate._draw_chunks(gate.plan.stages[0])] == [0]


# What is read


@pytest.mark.parametrize(
    ("resize", "said"),
    [
        (1, "only images of a folder"),
        (MAX_IMAGE_SIDE, "only images of a folder"),
        (0, "per side"),
        (MAX_IMAGE_SIDE + 1, "per side"),
    ],
)
def test_sides_go_from_one_pixel_to_the_largest(tmp_path, resize, said):
    """Arrays are not resized, which is said of a size that could be."""
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 1, 2, 2), np.uint8), y=np.arange(2))
    with pytest.raises(SettingError, match=said):
        load_dataset(tmp_path / "x.npz", resize=resize)


@pytest.mark.parametrize("channels", [1, 3])
def test_public_pictures_take_the_colours_of_the_sensitive_ones(tmp_path, channels):
    rng = np.random.default_rng(0)
    pictures = rng.random((4, 4 - channels, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "public.npz", x=pictures, y=np.arange(4) % 2)
    box = Sensitive(
        np.zeros((2, channels, 8, 8)), np.arange(2), Spec((channels, 8, 8), 2), name="box"
    )
    images, facts = load_public_images(str(tmp_path / "public.npz"), box)
    wanted = pictures.mean(1, keepdims=True) if channels == 1 else pictures.repeat(3, 1)
    assert images.shape == (4, channels, 8, 8)
    assert torch.allclose(images, torch.from_numpy(wanted), atol=1e-6), (
        "grey is the mean of the colours, and colours are grey thrice"
    )
    assert facts["count"] == 4


def test_what_one_owner_holds_is_its_own_and_of_unknown_number(ledger):
    whose = [0, 1, 0, 1, 0]
    box = Sensitive(
        np.arange(5.0)[:, None, None, None] / 5,
        np.zeros(5, int),
        Spec((1, 1, 1), 1, num_clients=2),
        name="wards",
        client_ids=whose,
    )
    for owner, values in ((0, [0.0, 0.4, 0.8]), (1, [0.2, 0.6])):
        part = client_partition(box, owner, ledger)
        assert part._read_records(slice(None)).images.flatten().tolist() == pytest.approx(values)
        assert (part.spec.size, part.spec.num_clients) == (None, None)
    for owner in (-1, 2):
        with pytest.raises(SettingError, match="counted from 0"):
            client_partition(box, owner, ledger)


def test_an_owner_s_file_needs_declared_classes_and_sound_labels(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((3, 1, 2, 2), np.uint8), y=np.array([0, 2, 2]))
    box = load_client_data(tmp_path / "own.npz", num_classes=4, shape=(1, 2, 2))
    assert (box.spec.shape, box.spec.num_classes, box.spec.size) == ((1, 2, 2), 4, None)
    small = {"shape": (1, 2, 2)}
    for declared, said in (
        ({}, "declare --shape"),
        ({"num_classes": 4}, "declare --shape"),
        (small, "or --class-names"),
        (small | {"num_classes": 2}, "own.npz"),
        ({"num_classes": 3, "shape": (1, 3, 3)}, "own.npz"),
    ):
        with pytest.raises((SettingError, DataError), match=said):
            load_client_data(tmp_path / "own.npz", **declared)
    np.savez(tmp_path / "none.npz", x=np.zeros((0, 1, 2, 2), np.uint8), y=np.zeros(0, int))
    np.savez(tmp_path / "half.npz", x=np.zeros((2, 1, 2, 2), np.uint8), y=np.array([0.5, 1]))
    for name in ("none", "half"):
        with pytest.raises(DataError, match="labels"):
            load_client_data(tmp_path / f"{name}.npz", num_classes=2, shape=(1, 2, 2))


def test_a_table_is_an_npz_or_a_csv(tmp_path):
    (tmp_path / "people.txt").write_text("1,2")
    with pytest.raises(DataError, match="a table is"):
        read_table(tmp_path / "people.txt")
    np.savez(tmp_path / "y.npz", y=np.zeros((2, 2)))
    with pytest.raises(DataError, match="the array x is not in it"):
        read_table(tmp_path / "y.npz")
    (tmp_path / "nan.csv").write_text("a,b\n1,2\nnan,3\n")
    with pytest.raises(DataError, match=r"nan\.csv: row 1"):
        read_table(tmp_path / "nan.csv")


def test_places_for_privatized_records(tmp_path):
    with pytest.raises(DataError, match="ends in"):
        check_new_privatized_path(tmp_path / "sent.npz")
    with pytest.raises(DataError, match="does not exist or cannot be written"):
        check_new_privatized_path(tmp_path / "nowhere" / "sent.safetensors")


def test_as_many_answers_as_are_declared(tmp_path):
    channel = Laplace.calibrate(1.0, projection=Projection(shape=(1, 1, 2)))
    made = privatize(SensitiveTable(np.zeros((3, 2))), channel, ledger=tmp_path / "book.jsonl")
    with pytest.raises(DataError, match="declares 4 records"):
        PrivatizedDataset(made.values, channel, Spec((1, 1, 2), 1, 4), "x")


def test_a_sound_file_that_does_not_fit_its_spec_is_refused_by_name(tmp_path):
    """Whoever can write a file can write its digest, too: what it says is checked all the same."""
    channel = Laplace.calibrate(1.0, projection=Projection(shape=(1, 1, 2)))
    made = privatize(SensitiveTable(np.zeros((3, 2))), channel, ledger=tmp_path / "book.jsonl")
    for spec in (Spec((1, 1, 2), 1, 4), Spec((1, 1, 4), 1, 3)):
        head = {
            "format": FILE_FORMAT,
            "channel": channel.to_json(),
            "spec": spec.to_json(),
            "count": 3,
        }
        digest = hashlib.sha256(
            json.dumps(head, sort_keys=True).encode() + made.values.numpy().tobytes()
        ).hexdigest()
        (tmp_path / "sent.safetensors").write_bytes(
            save({"values": made.values}, {"privot": json.dumps({**head, "digest": digest})})
        )
        with pytest.raises(
            DataError, match=r"sent\.safetensors: .*(declares 4 records|does not fit)"
        ):
            PrivatizedDataset.load(tmp_path / "sent.safetensors")


def test_a_channel_uses_up_its_plan(tmp_path, ledger):
    channel = Laplace.calibrate(1.0, projection=Projection(shape=(1, 1, 2)))
    gate = Gate(SensitiveTable(np.zeros((3, 2))), channel.plan(), ledger, FREE)
    assert gate.privatize(channel).shape == (3, 2)
    assert [gate.count_remaining_queries(stage.name) for stage in channel.plan().stages] == [
        0
    ] * len(channel.plan().stages)
    with pytest.raises(BudgetError, match="used up"):
        gate.privatize(channel)


def test_of_a_folder_only_finished_files_of_ours_are_read(tmp_path):
    channel = Laplace.calibrate(1.0, projection=Projection(shape=(1, 1, 2)))
    (tmp_path / "sent").mkdir()
    for name in ("a", "b"):
        privatize(
            SensitiveTable(np.zeros((3, 2))),
            channel,
            out=tmp_path / "sent" / f"{name}.safetensors",
            ledger=tmp_path / "book.jsonl",
        )
    (tmp_path / "sent" / "notes.txt").write_text("mine")
    (tmp_path / "sent" / ".c.safetensors").write_text("half of it")
    assert len(PrivatizedDataset.load(tmp_path / "sent").values) == 6


def test_what_a_ledger_spent_is_of_the_relation_of_its_runs(ledger):
    plan = Plan(
        (Stage("drawn", "sum", 4.0, 3, Poisson(0.25)),), Neighbours.ADD_REMOVE
    )  # such draws have no price for replace-one
    ledger.reserve(plan, "mine")
    assert ledger.compute_spent_cost().epsilon(1e-5) == pytest.approx(plan.cost().epsilon(1e-5))
