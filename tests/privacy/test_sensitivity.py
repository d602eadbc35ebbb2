"""One neighbour moves an answer by no more than its noise is scaled for: measured through the gate, with planted bugs as controls."""

import math

import numpy as np
import pytest
import torch
from support.fakes import NullLedger, planted_clip

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PlanError, QueryError
from privot.privacy import clipping as clipping_module
from privot.privacy import secret_side as secret_side_module
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import Full, Poisson, Shards
from privot.privacy.sensitivity import SENSITIVITY
from privot.runtime import Runtime

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting", "array_order")

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
# 7 kinds of pairs x 11 scales, four times or once
COUNT = 8
SIDE = 2
CLASSES = 2
PAIRS = 308
FEW = 77
SHAPE = (1, SIDE, SIDE)
DIM = SIDE * SIDE
SHARDS = 4
ROWS = 40
SPEC = Spec(SHAPE, CLASSES, COUNT, (COUNT // 2, COUNT // 2))
OPEN = Spec(SHAPE, CLASSES)
HELD = Spec(SHAPE, CLASSES, num_clients=SHARDS)
SPECS = {"sorted_blocks": SPEC, "rows": Spec(SHAPE, CLASSES, COUNT)}
SCALES = [1e-200, 1e-20, 1e-3, 1.0, 1.0 + 2**-40, 1 - 2**-40, 10.0, 1e9, 1e150, 1e300, math.inf]
EVEN = np.arange(COUNT) % CLASSES
CASES = [
    ("sum", ADD_REMOVE, False),
    ("sum", REPLACE, False),
    ("sum", ADD_REMOVE, True),
    ("sum", REPLACE, True),
    ("rows", REPLACE, False),
    ("rows", LOCAL, False),
    ("query_sample", ADD_REMOVE, False),
    ("query_sample", REPLACE, False),
    ("sorted_blocks", REPLACE, False),
    ("query_random_shards", REPLACE, False),
    ("sum_over_shards", REPLACE, False),
    ("query_clients", REPLACE, False),
    ("query_clients", CLIENT, False),
    ("sum_over_shards", CLIENT, False),
]


def spread(image, label, scale):
    """Pixels around zero, times anything: at scale 1 a black or white image has norm 1 exactly, the bound of these tests."""
    return (image.flatten().double() - 0.5) * scale


def total(records, scale):
    return ((records.images.flatten(1).double() - 0.5) * scale).sum(0)


def learned(images, labels, state, scale):
    """What a shard has come to: as `total`, of its records."""
    return {"sum": ((images.flatten(1).double() - 0.5) * scale).sum(0)}


def features(image, label, scale):
    """Twice cos and sin of one phase: norm sqrt(2), where its author thought of 1."""
    phase = image.flatten()[:1].double() * scale
    return torch.cat([phase.cos(), phase.sin()] * 2)


class Rig:
    """A gate whose box is changed between asks, so that thousands of data sets go through the real code quickly."""

    def __init__(self, ledger, verb, relation, per_class=False, noise=0.0, query=spread):
        self.verb = verb
        self.relation = relation
        self.more = {"per_class": True} if per_class else {}
        self.query = total if verb == "query_sample" else query
        self.spec = HELD if verb == "query_clients" or relation is CLIENT else SPECS.get(verb, OPEN)
        stage = Stage(
            "it", verb, noise, 10**6, Shards(SHARDS) if verb == "query_random_shards" else Full()
        )
        box = Sensitive(np.zeros((COUNT, *SHAPE)), EVEN, self.spec)
        wall = Budget(math.inf)
        self.gate = Gate(
            box,
            Plan((stage,), relation),
            ledger,
            wall,
            runtime=Runtime("cpu", microbatch_size=COUNT + 1),
        )

    def ask(self, images, labels, scale=1.0, bound=1.0, frame=None, blocks=2):
        self.gate._dataset = Sensitive(images, labels, self.spec)
        if self.verb == "query_sample":
            return self.gate.query_sample("it", self.query, scale, clip_norm=bound, shape=(DIM,))
        if self.verb == "sorted_blocks":
            sums = self.gate.sorted_blocks(
                "it", self.query, scale, frame=frame, num_blocks=blocks, clip_norm=bound
            )
            return sums * (COUNT // CLASSES // blocks)  # means again as the sums that got the noise
        if self.verb in ("query_random_shards", "sum_over_shards", "query_clients"):
            most = COUNT // SHARDS if self.spec is HELD else 0
            self.gate.split_into_shards(
                SHARDS, {"sum": torch.zeros(SHARDS, DIM, dtype=torch.float64)}, most
            )
            self.gate.update_shards(self.query if self.query is not spread else learned, scale)
            if self.verb == "sum_over_shards":
                return self.gate.sum_over_shards("it", lambda state: state["sum"], clip_norm=bound)
            if self.verb == "query_clients":
                return self.gate.query_clients(
                    "it",
                    lambda state, row: state["sum"] + row,
                    torch.zeros(SHARDS, 3),
                    clip_norm=bound,
                ).flatten(0, 1)
            self.gate._rng = SecretRandom(
                7
            )  # neighbours are compared draw by draw; 40 rows see every shard
            return self.gate.query_random_shards(
                "it", lambda state, row: state["sum"] + row, torch.zeros(ROWS), clip_norm=bound
            )
        return getattr(self.gate, self.verb)("it", self.query, scale, clip_norm=bound, **self.more)

    def declared(self, monkeypatch, ledger, **ask):
        """What the gate scales its noise to: the deviation that it hands to `noisy` at multiplier 1."""
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr(
                secret_side_module,
                "add_noise",
                lambda steps, std, grid, secret: (seen.append(std), steps * grid)[1],
            )
            twin = Rig(ledger, self.verb, self.relation, bool(self.more), 1.0)
            twin.query = self.query
            twin.ask(np.full((COUNT, *SHAPE), 0.5), EVEN, **ask)
        return seen[0]


def frame_of(rng, tight=True):
    frame = torch.from_numpy(rng.normal(size=(6, DIM)))
    return (
        torch.linalg.qr(frame).Q * math.sqrt(6 / DIM) if tight else frame
    )  # [slices, dim], Q'Q = 1


def pairs(rng, count, relation, move_label=True):
    """Neighbouring data sets and a scale: random ones, and those that go for the bound."""
    for turn in range(count):
        images = rng.random((COUNT, *SHAPE))
        labels = EVEN.copy()
        other = rng.random(SHAPE)
        where = int(rng.integers(COUNT))
        scale = SCALES[turn % len(SCALES)]
        kind = turn // len(SCALES) % 7
        if kind == 1:  # from one side of the ball to the other, on its boundary
            images[where] = 1.0
            other = np.zeros(SHAPE)
        elif kind == 2:  # every other record is far to one side
            images[:] = 0.0
            other = np.ones(SHAPE)
        elif kind == 3:  # one pixel against all
            images[where] = np.eye(SIDE)
            other = 1 - np.eye(SIDE)
        elif kind == 4:  # at a rounding's distance from the middle
            images[where] = 0.5
            other = np.nextafter(np.full(SHAPE, 0.5), 1)
        elif kind == 5:  # a record that decides on which side a sum lies, when it is replaced
            images[:] = 0.5
            images[where] = 1.0
            other = np.zeros(SHAPE)
        elif kind == 6:  # and when it is removed
            images[:] = 0.5
            images[where - 1] = 0.25
            images[where] = 1.0
            other = np.zeros(SHAPE)
        if relation is ADD_REMOVE:
            yield images, labels, np.delete(images, where, 0), np.delete(labels, where), scale
        else:
            changed = images.copy()
            renamed = labels.copy()
            changed[where] = other
            if relation is CLIENT and turn % 3 == 0:
                changed[where % SHARDS :: SHARDS] = other  # all that its owner holds
            if move_label and turn % 2:
                renamed[where] = (renamed[where] + 1) % CLASSES
            yield images, labels, changed, renamed, scale


def worst(monkeypatch, verb, relation, per_class=False, count=PAIRS, query=spread, seed=1):
    """The largest distance of two neighbours' answers, in units of the declared sensitivity; NaN counts as infinite."""
    ledger = NullLedger()
    rng = np.random.default_rng(seed)
    rig = Rig(ledger, verb, relation, per_class, query=query)
    largest = 0.0
    more = {}
    if verb == "sorted_blocks":
        more = {"frame": frame_of(rng), "blocks": 2}
    declared = rig.declared(monkeypatch, ledger, **more)
    for images, labels, changed, renamed, scale in pairs(
        rng, count, relation, move_label=verb != "sorted_blocks"
    ):
        here, there = (
            rig.ask(*each, scale, **more) for each in ((images, labels), (changed, renamed))
        )
        apart = (
            (here - there).norm(dim=1).max()
            if verb in ("query_random_shards", "query_clients")
            else (here - there).norm()
        )  # each row is an answer
        distance = float(apart) / declared
        largest = max(largest, math.inf if math.isnan(distance) else distance)
        if largest > 1 + 1e-6:
            break  # one is enough
    return largest


def within(monkeypatch, trust, case, count, seed):
    found = worst(monkeypatch, *case, count, seed=seed)
    assert found <= 1 + 1e-6
    assert found > 0.999  # pairs that stay far under the bound would prove nothing
    trust(
        "G2",
        "pairs of neighbours through the gate, none beyond the declared bound",
        count,
        of=count,
    )


@pytest.mark.parametrize(("verb", "relation", "per_class"), CASES)
def test_no_neighbour_moves_more_than_declared(monkeypatch, trust, verb, relation, per_class):
    within(monkeypatch, trust, (verb, relation, per_class), PAIRS, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "relation", "per_class"), CASES)
def test_nor_do_others(monkeypatch, trust, verb, relation, per_class):
    within(monkeypatch, trust, (verb, relation, per_class), 9 * FEW, 2)


def test_every_entry_of_the_table_was_measured():
    channels = ("privatize", LOCAL)  # measured by their laws, in test_channels.py
    assert {(verb, relation) for verb, relation, _ in CASES} | {channels} == set(SENSITIVITY)


@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_sorted_blocks_bound_holds_and_is_reached(monkeypatch, ledger, blocks, tight):
    """A record that crosses the ball along the frame's longest direction, above others that it passes or not."""
    rng = np.random.default_rng(blocks)
    rig = Rig(ledger, "sorted_blocks", REPLACE)
    largest = 0.0
    for turn in range(40):
        frame = frame_of(rng, tight)
        more = {"frame": frame, "blocks": blocks, "bound": 0.7}
        longest = torch.linalg.svd(frame).Vh[0]
        image = (0.5 + 0.5 * longest / longest.abs().max()).view(SHAPE).numpy()
        images = rng.random((COUNT, *SHAPE))
        where = int(rng.integers(COUNT))
        if turn % 2:
            images[:] = image
        images[where] = image
        changed = images.copy()
        changed[where] = 1 - image
        distance = (rig.ask(images, EVEN, 1e3, **more) - rig.ask(changed, EVEN, 1e3, **more)).norm()
        largest = max(largest, float(distance) / rig.declared(monkeypatch, ledger, **more))
    assert 0.97 < largest <= 1 + 1e-6


# The planted bugs: each must be seen by `worst`, the function that passed the real code.


def unclipped(parts, bound):
    return parts.detach().double()


def clipped_by_batch(parts, bound):
    parts = torch.nan_to_num(parts.detach().double(), 0.0, 0.0, 0.0)
    return parts * min(1.0, bound * len(parts) / float(parts.norm(dim=1).sum() + 1e-300))


def clipped_after_the_sum(parts, bound):
    parts = torch.nan_to_num(parts.detach().double(), 0.0, 0.0, 0.0)
    return parts * min(1.0, bound / float(parts.sum(0).norm() + 1e-300))


def wrong_axis(parts, bound):
    parts = torch.nan_to_num(parts.detach().double(), 0.0, 0.0, 0.0)
    return parts * (bound / parts.norm(dim=0, keepdim=True).clamp(min=1e-300)).clamp(max=1.0)


def largest_entry(parts, bound):
    parts = torch.nan_to_num(parts.detach().double(), 0.0, 0.0, 0.0)
    return parts.clamp(-bound, bound)


def nan_passes(parts, bound):
    parts = parts.detach().double()
    norms = parts.norm(dim=1, keepdim=True)
    return parts * torch.where(
        norms > bound, bound / norms, 1.0
    )  # as in a well-known library: min(1, NaN) is 1


def zero_divides(parts, bound):
    parts = torch.nan_to_num(parts.detach().double(), 0.0, 0.0, 0.0)
    return parts * bound / parts.norm(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("planted", "verb", "relation"),
    [
        (unclipped, "sum", REPLACE),
        (unclipped, "query_sample", REPLACE),
        (unclipped, "rows", LOCAL),
        (unclipped, "sorted_blocks", REPLACE),
        (clipped_by_batch, "sum", REPLACE),
        (clipped_by_batch, "rows", REPLACE),
        (clipped_after_the_sum, "sum", ADD_REMOVE),
        (wrong_axis, "sum", REPLACE),
        (wrong_axis, "query_sample", REPLACE),
        (largest_entry, "sum", ADD_REMOVE),
        (nan_passes, "sum", REPLACE),
        (nan_passes, "rows", REPLACE),
        (zero_divides, "sum", REPLACE),
        (unclipped, "query_random_shards", REPLACE),
        (unclipped, "sum_over_shards", REPLACE),
        (clipped_by_batch, "sum_over_shards", REPLACE),
        (wrong_axis, "sum_over_shards", REPLACE),
        (largest_entry, "query_random_shards", REPLACE),
        (nan_passes, "query_random_shards", REPLACE),
        (nan_passes, "sum_over_shards", REPLACE),
        (zero_divides, "query_random_shards", REPLACE),
        (unclipped, "query_clients", CLIENT),
        (largest_entry, "query_clients", CLIENT),
        (nan_passes, "query_clients", REPLACE),
        (clipped_by_batch, "sum_over_shards", CLIENT),
    ],
)
def test_planted_clips_are_caught(monkeypatch, trust, planted, verb, relation):
    monkeypatch.setattr(clipping_module, "clip_rows", planted_clip(planted))
    assert worst(monkeypatch, verb, relation, count=FEW) > 1 + 1e-6
    trust("G2", "planted clips and entries of the table caught", 1, of=1)


@pytest.mark.parametrize(("verb", "relation", "per_class"), CASES)
def test_planted_table_entries_are_caught(monkeypatch, trust, verb, relation, per_class):
    """C in place of 2C (or half of C); also one that is 1 % short."""
    for factor in (0.5, 0.99):
        with monkeypatch.context() as patch:
            patch.setitem(SENSITIVITY, (verb, relation), SENSITIVITY[verb, relation] * factor)
            assert worst(monkeypatch, verb, relation, per_class, count=FEW) > 1 + 1e-6
    trust("G2", "planted clips and entries of the table caught", 2, of=2)


def test_planted_feature_norm_is_caught(monkeypatch):
    assert worst(monkeypatch, "sum", REPLACE, count=FEW, query=features) <= 1 + 1e-6
    monkeypatch.setattr(clipping_module, "clip_rows", planted_clip(unclipped))
    assert worst(monkeypatch, "sum", REPLACE, count=FEW, query=features) > 1 + 1e-6


def test_planted_frame_norm_is_caught(monkeypatch):
    monkeypatch.setattr(
        torch.linalg, "matrix_norm", lambda frame, order: torch.tensor(1.0)
    )  # right for k = d alone
    assert worst(monkeypatch, "sorted_blocks", REPLACE, count=FEW) > 1 + 1e-6


def test_planted_rounding_outwards_is_caught(monkeypatch):
    """Rounding away from zero lengthens a part; a coarse grid shows it."""
    monkeypatch.setattr(secret_side_module, "choose_grid", lambda bound, std: 0.03)
    assert worst(monkeypatch, "sum", REPLACE, count=FEW) <= 1 + 1e-6
    real = clipping_module.clip_rows
    monkeypatch.setattr(
        clipping_module,
        "clip_to_grid",
        lambda *given: (away := real(*given)).sign() * away.abs().ceil(),
    )
    assert worst(monkeypatch, "sum", REPLACE, count=FEW) > 1 + 1e-6


# One record's part is its own


def linear(image, label, weights):
    return weights @ image.flatten()


def normalised(image, label, weights):
    """Batch norm inside a query: the batch is this record alone."""
    return torch.nn.functional.batch_norm(image[None], None, None, training=True).flatten()


def softened(image, label, weights):
    return torch.softmax(weights @ image.flatten(), 0) + torch.nn.functional.one_hot(label, 10)


def gradient(image, label, weights):
    return torch.func.grad(
        lambda w: torch.nn.functional.cross_entropy((w @ image.flatten())[None], label[None])
    )(weights).flatten()


QUERIES = [linear, normalised, softened, gradient]


def others_moved(query, trials=100):
    """Whether any row but that of the changed record ever moved."""
    rng = np.random.default_rng(2)
    rig = Rig(NullLedger(), "rows", REPLACE, query=query)
    weights = torch.from_numpy(rng.normal(size=(10, DIM))).float()
    for _ in range(trials):
        images = rng.random((COUNT, *SHAPE), np.float32)
        where = int(rng.integers(COUNT))
        changed = images.copy()
        changed[where] = rng.integers(2, size=SHAPE)
        same = torch.arange(COUNT) != where
        here, there = (rig.ask(each, EVEN, weights, bound=1e6) for each in (images, changed))
        if not torch.equal(here[same], there[same]):
            return True
        assert not torch.equal(here[where], there[where])
    return False


@pytest.mark.parametrize("query", QUERIES)
def test_other_rows_do_not_move(query):
    assert not others_moved(query)


def test_planted_batch_statistics_are_caught(monkeypatch):
    """A gate that ran the query on the whole portion would let a batch norm reach across records."""

    def whole(query, in_dims):
        def run(images, labels, *public):
            return torch.nn.functional.batch_norm(images, None, None, training=True).flatten(1)

        return run

    monkeypatch.setattr(torch.func, "vmap", whole)
    assert others_moved(normalised)


def test_batch_norm_that_remembers_is_refused_before_any_charge(ledger):
    layer = torch.nn.BatchNorm2d(1)
    with pytest.raises(RuntimeError, match="vmap"):
        Rig(ledger, "rows", REPLACE, query=lambda image, label, scale: layer(image[None])).ask(
            np.zeros((COUNT, *SHAPE)), EVEN
        )
    assert ledger.entries() == []


@pytest.mark.parametrize("count", [1, 2, 3, 7, 33, 64, 65, 99])
def test_one_record_more_does_not_round_the_others(tmp_path, ledger, count):
    """float32 products are rounded by the shape of their batch; a black record, whose part is zero, must change no bit of a sum."""
    rng = np.random.default_rng(count)
    images = rng.random((count + 1, 1, 28, 28), np.float32)
    images[-1] = 0
    weights = torch.from_numpy(rng.normal(size=(10, 784))).float()
    plan = Plan((Stage("it", "sum", 0.0, 2),), ADD_REMOVE)
    zeros = np.zeros(count + 1, int)
    answers = []
    for size in (count, count + 1):
        box = Sensitive(images[:size], zeros[:size], Spec((1, 28, 28), 1))
        gate = Gate(
            box, plan, ledger, Budget(math.inf), runtime=Runtime("cpu", microbatch_size=100)
        )
        answers.append(gate.sum("it", linear, weights, clip_norm=1.0))
    assert torch.equal(*answers)


# Records and draws that could change the course of things


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
@pytest.mark.parametrize(
    "verb",
    ["sum", "rows", "query_sample", "sorted_blocks", "query_random_shards", "sum_over_shards"],
)
def test_parts_that_are_not_finite_contribute_zero(ledger, verb, value):
    def query(image, label, scale):
        return torch.where(image.flatten() == 1, value, image.flatten().double())

    images = np.full((COUNT, *SHAPE), 0.25)
    images[3] = 1
    rig = Rig(ledger, verb, REPLACE, query=query)
    if verb == "query_sample":
        rig.query = lambda records, scale: (
            query(records.images, None, scale).view(COUNT, DIM).sum(0)
        )
    if verb in ("query_random_shards", "sum_over_shards"):
        rig.query = lambda images, labels, state, scale: {
            "sum": torch.func.vmap(query)(images, labels, scale=scale).sum(0)
        }
    answer = rig.ask(images, EVEN, frame=torch.eye(DIM, dtype=torch.float64), blocks=4)
    quarter = torch.full((DIM,), 0.25)
    zero = torch.zeros(DIM)
    if verb == "sum":
        assert torch.equal(answer, 7 * quarter.double())
    elif verb == "rows":
        assert torch.equal(
            answer, torch.stack([zero if each == 3 else quarter for each in range(COUNT)]).double()
        )
    elif verb == "query_sample":
        assert torch.equal(answer, zero.double())
    elif (
        verb == "query_random_shards"
    ):  # shards of two records each, of norm 1 together; the third of the four holds nothing
        known = torch.stack(
            [quarter * 0 if each == 3 else quarter * 2 for each in range(SHARDS)]
        ).double()
        assert torch.allclose(answer, known[Shards(SHARDS).draw(ROWS, SecretRandom(7))], atol=1e-6)
    elif verb == "sum_over_shards":
        assert torch.allclose(answer, 6 * quarter.double(), atol=1e-5)
    else:  # sorted: the zero comes first, in class 1
        assert torch.equal(answer[1, 0], torch.tensor([0.0, 0.25, 0.25, 0.25], dtype=torch.float64))


@pytest.mark.parametrize("verb", ["sum", "per_class", "query_sample"])
def test_an_empty_draw_answers_noise(ledger, verb):
    """No record is drawn at a rate of 1e-15; the answer has its shape and its noise."""
    name = "query_sample" if verb == "query_sample" else "sum"
    box = Sensitive(np.ones((COUNT, *SHAPE)), EVEN, OPEN)
    gate = Gate(
        box, Plan((Stage("it", name, 2.0, 3, Poisson(1e-15)),), ADD_REMOVE), ledger, Budget(1e9)
    )
    if verb == "query_sample":
        answer = gate.query_sample(
            "it", lambda records: torch.ones(2000), clip_norm=1.0, shape=(2000,)
        )
        std = 4.0
    else:
        answer = gate.sum(
            "it",
            lambda image, label: torch.ones(2000),
            clip_norm=1.0,
            per_class=verb == "per_class",
        )
        std = 2.0
    assert answer.shape == ((CLASSES, 2000) if verb == "per_class" else (2000,))
    assert answer.std() == pytest.approx(std, rel=0.12)
    assert abs(answer.mean()) < 7 * std / math.sqrt(answer.numel())


FILLS = {
    "black": 0.0,
    "white": 1.0,
    "grey": 0.5,
    "subnormal": 1e-40,
    "least": 5e-324,
    "tiny": 1e-20,
    "almost": 1 - 2**-24,
    "pixel": np.array([[1.0, 0], [0, 0]]),
    "checks": np.eye(2),
    "ramp": np.linspace(0, 1, 4).reshape(2, 2),
}
PLACES = {"one": [3], "all": range(COUNT), "class": range(0, COUNT, 2), "but one": range(1, COUNT)}
NASTY = [
    lambda image, label: 1 / image.flatten(),
    lambda image, label: image.flatten().log() * (label + 1),
    lambda image, label: (image.flatten() * 1e3).exp(),
    lambda image, label: image.flatten() / image.norm(),
    lambda image, label: (image.flatten() - 0.5).sqrt(),
]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("fill", FILLS)
def test_forty_kinds_of_records_keep_shape_and_finiteness(fill, places):
    images = np.random.default_rng(0).random((COUNT, *SHAPE))
    images[list(PLACES[places])] = FILLS[fill]
    one = Spec(SHAPE, 1, COUNT, (COUNT,))
    each = Sensitive(images, EVEN, SPEC)
    single = Sensitive(images, np.zeros(COUNT, int), one)
    verbs = ("sum", "rows", "query_sample", "sorted_blocks", "sum_over_shards")
    plan = Plan(tuple(Stage(verb, verb, 1.0, 10**5) for verb in verbs), REPLACE)
    routes = Plan(
        (Stage("query_random_shards", "query_random_shards", 0.0, 10**5, Shards(SHARDS)),), REPLACE
    )  # no noise: a sampled plan takes seconds to price
    for box, classes in ((each, CLASSES), (single, 1)):
        gate = Gate(box, plan, NullLedger(), Budget(1e9), runtime=Runtime("cpu"))
        frame = torch.eye(DIM)
        router = Gate(box, routes, NullLedger(), Budget(math.inf), runtime=Runtime("cpu"))
        for query in NASTY:
            for door in (gate, router):
                door.split_into_shards(SHARDS, {"it": torch.zeros(SHARDS, DIM)})
                door.update_shards(
                    lambda images, labels, state, q=query: {
                        "it": q(images.sum(0), labels.sum()) - state["it"]
                    }
                )
            for answer, shape in (
                (
                    router.query_random_shards(
                        "query_random_shards",
                        lambda state, row: state["it"] / row,
                        torch.zeros(3),
                        clip_norm=1.0,
                    ),
                    (3, DIM),
                ),
                (
                    gate.sum_over_shards(
                        "sum_over_shards", lambda state: state["it"].exp(), clip_norm=1.0
                    ),
                    (DIM,),
                ),
                (gate.sum("sum", query, clip_norm=1.0), (DIM,)),
                (gate.sum("sum", query, clip_norm=1.0, per_class=True), (classes, DIM)),
                (gate.rows("rows", query, clip_norm=1.0), (COUNT, DIM)),
                (
                    gate.query_sample(
                        "query_sample",
                        lambda records, q=query: q(records.images.sum(0), 0),
                        clip_norm=1.0,
                        shape=(DIM,),
                    ),
                    (DIM,),
                ),
                (
                    gate.sorted_blocks(
                        "sorted_blocks", query, frame=frame, num_blocks=2, clip_norm=1.0
                    ),
                    (classes, DIM, 2),
                ),
            ):
                assert answer.shape == shape
                assert answer.isfinite().all()


def test_a_scalar_and_an_image_are_parts_too(ledger):
    rig = Rig(ledger, "sum", ADD_REMOVE, query=lambda image, label, scale: image.sum())
    assert rig.ask(np.full((COUNT, *SHAPE), 0.125), EVEN).item() == COUNT * 0.5
    rig.query = lambda image, label, scale: image
    assert rig.ask(np.full((COUNT, *SHAPE), 0.125), EVEN).shape == SHAPE


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan, 1e-300, 1e300])
def test_bounds_that_cannot_be_kept_are_refused(ledger, bound):
    """Below 1e-160 the squares that make a norm vanish, and a part of any length would pass."""
    with pytest.raises(PlanError, match="bound"):
        Rig(ledger, "sum", REPLACE).ask(np.ones((COUNT, *SHAPE)), EVEN, 1e-180, bound=bound)
    assert ledger.entries() == []


def test_least_bound_still_holds(monkeypatch, ledger):
    rig = Rig(ledger, "sum", REPLACE)
    images = np.zeros((COUNT, *SHAPE))
    changed = images.copy()
    changed[0] = 1
    declared = rig.declared(monkeypatch, ledger, bound=1.1e-30)
    for scale in (1e-29, 1e-160, 1e-170, 1e200):
        distance = (
            rig.ask(images, EVEN, scale, bound=1.1e-30)
            - rig.ask(changed, EVEN, scale, bound=1.1e-30)
        ).norm()
        assert distance <= declared * (1 + 1e-6)


def test_a_query_that_draws_is_refused(ledger):
    """Its randomness would be shared by the records of a portion, and nobody counts it."""
    with pytest.raises((RuntimeError, QueryError)):
        Rig(ledger, "sum", REPLACE, query=lambda image, label, scale: torch.rand(3)).ask(
            np.ones((COUNT, *SHAPE)), EVEN
        )
    assert ledger.entries() == []
