"""Neighbours made as files and read back: whatever the reader, one record changes no more than the proofs say.

Two data sets of files are read, and every verb of the gate is asked of both, without noise, under secret orders that are coupled: equal
records have equal positions. Given such orders a renamed file may change nothing, and a changed one its own row and its own shard alone.
A gate that takes positions from the files, and not from its secret order, fails here.
"""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from assurance.mutate import Bug, changed
from support.fakes import FreePlan, NullLedger
from support.neighbour_files import (
    CHANGES,
    READERS,
    coupled_orders,
    make_entries,
    read_entries,
    write_entries,
)

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.local.channels import Composite
from privot.local.privatize import build_image_channel
from privot.privacy import client_partition as partition
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Stage
from privot.privacy.sampling import Fixed, Full, Poisson, Shards
from privot.privacy.sensitivity import SENSITIVITY
from privot.runtime import Runtime

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
COUNT = 26
SIDE = 4
CLASSES = 3
SHARDS = 5
OWNERS = 2
SHAPE = (1, SIDE, SIDE)
DIM = SIDE * SIDE
BOUND = 1.5
RNG = np.random.default_rng(3)
IMAGES = RNG.integers(0, 256, (COUNT, SIDE, SIDE), np.uint8)
LABELS = RNG.permutation(np.arange(COUNT) % CLASSES)


def pixels(image, label):
    return image.flatten() + label


def learn(images, labels, state):
    return {"it": state["it"] + images.flatten(1).sum(0) + labels.sum()}


def tell(state, row):
    return state["it"] + row


def give_order(gate, order):
    """Let the gate draw this secret order; what it draws after it comes of its own stream."""
    secret = gate._rng
    waiting = [torch.from_numpy(order.copy())]
    secret.permutation = lambda count: (
        waiting.pop() if waiting else SecretRandom.permutation(secret, count)
    )


class Asked:
    """One gate on one data set, in one secret order, without noise."""

    def __init__(self, box, verb, relation, sampling, order, device="cpu"):
        plan = FreePlan((Stage("it", verb, 0.0, 10**6, sampling),), relation)
        self.gate = Gate(
            box, plan, NullLedger(), NullLedger(), runtime=Runtime(device, 8), insecure_seed=1
        )
        give_order(self.gate, order)
        self.verb = verb

    def value(self):
        """What the verb answers; of a channel, what it is given."""
        gate = self.gate
        verb = self.verb
        if verb == "query_sample":
            return gate.query_sample(
                "it",
                lambda records: records.images.flatten(1).cumsum(0)[-1],
                clip_norm=BOUND,
                shape=(DIM,),
            )
        if verb == "sorted_blocks":
            frame = torch.linalg.qr(
                torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(0))
            ).Q
            return gate.sorted_blocks("it", pixels, frame=frame, num_blocks=2, clip_norm=BOUND)
        if verb in ("query_random_shards", "sum_over_shards", "query_clients"):
            self.split(SHARDS * OWNERS if verb == "query_clients" else SHARDS)
            if verb == "sum_over_shards":
                return gate.sum_over_shards("it", lambda state: state["it"], clip_norm=BOUND)
            rows = (
                torch.zeros(OWNERS, 9, device=gate._device)
                if verb == "query_clients"
                else torch.zeros(40, device=gate._device)
            )
            return getattr(gate, verb)("it", tell, rows, clip_norm=BOUND)
        return getattr(gate, verb)(
            "it", pixels, clip_norm=BOUND, **({"per_class": True} if verb == "sum" else {})
        )

    def split(self, count):
        self.gate.split_into_shards(
            count, {"it": torch.zeros(count, DIM)}, 4 if self.verb == "query_clients" else 0
        )
        self.gate.update_shards(learn)


CASES = {  # verb, relation, draws
    "sum": ("sum", REPLACE, Full()),
    "sum of some": ("sum", REPLACE, Fixed(9, COUNT)),
    "sum, add-remove": ("sum", ADD_REMOVE, Full()),
    "sum of some, add-remove": ("sum", ADD_REMOVE, Poisson(0.5)),
    "query_sample": ("query_sample", REPLACE, Full()),
    "query_sample of some": ("query_sample", REPLACE, Fixed(9, COUNT)),
    "rows": ("rows", REPLACE, Full()),
    "sorted_blocks": ("sorted_blocks", REPLACE, Full()),
    "query_random_shards": ("query_random_shards", REPLACE, Shards(SHARDS)),
    "sum_over_shards": ("sum_over_shards", REPLACE, Full()),
    "query_clients": ("query_clients", REPLACE, Shards(SHARDS)),
}


def boxes(reader, folder, kind):
    """Two neighbouring data sets as a reader finds them; what is declared of them is the same."""
    entries = make_entries(IMAGES, LABELS)
    return [
        sealed(write_entries(reader, folder / name, each))
        for name, each in (("here", entries), ("there", CHANGES[kind][1](entries)))
    ]


