"""Attacks by the order of files: what the rows, shards and answers of a run tell of the position of a record in them.

Each attack knows the files, their order and the method. With the order of the files in the place of the secret one (`array_order`), it breaks
the claim: it can see. With the gate as it is, it stays under the claim.
"""

import math

import numpy as np
import pytest
import torch
from support.fakes import FreePlan, NullLedger
from support.neighbour_files import coupled_orders, make_entries, read_entries, write_entries

from privot.audit import audit_many_runs
from privot.data import load_dataset
from privot.data.spec import Spec
from privot.local.privatize import build_image_channel
from privot.methods import make_method
from privot.privacy import secret_side as secret_side_module
from privot.privacy import sensitivity as sensitivity_module
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.runtime import Runtime, Streams, ignore_progress

CPU = Runtime("cpu")
SIDE = 2
SHAPE = (1, SIDE, SIDE)


EPSILON = 1.0  # 0.5 for the image and 0.5 for the label
# of guesses of a fair bit that epsilon allows to be right
ALLOWED = math.exp(EPSILON) / (1 + math.exp(EPSILON))


def build_channel(dataset):
    return build_image_channel(dataset.spec, "laplace", EPSILON / 2, labels_epsilon=EPSILON / 2)


def send(dataset):
    """What a client sends: values [records, pixels] and labels [records]; and, for the judge alone, which record every row is of."""
    channel = build_channel(dataset)
    gate = Gate(dataset, channel.plan(), NullLedger(), NullLedger(), runtime=CPU)
    rows = gate.privatize(channel).double().numpy()
    return rows[:, :-1], rows[:, -1], gate._get_secret_order().numpy()


# Labels by the position of a row


def decode_labels(folder):
    """The share of rows whose true label is decoded by one change point: the one that agrees best with two classes, one after the other."""
    images = np.random.default_rng(5).integers(0, 256, (4000, SIDE, SIDE), np.uint8)
    entries = make_entries(images, np.arange(4000) >= 2000)
    dataset = read_entries(write_entries("npz", folder, entries), Spec(SHAPE, 2, 4000))
    _, labels, order = send(dataset)
    ones = np.concatenate([[0], np.cumsum(labels)])
    # zeros before the point, ones after it
    agreeing = (np.arange(len(ones)) - ones) + (ones[-1] - ones)
    decoded = np.arange(4000) >= np.argmax(agreeing)
    return float((decoded == dataset._labels[order]).mean())


def test_labels_cannot_be_decoded_by_the_order_of_rows(tmp_path, trust):
    share = decode_labels(tmp_path / "data")
    assert share <= ALLOWED + 0.01
    note = f"of 4,000 records; the claim allows {ALLOWED:.3f}"
    trust("G10", "labels decoded by the order of rows", round(share, 4), note=note)


def test_labels_can_be_decoded_where_rows_keep_the_order_of_files(tmp_path, array_order):
    assert decode_labels(tmp_path / "data") > 0.9  # 0.98 to 0.9998


# Two folders in which one person changes class: the images after the moved one shift by one


def prove_epsilon(folder, runs, count=240):
    """By the log-likelihood ratio of all rows, of an adversary who takes rows to be in the order of the files."""
    images = np.zeros((count, SIDE, SIDE), np.uint8)
    images[1::2] = 255
    labels = np.arange(count) >= count // 2
    worlds = []
    for name, first_label in (("moved", True), ("kept", False)):
        labels[0] = first_label
        path = write_entries("folder", folder / name, make_entries(images, labels))
        worlds.append(read_entries(path, Spec(SHAPE, 2, count)))
    scale = build_channel(worlds[0]).parts[0].scale
    scores = []
    for world in worlds:
        ratios = np.zeros(runs)
        for run in range(runs):
            values, noisy_labels, _ = send(world)
            for sign, guess in zip((1, -1), worlds, strict=True):
                distance = np.abs(values - guess._images.reshape(count, -1) / 255).sum() / scale
                # a true label is exp(EPSILON / 2) times as likely as another
                agreement = EPSILON / 2 * (noisy_labels == guess._labels).sum()
                ratios[run] += sign * (agreement - distance)
        scores.append(ratios)
    return audit_many_runs(*scores, 0.0, 0.95).epsilon


@pytest.mark.parametrize("runs", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_an_audit_of_two_folders_proves_no_more_than_the_claim(runs, tmp_path, trust):
    epsilon = prove_epsilon(tmp_path, runs)
    assert epsilon <= EPSILON
    if runs == 400:
        name = "epsilon proved of two folders, one file in another class"
        trust("G10", name, round(epsilon, 3), note="claim 1, 95 %, 400 runs a side")


def test_the_audit_breaks_the_claim_where_rows_keep_the_order_of_files(tmp_path, array_order):
    assert prove_epsilon(tmp_path, runs=200) > 2 * EPSILON


# Shards by position in the files

BATCH = 16


class Stopped(Exception):
    pass


def compute_first_answer(dataset, order, monkeypatch):
    """What all critics of g-pate together say in its first answer, before its noise."""
    answers = []

    def keep_answer(steps, noise_std, grid, secret):
        answers.append(steps * grid)
        raise Stopped

    settings = {
        "num_critics": 10,
        "noise_multiplier": 1.0,
        "warmup_rounds": 2,
        "critic_batch_size": 4,
        "critic_learning_rate": 0.05,
        "critic_channels": 4,
        "batch_size": BATCH,
    }
    method = make_method("g-pate", settings)
    plan = method.plan(dataset.spec)
    plan = FreePlan(plan.stages, plan.neighbours)
    with monkeypatch.context() as patch:
        patch.setattr(secret_side_module, "add_noise", keep_answer)
        patch.setattr(Gate, "_get_secret_order", lambda gate: torch.from_numpy(order))
        gate = Gate(dataset, plan, NullLedger(), NullLedger(), runtime=CPU, insecure_seed=2)
        with pytest.raises(Stopped):
            method.fit(gate, Streams(0, CPU), ignore_progress)
    return answers[0]


def test_one_label_moves_the_sum_of_all_critics_no_further_than_its_bound(
    tmp_path, monkeypatch, trust
):
    digits = load_dataset("digits")
    images = (digits._images[:200, 0] * 255).astype(np.uint8)
    labels = digits._labels[:200].copy()
    pair = []
    for name in ("one", "other"):
        path = write_entries("folder", tmp_path / name, make_entries(images, labels))
        pair.append(read_entries(path, Spec((1, 8, 8), 10, 200)))
        labels[np.flatnonzero(labels == 0)[0]] = 9
    bound = sensitivity_module.SENSITIVITY["sum_over_shards", Neighbours.REPLACE] * math.sqrt(BATCH)
    moved, planted = (
        float(
            torch.sub(
                *(
                    compute_first_answer(dataset, order, monkeypatch)
                    for dataset, order in zip(pair, orders, strict=True)
                )
            ).norm()
        )
        for orders in (coupled_orders(*pair), [np.arange(200)] * 2)
    )
    assert moved <= bound
    assert planted > bound, "with shards by position in the files the same pair breaks the bound"
    name = "how far one label moves g-pate's first answer, of its bound"
    trust("G10", name, round(moved / bound, 3), note=f"by place {planted / bound:.1f}")
