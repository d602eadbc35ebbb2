"""Attacks by the order of files: what the rows, shards and answers of a run tell of the place at which a reader found a record.

Each attack knows the files, their order and the method. With the order of the files in the place of the secret one (`leaky`), it breaks
the claim: it can see. With the gate as it is, it stays under the claim.
"""

import math

import numpy as np
import pytest
import torch
from support.fakes import FreePlan, NullLedger
from support.neighbour_files import Entry, coupled_orders, read_entries, write_entries

from privot.audit import audit_many_runs
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


@pytest.fixture
def leaky(monkeypatch):
    """Positions are those of the files, as they were before there was a secret order."""
    monkeypatch.setattr(
        Gate, "_get_secret_order", lambda gate: torch.arange(gate._dataset._count_records())
    )


def sent(box, channel):
    """What a client sends: values [records, pixels] and labels [records]; and, for the judge alone, which record each row is of."""
    gate = Gate(box, channel.plan(), NullLedger(), NullLedger(), runtime=CPU)
    rows = gate.privatize(channel).double().numpy()
    return rows[:, :-1], rows[:, -1], gate._get_secret_order().numpy()


# Labels by the place of a row


def two_classes(folder, count, first):
    """A folder of ``count`` grey images, ``first`` of them of the first class; images tell nothing of their class."""
    rng = np.random.default_rng(5)
    entries = [
        Entry(f"{place:05d}", rng.integers(0, 256, (SIDE, SIDE), np.uint8), int(place >= first))
        for place in range(count)
    ]
    return read_entries(write_entries("folder", folder, entries), Spec(SHAPE, 2, count))


def decoded(labels):
    """Labels by one change point: the prefix and the suffix whose noisy labels agree best with two classes, one after the other."""
    ones = np.concatenate([[0], np.cumsum(labels)])
    agreeing = (np.arange(len(ones)) - ones) + (
        ones[-1] - ones
    )  # zeros before the point, ones after it
    return (np.arange(len(labels)) >= int(np.argmax(agreeing))).astype(int)


EPSILON = 1.0  # 0.5 for the image and 0.5 for the label
ALLOWED = math.exp(EPSILON) / (
    1 + math.exp(EPSILON)
)  # of guesses of a fair bit that epsilon allows to be right


def hits(folder):
    """The share of rows whose true label the decoder gets right."""
    box = two_classes(folder, 4000, 2000)
    channel = build_image_channel(box.spec, "laplace", EPSILON / 2, labels_epsilon=EPSILON / 2)
    _, labels, order = sent(box, channel)
    return float((decoded(labels) == box._labels[order]).mean())


def test_labels_cannot_be_decoded_by_the_order_of_rows(tmp_path, trust):
    found = hits(tmp_path / "data")
    assert found <= ALLOWED + 0.01
    trust(
        "G10",
        "labels decoded by the order of rows",
        round(found, 4),
        note=f"of 4,000 records; the claim allows {ALLOWED:.3f}",
    )


def test_labels_can_be_decoded_where_rows_keep_the_order_of_files(tmp_path, leaky):
    assert hits(tmp_path / "data") > 0.9  # 0.98 to 0.9998


# Two folders in which one person changes class