def sealed(source):
    return read_entries(source, Spec(SHAPE, CLASSES, num_clients=OWNERS))


def declared(box, verb):
    """The facts that this verb needs: under replace-one, all data sets of a size are neighbours of some other."""
    sizes = (
        tuple(np.bincount(box._labels, minlength=CLASSES).tolist())
        if verb == "sorted_blocks"
        else None
    )
    box.spec = Spec(
        SHAPE, CLASSES, COUNT, sizes, num_clients=OWNERS if verb == "query_clients" else None
    )
    return box


def moved(case, pair, orders, device="cpu"):
    """How far the answer moves, in units of its declared sensitivity, and how many of its rows do."""
    verb, relation, sampling = CASES[case]
    left, right = (
        Asked(declared(box, verb), verb, relation, sampling, order, device).value().cpu()
        for box, order in zip(pair, orders, strict=True)
    )
    rows = (left - right).flatten(0, 1) if verb == "query_clients" else left - right
    far = (
        rows.flatten(1).norm(dim=1)
        if verb in ("rows", "query_random_shards", "query_clients")
        else rows.norm()[None]
    )
    return float(far.max()) / (SENSITIVITY[verb, relation] * BOUND), int((far > 0).sum())


def fits(case, kind, reader):
    """Whether the two data sets are neighbours under the relation of the case; of declared class sizes, both must have them."""
    verb, relation, _ = CASES[case]
    way = CHANGES[kind][0]
    if verb == "sorted_blocks" and kind in ("one moved to another class", "one replaced"):
        return False
    return way == "same" or way == str(relation)


def problems(reader, folder, kinds=CHANGES, cases=CASES, device="cpu"):
    """(what was compared, what moved too far), for every verb."""
    compared = 0
    wrong = []
    for kind in kinds:
        pair = boxes(reader, folder / kind, kind)
        orders = coupled_orders(*pair)
        for case in cases:
            if not fits(case, kind, reader):
                continue
            compared += 1
            far, rows = moved(case, pair, orders, device)
            allowed = 0.0 if CHANGES[kind][0] == "same" else 1 + 1e-9
            if far > allowed or (case == "rows" and rows > 1):
                wrong.append((reader, kind, case, far, rows))
    return compared, wrong


@pytest.mark.parametrize("reader", READERS)
def test_one_file_moves_no_answer_beyond_its_bound(reader, tmp_path, trust):
    compared, wrong = problems(reader, tmp_path)
    assert wrong == []
    assert compared >= 50
    trust(
        "G10",
        "neighbours made as files, read and asked, none beyond its bound",
        compared,
        of=compared,
    )


def shards_that_differ(pair, orders, count=SHARDS):
    found = []
    for box, order in zip(pair, orders, strict=True):
        asked = Asked(
            declared(box, "query_random_shards"),
            "query_random_shards",
            REPLACE,
            Shards(count),
            order,
        )
        asked.split(count)
        found.append(asked.gate._shards[0])
    same = [
        torch.equal(found[0].images[each], found[1].images[each])
        and torch.equal(*(one.labels[each] for one in found))
        for each in range(count)
    ]
    return count - sum(same)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "kind", [kind for kind, (way, _) in CHANGES.items() if way != "add-remove"]
)
def test_one_file_changes_one_shard(reader, kind, tmp_path, trust):
    pair = boxes(reader, tmp_path, kind)
    assert shards_that_differ(pair, coupled_orders(*pair)) <= (CHANGES[kind][0] == "replace")
    trust("G10", "shards that one file changed, within the proof", 1, of=1)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "kind", [kind for kind, (way, _) in CHANGES.items() if way != "add-remove"]
)
def test_one_file_changes_one_row_that_is_sent(reader, kind, tmp_path):
    pair = boxes(reader, tmp_path, kind)
    channel = build_image_channel(Spec(SHAPE, CLASSES, COUNT), "laplace", 1.0, labels_epsilon=1.0)
    found = []
    for box, order in zip(pair, coupled_orders(*pair), strict=True):
        gate = Gate(
            declared(box, "privatize"),
            channel.plan(),
            NullLedger(),
            NullLedger(),
            runtime=Runtime("cpu", 8),
            insecure_seed=1,
        )
        give_order(gate, order)
        with mock.patch.object(Composite, "privatize", lambda self, records, secret: records):
            found.append(gate.privatize(channel))
    assert int((found[0] != found[1]).any(1).sum()) <= (CHANGES[kind][0] == "replace")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "kind", [kind for kind, (way, _) in CHANGES.items() if way != "add-remove"]
)
def test_one_file_changes_what_one_client_holds(reader, kind, tmp_path, monkeypatch):
    pair = boxes(reader, tmp_path, kind)
    changed_clients = []
    for client in range(OWNERS):
        parts = []
        for box, order in zip(pair, coupled_orders(*pair), strict=True):
            monkeypatch.setattr(
                partition,
                "load_client_order",
                lambda ledger, count, order=order: torch.from_numpy(order),
            )
            part = partition.client_partition(box, client, Ledger(tmp_path / "ledger.jsonl"))
            parts.append(
                sorted(
                    image.tobytes() + bytes([label])
                    for image, label in zip(part._images, part._labels, strict=True)
                )
            )
        changed_clients.append(parts[0] != parts[1])
    assert sum(changed_clients) <= (CHANGES[kind][0] == "replace")


