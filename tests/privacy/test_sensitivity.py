"""One neighbour moves an answer by no more than its noise is scaled for; planted bugs are controls."""

import math

import numpy as np
import pytest
import torch
from support.fakes import planted_clip
from support.gate_rig import CASES, CLASSES, ROWS, SHARDS, Rig, adapt_query, center

from privot.errors import PlanError, QueryError
from privot.privacy import clipping as clipping_module
from privot.privacy import secret_side as secret_side_module
from privot.privacy.accounting import Neighbours
from privot.privacy.noise import SecretRandom
from privot.privacy.sampling import Poisson, Shards
from privot.privacy.sensitivity import SENSITIVITY

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting", "array_order")

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
COUNT = 8
SIDE = 2
SHAPE = (1, SIDE, SIDE)
DIM = SIDE * SIDE
PAIRS = 77  # 7 kinds of pairs x 11 scales
LIMIT = 1 + 1e-6
SCALES = [1e-200, 1e-20, 1e-3, 1.0, 1.0 + 2**-40, 1 - 2**-40, 10.0, 1e9, 1e150, 1e300, math.inf]
EVEN = np.arange(COUNT) % CLASSES
HALF = np.full((COUNT, *SHAPE), 0.5)
every_case = pytest.mark.parametrize(("operation", "neighbours", "per_class"), CASES)


def double_features(image, label, scale):
    """Twice cos and sin of one phase: norm sqrt(2), where its author thought of 1."""
    phase = image.flatten()[:1].double() * scale
    return torch.cat([phase.cos(), phase.sin()] * 2)


def measure_declared(monkeypatch, *case, query=center, **how):
    """What the gate scales its noise to: the deviation it hands to `add_noise` at multiplier 1."""
    deviations = []

    def record(steps, std, grid, rng):
        deviations.append(std)
        return steps * grid

    with monkeypatch.context() as patch:
        patch.setattr(secret_side_module, "add_noise", record)
        Rig(*case, noise=1.0, query=query).ask(HALF, **how)
    return deviations[0]


def make_frame(rng, tight=True):
    """A frame [slices, dim]; Q'Q = 1 if it is tight."""
    frame = torch.from_numpy(rng.normal(size=(6, DIM)))
    return torch.linalg.qr(frame).Q * math.sqrt(6 / DIM) if tight else frame


KINDS = [  # all other images, that of the record and that of its neighbour; None is random
    (None, None, None),
    (None, 1.0, 0.0),  # from one side of the ball to the other
    (0.0, 0.0, 1.0),  # every other record is far to one side
    (None, np.eye(SIDE), 1 - np.eye(SIDE)),
    (None, 0.5, np.nextafter(0.5, 1)),  # at a rounding's distance from the middle
    (0.5, 1.0, 0.0),  # a record that decides on which side a sum lies, when it is replaced
    (0.5, 1.0, 0.0),  # and when it is removed
]


def make_pairs(rng, count, neighbours, move_label=True):
    """Neighbouring datasets and a scale: random ones, and those that go for the bound."""
    for turn in range(count):
        images = rng.random((COUNT, *SHAPE))
        other = rng.random(SHAPE)
        index = int(rng.integers(COUNT))
        scale = SCALES[turn % len(SCALES)]
        kind = turn // len(SCALES) % len(KINDS)
        others, record, neighbour = KINDS[kind]
        if others is not None:
            images[:] = others
        if record is not None:
            images[index] = record
            other[:] = neighbour
        if kind == 6:
            images[index - 1] = 0.25
        if neighbours is ADD_REMOVE:
            yield (images, EVEN), (np.delete(images, index, 0), np.delete(EVEN, index)), scale
            continue
        changed = images.copy()
        changed[index] = other
        if neighbours is CLIENT and turn % 3 == 0:
            changed[index % SHARDS :: SHARDS] = other  # all that its client holds
        labels = EVEN.copy()
        if move_label and turn % 2:
            labels[index] = 1 - labels[index]
        yield (images, EVEN), (changed, labels), scale