def black_and_white(count, moved):
    """Images black and white by turns; the first record of the first class is in the last class instead if ``moved``."""
    images = [np.full((SIDE, SIDE), 255 * (place % 2), np.uint8) for place in range(count)]
    return [
        Entry(f"{place:05d}", image, int(place >= count // 2 or (moved and place == 0)))
        for place, image in enumerate(images)
    ]


def likelihood_scores(folder, runs, count=240):
    """For runs in either world the log-likelihood ratio of all rows, by an adversary who takes rows to be in the order of the files."""
    worlds = [
        read_entries(
            write_entries("folder", folder / str(moved), black_and_white(count, moved)),
            Spec(SHAPE, 2, count),
        )
        for moved in (False, True)
    ]
    channel = build_image_channel(
        worlds[0].spec, "laplace", EPSILON / 2, labels_epsilon=EPSILON / 2
    )
    images = [world._images.reshape(count, -1) / 255 for world in worlds]
    labels = [world._labels for world in worlds]
    scale = channel.parts[0].scale
    told = EPSILON / 2
    found = []
    for world in worlds:
        scores = []
        for _ in range(runs):
            values, marks, _ = sent(world, channel)
            near = [np.abs(values - each).sum(1) / scale for each in images]
            agree = [
                told * (marks == each) for each in labels
            ]  # a true label is exp(told) times as likely as another
            scores.append(float((near[0] - near[1] + agree[1] - agree[0]).sum()))
        found.append(np.array(scores))
    return found[1], found[0]


def test_an_audit_of_two_folders_proves_no_more_than_the_claim(tmp_path, trust):
    bound = audit_many_runs(*likelihood_scores(tmp_path, 400), 0.0, 0.95)
    assert bound.epsilon <= EPSILON
    trust(
        "G10",
        "epsilon proved of two folders, one file in another class",
        round(bound.epsilon, 3),
        note="claim 1, 95 %, 400 runs a side",
    )


def test_the_audit_breaks_the_claim_where_rows_keep_the_order_of_files(tmp_path, leaky):
    assert audit_many_runs(*likelihood_scores(tmp_path, 400), 0.0, 0.95).epsilon > 2 * EPSILON


# Shards by place

BATCH = 16


def first_answer(name, box, order, monkeypatch):
    """What all critics together say in a method's first answer, before its noise."""

    class Heard(Exception):
        pass

    heard = []

    def noisy(steps, noise_std, grid, secret):
        heard.append(steps * grid)
        raise Heard

    maker = make_method(
        name,
        {
            "num_critics": 20,
            "noise_multiplier": 1.0,
            "warmup_rounds": 2,
            "critic_batch_size": 4,
            "critic_learning_rate": 0.05,
            "critic_channels": 4,
            "batch_size": BATCH,
        },
    )
    plan = maker.plan(box.spec)
    with monkeypatch.context() as patch:
        patch.setattr(secret_side_module, "add_noise", noisy)
        patch.setattr(Gate, "_get_secret_order", lambda gate: torch.from_numpy(order))
        gate = Gate(
            box,
            FreePlan(plan.stages, plan.neighbours),
            NullLedger(),
            NullLedger(),
            runtime=CPU,
            insecure_seed=2,
        )
        with pytest.raises(Heard):
            maker.fit(gate, Streams(0, CPU), ignore_progress)
    return heard[0]


def digits_in_folders(folder, moved):
    from privot.data import load_dataset

    box = load_dataset("digits")
    images = (box._images[:200, 0] * 255).astype(np.uint8)
    labels = box._labels[:200].copy()
    if moved:  # one label becomes another
        labels[np.flatnonzero(labels == 0)[0]] = 9
    entries = [
        Entry(f"{place:05d}", image, int(label))
        for place, (image, label) in enumerate(zip(images, labels, strict=True))
    ]
    return read_entries(write_entries("folder", folder, entries), Spec((1, 8, 8), 10, 200))


def test_one_label_moves_the_sum_of_all_critics_no_further_than_its_bound(
    tmp_path, monkeypatch, trust
):
    pair = [digits_in_folders(tmp_path / str(moved), moved) for moved in (False, True)]
    reach = sensitivity_module.SENSITIVITY["sum_over_shards", Neighbours.REPLACE] * math.sqrt(BATCH)
    answers = [
        first_answer("g-pate", box, order, monkeypatch)
        for box, order in zip(pair, coupled_orders(*pair), strict=True)
    ]
    files = [first_answer("g-pate", box, np.arange(200), monkeypatch) for box in pair]
    moved, planted = (float((one - other).norm()) for one, other in (answers, files))
    assert moved <= reach
    assert planted > reach, "with shards by place in the files the same pair breaks the bound"
    trust(
        "G10",
        "how far one label moves g-pate's first answer, of its bound",
        round(moved / reach, 3),
        note=f"by place {planted / reach:.1f}",
    )