# Planted bugs: each takes a position from the files


def sorted_by_label(gate):
    """A secret order that follows the records: those of a class lie together."""
    return torch.from_numpy(np.argsort(gate._dataset._labels, kind="stable"))


def rebuilt(name, old, new):
    """A function of the gate with one place of its source changed."""
    function = getattr(Gate, name)
    place = f"{function.__module__}:{function.__qualname__}"
    space = dict(function.__globals__)
    exec(
        "from __future__ import annotations\n"
        + changed(Bug("order", "planted", place, old, new, ())),
        space,
    )
    return space[name]


PLANTED = {
    "the order of the files is kept": lambda patch: patch.setattr(
        Gate, "_get_secret_order", lambda gate: torch.arange(gate._dataset._count_records())
    ),
    "the order follows the labels": lambda patch: patch.setattr(
        Gate, "_get_secret_order", sorted_by_label
    ),
    "draws come in the order of the files": lambda patch: patch.setattr(
        Gate,
        "_load_records",
        rebuilt(
            "_load_records",
            "self._dataset._read_records(self._get_secret_order()[positions], self._device)",
            "self._dataset._read_records(positions, self._device)",
        ),
    ),
    "shards by position in the files": lambda patch: patch.setattr(
        Gate,
        "_load_shard_records",
        rebuilt("_load_shard_records", "indices = order[positions]", "indices = positions"),
    ),
    "owners by position in the files": lambda patch: patch.setattr(
        Sensitive,
        "_assign_clients",
        lambda box, order: np.arange(box._count_records()) % (box.spec.num_clients or 1),
    ),
    "parts of an owner in the order of the files": lambda patch: patch.setattr(
        Sensitive,
        "_shard_record_indices",
        lambda box, *given, laid=Sensitive._shard_record_indices: laid(
            box, *given[:3], np.arange(box._count_records())
        ),
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.parametrize("reader", READERS)
def test_positions_taken_from_files_are_caught(bug, reader, tmp_path, monkeypatch, trust):
    PLANTED[bug](monkeypatch)
    kinds = [kind for kind, (way, _) in CHANGES.items() if way != "add-remove"]
    assert problems(reader, tmp_path, kinds)[1], "nothing was noticed"
    trust("G10", "planted positions caught, a bug and a reader each", 1, of=1)


@pytest.mark.parametrize("reader", READERS)
def test_a_shard_by_position_in_the_files_changes_many(reader, tmp_path, monkeypatch):
    """The finding itself: one file that changes its class moves others to other shards."""
    pair = boxes(reader, tmp_path, "one replaced")
    PLANTED["shards by position in the files"](monkeypatch)
    assert shards_that_differ(pair, coupled_orders(*pair)) > 1


# The secret order itself


@pytest.mark.parametrize("reader", READERS)
def test_a_record_has_every_position_equally_often(reader, tmp_path):
    """Whatever the reader: chi-square of where each of the records comes out, over 2,000 orders."""
    box = declared(
        sealed(write_entries(reader, tmp_path / "data", make_entries(IMAGES, LABELS))), "rows"
    )
    plan = FreePlan((Stage("it", "rows", 0.0),), REPLACE)
    seen = np.zeros((COUNT, COUNT))
    runs = 2000
    for _ in range(runs):
        gate = Gate(box, plan, NullLedger(), NullLedger(), runtime=Runtime("cpu"))
        seen[np.arange(COUNT), gate._get_secret_order().numpy()] += 1
    wanted = runs / COUNT
    square = ((seen - wanted) ** 2 / wanted).sum()  # (COUNT - 1)^2 degrees of freedom
    freedom = (COUNT - 1) ** 2
    assert abs(square - freedom) < 6 * math.sqrt(2 * freedom)


def test_the_order_depends_on_the_number_of_records_alone(tmp_path):
    one, other = boxes("folder", tmp_path, "one replaced")
    plan = FreePlan((Stage("it", "rows", 0.0),), REPLACE)
    gates = [
        Gate(
            declared(box, "rows"),
            plan,
            NullLedger(),
            NullLedger(),
            runtime=Runtime("cpu"),
            insecure_seed=4,
        )
        for box in (one, other)
    ]
    assert torch.equal(*(gate._get_secret_order() for gate in gates))
    assert not torch.equal(gates[0]._get_secret_order(), SecretRandom(5).permutation(COUNT))