def measure_largest_move(
    monkeypatch, operation, neighbours, per_class=False, count=PAIRS, query=center, seed=1
):
    """The largest distance of two neighbours' answers over the declared one; NaN is infinite."""
    rng = np.random.default_rng(seed)
    rig = Rig(operation, neighbours, per_class, query=query)
    blocks = operation == "sorted_blocks"
    more = {"frame": make_frame(rng), "num_blocks": 2} if blocks else {}
    declared = measure_declared(monkeypatch, operation, neighbours, per_class, query=query, **more)
    has_rows = operation in ("query_random_shards", "query_clients")  # each of them an answer
    largest = 0.0
    for first, second, scale in make_pairs(rng, count, neighbours, move_label=not blocks):
        moved = rig.ask(*first, scale, **more) - rig.ask(*second, scale, **more)
        distance = float(moved.norm(dim=1).max() if has_rows else moved.norm()) / declared
        largest = max(largest, math.inf if math.isnan(distance) else distance)
        if largest > LIMIT:
            break  # one is enough
    return largest


def check_bound(monkeypatch, trust, case, count, seed):
    largest = measure_largest_move(monkeypatch, *case, count, seed=seed)
    assert 0.999 < largest <= LIMIT  # pairs that stay far under the bound would prove nothing
    what = "pairs of neighbours through the gate, none beyond the declared bound"
    trust("G2", what, count, of=count)


@every_case
def test_no_neighbour_moves_more_than_declared(
    monkeypatch, trust, operation, neighbours, per_class
):
    check_bound(monkeypatch, trust, (operation, neighbours, per_class), PAIRS, 1)


@pytest.mark.slow
@every_case
def test_nor_do_others(monkeypatch, trust, operation, neighbours, per_class):
    check_bound(monkeypatch, trust, (operation, neighbours, per_class), 12 * PAIRS, 2)


def test_every_entry_of_the_table_was_measured():
    channels = ("privatize", LOCAL)  # measured by their laws, in test_channels.py
    measured = {(operation, neighbours) for operation, neighbours, _ in CASES}
    assert measured | {channels} == set(SENSITIVITY)


@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_sorted_blocks_bound_holds_and_is_reached(monkeypatch, blocks, tight):
    """A record crosses the ball along the frame's longest direction, above others it passes or not."""
    rng = np.random.default_rng(blocks)
    rig = Rig("sorted_blocks", REPLACE)
    largest = 0.0
    for turn in range(40):
        frame = make_frame(rng, tight)
        how = {"scale": 1e3, "frame": frame, "num_blocks": blocks, "clip_norm": 0.7}
        longest = torch.linalg.svd(frame).Vh[0]
        image = (0.5 + 0.5 * longest / longest.abs().max()).view(SHAPE).numpy()
        images = rng.random((COUNT, *SHAPE))
        index = int(rng.integers(COUNT))
        images[slice(None) if turn % 2 else index] = image
        changed = images.copy()
        changed[index] = 1 - image
        distance = (rig.ask(images, **how) - rig.ask(changed, **how)).norm()
        declared = measure_declared(monkeypatch, "sorted_blocks", REPLACE, **how)
        largest = max(largest, float(distance) / declared)
    assert 0.97 < largest <= LIMIT


# Planted bugs: each must be seen by `measure_largest_move`, which passed the real code.


PLANTED_CLIPS = {
    "nothing": lambda rows, bound: rows,
    "by batch": lambda rows, bound: (
        rows * min(1.0, bound * len(rows) / float(rows.norm(dim=1).sum() + 1e-300))
    ),
    "after the sum": lambda rows, bound: (
        rows * min(1.0, bound / float(rows.sum(0).norm() + 1e-300))
    ),
    "wrong axis": lambda rows, bound: (
        rows * (bound / rows.norm(dim=0, keepdim=True).clamp(min=1e-300)).clamp(max=1.0)
    ),
    "each number": lambda rows, bound: rows.clamp(-bound, bound),
    "NaN passes": lambda rows, bound: (  # as in a well-known library: min(1, NaN) is 1
        rows * torch.where((norms := rows.norm(dim=1, keepdim=True)) > bound, bound / norms, 1.0)
    ),
    "zero divides": lambda rows, bound: rows * bound / rows.norm(dim=1, keepdim=True),
}


