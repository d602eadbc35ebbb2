"""DP-Sinkhorn: an answer stays in its ball whatever is drawn, says what transport says, and a generator learns from it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import beta, norm
from sklearn.linear_model import LogisticRegression
from unwritten import Unwritten, clipping

from privot.data import load
from privot.data.records import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.methods.dp_sinkhorn import DPSinkhorn, Training, part, pull
from privot.nets import NETS, initialise
from privot.nets.waves import cosines
from privot.privacy import gate as gate_module
from privot.privacy.gate import SENSITIVITY, Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.product import Product
from privot.release import verify
from privot.runtime import Runtime, Streams, silent
from privot.synthesis import synthesize
from privot.transport.sinkhorn import potentials, squared_euclidean, transport

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE, CLASSES = (1, 4, 4), 2
WHOLE = (cosines(4, 4), cosines(4, 4))
SHARP = (0.0, 0.01, 500)  # no |.|_1, a small blur, many iterations: nearly exact transport


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gate_for(images, labels, plan, spec=None, seed=None):
    """Records that are tensors or arrays, in a box behind a gate."""
    box = Sensitive(np.asarray(images), np.asarray(labels), spec := spec or Spec(SHAPE, CLASSES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "cost", lambda plan: None)
        return Gate(box, plan, Unwritten(), Unwritten(), runtime=Runtime("cpu", microbatch=160), insecure_seed=seed)


def asking(noise=0.0, rate=1.0):
    return Plan((Stage("pull", "answer", noise, 200, Poisson(rate)),), Neighbours.ADD_REMOVE)


def drawn(images, labels):
    return SimpleNamespace(images=images, labels=labels)


def some(count, seed=0, shape=SHAPE):
    return torch.rand(count, *shape, generator=seeded(seed)), torch.arange(count) % CLASSES


# The bound


def ask(gate, images, labels, room=1, bound=1.0, rest=(15.0, 1.0, 0.5, 5)):
    return gate.answer("pull", pull, images, labels, WHOLE, CLASSES, room, *rest, bound=bound, shape=(len(labels), *SHAPE))


def test_neighbours_answers_are_no_farther_apart_than_the_table_says():
    rng, reach = np.random.default_rng(0), SENSITIVITY["answer", Neighbours.ADD_REMOVE]
    largest = 0.0
    for turn in range(60):
        count = int(rng.integers(1, 6))
        records = rng.integers(2, size=(count, *SHAPE)).astype(np.float32) if turn % 2 else rng.random((count, *SHAPE), np.float32)
        if turn % 3 == 0:  # the first record alone is looked at; without it, its opposite is
            records = np.concatenate([np.zeros((1, *SHAPE), np.float32), np.ones((count, *SHAPE), np.float32)])
        marks = rng.integers(CLASSES, size=len(records))
        images, labels = some(4, turn)
        room, bound = (1 if turn % 3 == 0 else 1 + turn % 5), float(10 ** rng.uniform(-3, 1))
        one = ask(gate_for(records, marks, asking()), images, labels, room, bound)
        two = ask(gate_for(records[1:], marks[1:], asking()), images, labels, room, bound) if len(records) > 1 else torch.zeros_like(one)
        assert one.norm() <= bound
        largest = max(largest, float((one - two).norm()) / bound)
    assert largest <= reach
    assert largest > 0.9 * reach  # the pairs do go for it: the factor 2 is needed


def asking_each(noise=0.0):
    return Plan((Stage("pull", "sum", noise, 200, Poisson(1.0)),), Neighbours.ADD_REMOVE)


def test_a_record_moves_the_sum_by_no_more_than_the_bound():
    rng, largest = np.random.default_rng(0), 0.0
    for turn in range(40):
        records = rng.integers(2, size=(4, *SHAPE)).astype(np.float32) if turn % 2 else rng.random((4, *SHAPE), np.float32)
        marks, bound = rng.integers(CLASSES, size=4), float(10 ** rng.uniform(-3, 0))
        images, dual = torch.rand(CLASSES, 3, *SHAPE, generator=seeded(turn)), torch.rand(CLASSES, 3, generator=seeded(turn)) * (turn % 3)
        one, two = (
            gate_for(records[start:], marks[start:], asking_each()).sum(
                "pull", part, images, dual, WHOLE, float(turn % 2), 0.5, bound=bound, per_class=True
            )
            for start in (0, 1)
        )
        largest = max(largest, float((one - two).norm()) / bound)
    assert SENSITIVITY["sum", Neighbours.ADD_REMOVE] == 1
    assert 0.99 < largest <= 1 + 1e-6


def advantage(noise, runs=120):
    """A lower bound, at 99 %, on true-positive less false-positive rate of one who tells the worst pair apart."""
    images, labels = torch.full((2, *SHAPE), 0.5), torch.arange(2)
    hits = []
    for seed, records in enumerate((torch.tensor([0.0, 1.0]), torch.tensor([1.0]))):  # of one colour each; the first alone is looked at
        gate = gate_for(records.view(-1, 1, 1, 1).expand(-1, *SHAPE), [0] * len(records), asking(noise), seed=seed)
        # a black record pulls down: the gradient of its distance is upwards
        hits.append(sum(float(ask(gate, images, labels, rest=(15.0, 0.0, 0.5, 2))[:, :, 0, 0].sum()) > 0 for _ in range(runs)))
    low = beta.ppf(0.005, hits[0], runs - hits[0] + 1) if hits[0] else 0.0
    high = beta.ppf(0.995, hits[1] + 1, runs - hits[1]) if hits[1] < runs else 1.0
    return low - high


def test_an_audit_sees_planted_bugs_and_lets_the_honest_gate_pass(monkeypatch):
    noise = 1.0
    most = 2 * norm.cdf(1 / noise / 2) - 1  # of one Gaussian answer with this multiplier: 0.383
    assert 0.1 < advantage(noise) <= most
    with monkeypatch.context() as planted:
        real = gate_module.noisy
        planted.setattr(gate_module, "noisy", lambda total, std, *more: real(total, std / 2, *more))
        assert advantage(noise) > most
    with monkeypatch.context() as planted:
        planted.setattr(gate_module, "_clip", clipping())
        assert advantage(noise) > most


def test_the_plan_is_poisson_steps_under_add_remove_and_prices_the_paper_as_known():
    plan = DPSinkhorn(clip="batch", noise=1.1, rate=50 / 60_000, steps=3_440_000).plan(Spec((1, 28, 28), 10))
    (stage,) = plan.stages
    assert (stage.verb, stage.steps, stage.sampling, plan.neighbours) == ("answer", 3_440_000, Poisson(50 / 60_000), Neighbours.ADD_REMOVE)
    assert plan.cost().epsilon(1e-5) == pytest.approx(8.5, abs=0.1)  # 10 by the moments that the paper counts with


# What an answer says


def test_an_answer_is_the_way_from_the_images_to_their_partners():
    images, labels = some(6)
    records, marks = some(6, 1)
    found = pull(drawn(records, marks), images, labels, WHOLE, CLASSES, 6, 15.0, *SHARP)
    gaps = (images[:, None] - records).flatten(2).square().sum(-1).numpy() * 4 + 1000 * (labels[:, None] != marks).numpy()
    _, partners = linear_sum_assignment(gaps)
    wanted = 2 * 2 * (images - records[partners]) / math.sqrt(6)  # pixels are in [-1, 1] there
    found = WHOLE[0] @ found @ WHOLE[1].T
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05)
    assert float(found.norm()) > 1


def test_room_that_is_not_filled_changes_nothing():
    images, labels = some(5)
    records, marks = some(7, 1)
    one, two = (pull(drawn(records, marks), images, labels, WHOLE, CLASSES, room, 15.0, 1.0, 5.0, 60) for room in (7, 19))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


def test_beyond_the_room_an_even_choice_is_looked_at():
    images, labels = some(5)
    records, marks = some(30, 1)
    given = images, labels, WHOLE, CLASSES, 10, 15.0, 1.0, 5.0, 30
    torch.testing.assert_close(pull(drawn(records, marks), *given), pull(drawn(records[::3], marks[::3]), *given))


def test_classes_weigh_alike_however_often_they_were_drawn():
    images, labels = some(6)
    records, marks = some(4, 1)
    many, names = torch.cat([records, records[marks == 0].repeat(5, 1, 1, 1)]), torch.cat([marks, torch.zeros(10, dtype=torch.int64)])
    one, two = (pull(drawn(*each), images, labels, WHOLE, CLASSES, 14, 15.0, 0.0, 0.5, 300) for each in ((records, marks), (many, names)))
    torch.testing.assert_close(one, two, rtol=0, atol=0.02)


def test_a_part_of_the_frequencies_is_the_projection():
    images, labels = some(4)
    few = cosines(4, 2)
    whole, part = (
        pull(drawn(*some(5, 1)), images, labels, (waves, waves), CLASSES, 5, 15.0, 1.0, 1.0, 20) for waves in (cosines(4, 4), few)
    )
    down = few.T @ cosines(4, 4)
    torch.testing.assert_close(part, down @ whole @ down.T, rtol=1e-4, atol=1e-4)
    assert part.norm() < whole.norm()


@pytest.mark.parametrize("absolute", [0.0, 1.0])
def test_parts_of_records_at_the_right_potentials_are_the_gradient_of_transport(absolute):
    images, dual = torch.rand(CLASSES, 5, *SHAPE, generator=seeded()).requires_grad_(), torch.zeros(CLASSES, 5)
    records, marks = some(14, 1)
    points = 2 * images.flatten(2) - 1
    costs = [squared_euclidean(points[label], (2 * records[marks == label] - 1).flatten(1), absolute) for label in range(CLASSES)]
    total = sum(transport(cost, 3.0, iterations=200) for cost in costs)
    (wanted,) = torch.autograd.grad(total, points)
    for label, cost in enumerate(costs):
        dual[label] = potentials(cost, 3.0, iterations=200).first
    gate = gate_for(records, marks, asking_each())
    found = gate.sum("pull", part, images.detach(), dual, WHOLE, absolute, 3.0, bound=100.0, per_class=True) / 7
    found = WHOLE[0].double() @ found @ WHOLE[1].T.double()
    torch.testing.assert_close(found.flatten(2).float(), wanted, rtol=1e-2, atol=1e-3)


# The public half

TINY = {"clip": "batch", "batch": 8, "width": 4, "code": 4, "room": 8, "iterations": 5}


def training(**settings):
    method = DPSinkhorn(**{**TINY, **settings})
    net = initialise(NETS["DeepConvGenerator"]((1, 8, 8), 2, method.code, method.width), seeded())
    return Training(method, net, Spec((1, 8, 8), 2), Streams(0, Runtime("cpu")))


def test_answers_move_the_images_downhill_and_none_drive_them_apart():
    def told(count, fresh, answer):
        there = training(steps=1000, learning=0.01, fresh=fresh, batch=20)
        for step in range(count):
            there.learn(step + 100, torch.full_like(there.answer, 0.0) if answer is None else answer(there))
        return there

    def brighter(there):  # the gradient of minus the sum of all pixels
        answer = torch.zeros_like(there.answer)
        answer[:, :, 0, 0] = -1.0
        return answer

    start, end = told(0, 0.0, None), told(30, 0.0, brighter)
    assert end.images.mean() > start.images.mean() + 0.1
    still, apart = told(30, 0.0, None), told(30, 1.0, None)
    assert apart.images.std(0).mean() > 1.5 * still.images.std(0).mean()
    torch.testing.assert_close(still.images.std(0).mean(), start.images.std(0).mean(), rtol=0.3, atol=0)


def test_a_run_that_was_killed_goes_on_where_the_ledger_says(tmp_path, monkeypatch):
    """It is charged once, asks no answer twice, and takes up the generator that it had."""
    box = Sensitive(*(each.numpy() for each in some(20, shape=(1, 8, 8))), Spec((1, 8, 8), 2, 20), name="some")
    method = DPSinkhorn(**{**TINY, "clip": "record"}, noise=20.0, rate=0.5, steps=100)
    book = Ledger(tmp_path / "book.jsonl")
    asked, real, begun = [], Gate.sum, []
    monkeypatch.setattr(Gate, "sum", lambda self, name, *more, **how: asked.append(self.left(name)) or real(self, name, *more, **how))
    first, there_are = Training.__init__, []

    def copied(there):
        there_are.append(there)
        return {key: value.clone() for key, value in there.pair.kept().items()}

    monkeypatch.setattr(Training, "__init__", lambda self, *given: first(self, *given) or begun.append(copied(self)))

    def stop(stage, step, of, **facts):
        if step == 75:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(box, method, out=tmp_path / "out", ledger=book, runtime=Runtime("cpu", 32), progress=stop)
    assert len(asked) == 75
    synthesize(box, method, out=tmp_path / "out", ledger=book, runtime=Runtime("cpu", 32), resume=True)
    assert asked == list(range(100, 0, -1))
    assert [each["kind"] for each in book.entries()].count("reserve") == 1
    assert [int(each["steps"]) for each in begun] == [0, 75]
    assert begun[1]["adam.0.step"] == 75
    assert not torch.equal(begun[0]["net.dense.weight"], begun[1]["net.dense.weight"])
    assert (there_are[1].pair.net.dense.weight - begun[1]["net.dense.weight"]).abs().max() > 1e-4  # and it went on to learn
    verify(tmp_path / "out")


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"batch": 1}, {"bound": 0.0}, {"fresh": 1.5}, {"noise": -1.0}, {"detail": 0.0}])
def test_settings_without_a_sense_are_refused(wrong):
    with pytest.raises(SettingError):
        DPSinkhorn(**wrong)


@pytest.mark.parametrize("clip", ["record", "batch"])
def test_sizes_that_must_be_known_are_asked_for_before_anything_is_read(clip):
    method = DPSinkhorn(clip=clip, noise=1.0)
    if clip == "batch":
        assert method.plan(Spec(SHAPE, CLASSES)).stages
    else:
        with pytest.raises(SettingError, match="declared"):
            method.plan(Spec(SHAPE, CLASSES))


# Use

LEARNING = {"rate": 0.05, "room": 90, "batch": 30, "steps": 120, "width": 8, "learning": 5e-3, "average": 0.97, "iterations": 12}


def digits(noise, **more):
    """How many held-out digits logistic regression gets right that has seen generated images alone."""
    records = load("digits", "train", public=True).records()
    method = DPSinkhorn(**{**LEARNING, **more}, noise=noise)
    spec = Spec((1, 8, 8), 10, len(records.labels))
    gate = gate_for(records.images, records.labels, method.plan(spec), spec, seed=0)
    made: Product = method.fit(gate, Streams(0, Runtime("cpu")), silent)
    assert made.fits(spec)
    images, labels = made.sample(spec, 1000)
    test = load("digits", "test", public=True).records()
    model = LogisticRegression(max_iter=300).fit(images.flatten(1).numpy(), labels.numpy())
    return model.score(test.images.flatten(1).numpy(), test.labels.numpy())


def test_it_learns_digits_at_a_moderate_noise_record_by_record():
    start, moderate, much = digits(0.0, steps=1), digits(0.75, steps=240), digits(50.0, steps=60)
    assert start < 0.3
    assert moderate > 0.6  # 72 records a step, 240 steps: epsilon near 10
    assert much < 0.4


def test_clipped_as_a_whole_it_learns_too_but_bears_little_noise():
    clean, little, moderate = (digits(noise, clip="batch") for noise in (0.0, 0.02, 0.75))
    assert clean > 0.5
    assert little > 0.4
    assert moderate < 0.4