def plant_clip(monkeypatch, name):
    def clip(rows, bound):
        if name not in ("nothing", "NaN passes"):
            rows = torch.nan_to_num(rows, 0.0, 0.0, 0.0)
        return PLANTED_CLIPS[name](rows, bound)

    monkeypatch.setattr(clipping_module, "clip_rows", planted_clip(clip))


@pytest.mark.parametrize(
    ("name", "neighbours", "operations"),
    [
        ("nothing", REPLACE, "sum query_sample sorted_blocks query_random_shards sum_over_shards"),
        ("nothing", LOCAL, "rows"),
        ("nothing", CLIENT, "query_clients"),
        ("by batch", REPLACE, "sum rows sum_over_shards"),
        ("by batch", CLIENT, "sum_over_shards"),
        ("after the sum", ADD_REMOVE, "sum"),
        ("wrong axis", REPLACE, "sum query_sample sum_over_shards"),
        ("each number", ADD_REMOVE, "sum"),
        ("each number", REPLACE, "query_random_shards"),
        ("each number", CLIENT, "query_clients"),
        ("NaN passes", REPLACE, "sum rows query_random_shards sum_over_shards query_clients"),
        ("zero divides", REPLACE, "sum query_random_shards"),
    ],
)
def test_planted_clips_are_caught(monkeypatch, trust, name, neighbours, operations):
    plant_clip(monkeypatch, name)
    for operation in operations.split():
        assert measure_largest_move(monkeypatch, operation, neighbours) > LIMIT, operation
        trust("G2", "planted clips and entries of the table caught", 1, of=1)


@pytest.mark.parametrize("factor", [0.5, pytest.param(0.99, marks=pytest.mark.slow)])
@every_case
def test_planted_table_entries_are_caught(
    monkeypatch, trust, operation, neighbours, per_class, factor
):
    """C in place of 2C (or half of C); also one that is 1 % short."""
    planted = SENSITIVITY[operation, neighbours] * factor
    monkeypatch.setitem(SENSITIVITY, (operation, neighbours), planted)
    assert measure_largest_move(monkeypatch, operation, neighbours, per_class) > LIMIT
    trust("G2", "planted clips and entries of the table caught", 1, of=1)


def test_planted_norms_and_roundings_are_caught(monkeypatch):
    case = ("sum", REPLACE)
    assert measure_largest_move(monkeypatch, *case, query=double_features) <= LIMIT
    with monkeypatch.context() as patch:
        plant_clip(patch, "nothing")
        assert measure_largest_move(monkeypatch, *case, query=double_features) > LIMIT
    with monkeypatch.context() as patch:  # right for k = d alone
        patch.setattr(torch.linalg, "matrix_norm", lambda frame, order: torch.tensor(1.0))
        assert measure_largest_move(monkeypatch, "sorted_blocks", REPLACE) > LIMIT
    monkeypatch.setattr(secret_side_module, "choose_grid", lambda bound, std: 0.03)
    assert measure_largest_move(monkeypatch, *case) <= LIMIT
    clip = clipping_module.clip_rows

    def round_outwards(*how):
        clipped = clip(*how)
        return clipped.sign() * clipped.abs().ceil()

    monkeypatch.setattr(clipping_module, "clip_to_grid", round_outwards)
    assert measure_largest_move(monkeypatch, *case) > LIMIT


# One record's part is its own


def multiply(image, label, weights):
    return weights @ image.flatten()


def normalize(image, label, weights):
    """Batch norm inside a query: the batch is this record alone."""
    return torch.nn.functional.batch_norm(image[None], None, None, training=True).flatten()


def soften(image, label, weights):
    return torch.softmax(weights @ image.flatten(), 0) + torch.nn.functional.one_hot(label, 10)


def differentiate(image, label, weights):
    def loss(weights):
        return torch.nn.functional.cross_entropy((weights @ image.flatten())[None], label[None])

    return torch.func.grad(loss)(weights).flatten()


def others_move(query, trials=25):
    """Whether any row but that of the changed record ever moved."""
    rng = np.random.default_rng(2)
    rig = Rig("rows", REPLACE, query=query)
    weights = torch.from_numpy(rng.normal(size=(10, DIM))).float()
    for _ in range(trials):
        images = rng.random((COUNT, *SHAPE), np.float32)
        index = int(rng.integers(COUNT))
        changed = images.copy()
        changed[index] = rng.integers(2, size=SHAPE)
        before = rig.ask(images, scale=weights, clip_norm=1e6)
        after = rig.ask(changed, scale=weights, clip_norm=1e6)
        same = torch.arange(COUNT) != index
        if not torch.equal(before[same], after[same]):
            return True
        assert not torch.equal(before[index], after[index])
    return False


def test_other_rows_do_not_move(monkeypatch):
    for query in (multiply, normalize, soften, differentiate):
        assert not others_move(query), query

    def query_whole_batch(query, in_dims):
        def run(images, labels, *public):
            return torch.nn.functional.batch_norm(images, None, None, training=True).flatten(1)

        return run

    monkeypatch.setattr(torch.func, "vmap", query_whole_batch)
    assert others_move(normalize), "the control: batch statistics across records"


@pytest.mark.parametrize("count", [1, 2, 3, 7, 33, 64, 65, 99])
def test_one_record_more_does_not_round_the_others(count):
    """float32 products round by the shape of their batch; a black record must change no bit of a sum."""
    rng = np.random.default_rng(count)
    images = rng.random((count + 1, 1, 28, 28), np.float32)
    images[-1] = 0
    weights = torch.from_numpy(rng.normal(size=(10, 784))).float()
    rig = Rig("sum", ADD_REMOVE, query=multiply, count=99, shape=(1, 28, 28), dim=10)
    answers = [rig.ask(images[:size], scale=weights) for size in (count, count + 1)]
    assert torch.equal(*answers)


# Records, draws and queries that could change the course of things


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
@pytest.mark.parametrize(
    "operation",
    ["sum", "rows", "query_sample", "sorted_blocks", "query_random_shards", "sum_over_shards"],
)
def test_parts_that_are_not_finite_contribute_zero(operation, value):
    def query(image, label, scale):
        return torch.where(image.flatten() == 1, value, image.flatten().double())

    images = np.full((COUNT, *SHAPE), 0.25)
    images[3] = 1
    blocks = {}
    if operation == "sorted_blocks":
        blocks = {"frame": torch.eye(DIM, dtype=torch.float64), "num_blocks": 4}
    answer = Rig(operation, REPLACE, query=query).ask(images, **blocks)
    quarters = torch.full((COUNT, DIM), 0.25, dtype=torch.float64)
    quarters[3] = 0
    if operation == "sum":
        assert torch.equal(answer, quarters.sum(0))
    elif operation == "rows":
        assert torch.equal(answer, quarters)
    elif operation == "query_sample":
        assert torch.equal(answer, 0 * quarters[0])
    elif operation == "query_random_shards":  # of two records and norm 1; one shard is void
        expected = 2 * quarters[:SHARDS][Shards(SHARDS).draw(ROWS, SecretRandom(7))]
        assert torch.allclose(answer, expected, atol=1e-6)
    elif operation == "sum_over_shards":
        assert torch.allclose(answer, 6 * quarters[0], atol=1e-5)
    else:  # sorted: the zero comes first, in class 1
        assert answer[1, 0].tolist() == [0.0, 0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    ("operation", "per_class", "std", "shape"),
    [
        ("sum", False, 2.0, (2000,)),
        ("sum", True, 2.0, (CLASSES, 2000)),
        ("query_sample", False, 4.0, (2000,)),
    ],
)
def test_an_empty_draw_answers_noise(operation, per_class, std, shape):
    """No record is drawn at a rate of 1e-15; the answer has its shape and its noise."""
    how = {"noise": 2.0, "sampling": Poisson(1e-15), "dim": 2000}
    rig = Rig(operation, ADD_REMOVE, per_class, **how)
    rig.query = lambda *_: torch.ones(2000)
    answer = rig.ask(HALF)
    assert answer.shape == shape
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
INDICES = {"one": [3], "all": range(COUNT), "class": range(0, COUNT, 2), "but one": range(1, COUNT)}
NASTY = [
    lambda image, label, scale: image.flatten(),  # of norm 0, if the image is black
    lambda image, label, scale: 1 / image.flatten(),
    lambda image, label, scale: image.flatten().log() * (label + 1),
    lambda image, label, scale: (image.flatten() * 1e3).exp(),
    lambda image, label, scale: image.flatten() / image.norm(),
    lambda image, label, scale: (image.flatten() - 0.5).sqrt(),
]
SHAPES = {
    "rows": (COUNT, DIM),
    "sorted_blocks": (CLASSES, DIM, 2),
    "query_random_shards": (ROWS, DIM),
    "query_clients": (SHARDS * 3, DIM),
}


@pytest.mark.parametrize("indices", INDICES)
@pytest.mark.parametrize("fill", FILLS)
def test_forty_kinds_of_records_keep_shape_and_finiteness(fill, indices):
    images = np.random.default_rng(0).random((COUNT, *SHAPE))
    images[list(INDICES[indices])] = FILLS[fill]
    for operation, _, per_class in (case for case in CASES if case[1] is REPLACE):
        rig = Rig(operation, REPLACE, per_class)
        shape = (CLASSES, DIM) if per_class else SHAPES.get(operation, (DIM,))
        blocks = {}
        if operation == "sorted_blocks":
            blocks = {"frame": torch.eye(DIM), "num_blocks": 2}
        for query in NASTY:
            rig.query = adapt_query(operation, query)
            answer = rig.ask(images, **blocks)
            assert answer.shape == shape
            assert answer.isfinite().all()


def test_a_scalar_and_an_image_are_parts_too():
    eighths = np.full((COUNT, *SHAPE), 0.125)
    rig = Rig("sum", ADD_REMOVE, query=lambda image, label, scale: image.sum())
    assert rig.ask(eighths).item() == COUNT * 0.5
    rig.query = lambda image, label, scale: image
    assert rig.ask(eighths).shape == SHAPE


def test_the_least_clip_norm_still_holds(monkeypatch):
    """Below 1e-160 the squares that make a norm vanish, and a part of any length would pass."""
    rig = Rig("sum", REPLACE)
    images = np.zeros((COUNT, *SHAPE))
    changed = images.copy()
    changed[0] = 1
    declared = measure_declared(monkeypatch, "sum", REPLACE, clip_norm=1.1e-30)
    for scale in (1e-29, 1e-160, 1e-170, 1e200):
        how = {"scale": scale, "clip_norm": 1.1e-30}
        assert (rig.ask(images, **how) - rig.ask(changed, **how)).norm() <= declared * LIMIT


LAYER = torch.nn.BatchNorm2d(1)


@pytest.mark.parametrize(
    ("query", "clip_norm", "error"),
    [
        *((center, bound, PlanError) for bound in (0.0, -1.0, math.inf, math.nan, 1e-300, 1e300)),
        # Randomness would be shared by the records of a batch, and nobody counts it.
        (lambda image, label, scale: torch.rand(3), 1.0, (RuntimeError, QueryError)),
        # A batch norm with running statistics
        (lambda image, label, scale: LAYER(image[None]), 1.0, RuntimeError),
    ],
)
def test_clip_norms_and_queries_without_a_bound_are_refused_before_any_charge(
    ledger, query, clip_norm, error
):
    match = {PlanError: "bound", RuntimeError: "vmap"}.get(error)
    with pytest.raises(error, match=match):
        Rig("sum", REPLACE, query=query, ledger=ledger).ask(HALF, clip_norm=clip_norm)
    assert ledger.entries() == []
