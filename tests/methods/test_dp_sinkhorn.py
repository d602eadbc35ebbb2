"""DP-Sinkhorn: what an answer says about transport, and a generator that learns from answers."""

import math
from types import SimpleNamespace

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.linear_model import LogisticRegression
from support.method_inputs import make_gate, make_rng

from privot.components.dct import dct_basis
from privot.components.sinkhorn_queries import project_low_frequencies
from privot.data import load_dataset
from privot.data.spec import Spec
from privot.methods.dp_sinkhorn import (
    DPSinkhorn,
    SinkhornTrainer,
    compute_record_gradient,
    compute_transport_gradient,
)
from privot.nets import GENERATORS, initialize_weights
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.runtime import Runtime, Streams, ignore_progress
from privot.transport.sinkhorn import (
    entropic_transport_cost,
    solve_potentials,
    squared_euclidean_cost,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 4, 4)
CLASSES = 2
IMAGE_SPEC = Spec((1, 8, 8), 2, 40)
WHOLE = torch.kron(dct_basis(4, 4), dct_basis(4, 4))
HALF = torch.kron(dct_basis(8, 4), dct_basis(8, 4))
SHARP = (0.0, 0.01, 500)  # no |.|_1, a small blur, many iterations: nearly exact transport
SUM = Plan((Stage("transport_gradient", "sum", 0.0, 1, Poisson(1.0)),), Neighbours.ADD_REMOVE)
TINY = {
    "clip_unit": "record",
    "batch_size": 8,
    "generator_channels": 4,
    "latent_dim": 4,
    "max_sample_size": 8,
    "sinkhorn_iterations": 5,
}


def make_images(count, seed=0):
    return torch.rand(count, *SHAPE, generator=make_rng(seed)), torch.arange(count) % CLASSES


def query(records, marks, images, labels, *rest, basis=WHOLE):
    """The transport gradient of a sample; `rest` begins with the largest number of records."""
    room, *penalties = rest
    return compute_transport_gradient(
        SimpleNamespace(images=records, labels=marks),
        project_low_frequencies(images, basis),
        labels,
        basis,
        CLASSES,
        room,
        15.0,
        *penalties,
    )


def test_the_plan_is_poisson_steps_and_prices_the_paper():
    plan = DPSinkhorn(
        clip_unit="batch", noise_multiplier=1.1, sample_rate=50 / 60_000, steps=3_440_000
    ).plan(Spec((1, 28, 28), 10))
    (stage,) = plan.stages
    assert (stage.operation, stage.steps, stage.sampling, plan.neighbours) == (
        "query_sample",
        3_440_000,
        Poisson(50 / 60_000),
        Neighbours.ADD_REMOVE,
    )
    # 10 by the moments that the paper counts with
    assert plan.cost().epsilon(1e-5) == pytest.approx(8.5, abs=0.1)


def test_an_answer_is_the_way_from_the_images_to_their_partners():
    images, labels = make_images(6)
    records, marks = make_images(6, 1)
    answer = query(records, marks, images, labels, 6, *SHARP)
    costs = 4 * (images[:, None] - records).flatten(2).square().sum(-1)
    costs += 1000 * (labels[:, None] != marks)
    _, partners = linear_sum_assignment(costs.numpy())
    # pixels are in [-1, 1] there
    expected = 2 * 2 * (images - records[partners]) / math.sqrt(6)
    answer = (answer @ WHOLE.T).view_as(images)
    torch.testing.assert_close(answer, expected, rtol=0, atol=0.05)
    assert float(answer.norm()) > 1


def test_the_room_for_records_changes_nothing_and_beyond_it_an_even_choice_is_compared():
    images, labels = make_images(5)
    few, many = (make_images(count, 1) for count in (7, 30))
    torch.testing.assert_close(
        query(*few, images, labels, 7, 1.0, 5.0, 60),
        query(*few, images, labels, 19, 1.0, 5.0, 60),
        rtol=1e-3,
        atol=1e-3,
    )
    torch.testing.assert_close(
        query(*many, images, labels, 10, 1.0, 5.0, 30),
        query(many[0][::3], many[1][::3], images, labels, 10, 1.0, 5.0, 30),
    )


def test_classes_weigh_alike_however_often_they_were_drawn():
    images, labels = make_images(6)
    records, marks = make_images(4, 1)
    more = torch.cat([records, records[marks == 0].repeat(5, 1, 1, 1)])
    more_marks = torch.cat([marks, torch.zeros(10, dtype=torch.int64)])
    torch.testing.assert_close(
        query(records, marks, images, labels, 14, 0.0, 0.5, 300),
        query(more, more_marks, images, labels, 14, 0.0, 0.5, 300),
        rtol=0,
        atol=0.02,
    )


@pytest.mark.parametrize("absolute", [0.0, 1.0])
def test_high_frequencies_are_unseen(absolute):
    """An answer about low frequencies does not depend on the high ones of the records."""
    low = torch.kron(dct_basis(4, 2), dct_basis(4, 2))

    def blur(images):
        return ((2 * images - 1).flatten(1) @ low @ low.T).view_as(images) / 2 + 0.5

    images, labels = make_images(4)
    records, marks = make_images(5, 1)
    rest = labels, 5, absolute, 1.0, 20
    answer = query(records, marks, images, *rest, basis=low)
    blurred = query(blur(records), marks, images, *rest, basis=low)
    torch.testing.assert_close(answer, blurred, rtol=1e-4, atol=1e-4)
    assert float(answer.norm()) > 1
    # and it is, in these frequencies, the answer about all of them between blurred images
    whole = query(blur(records), marks, blur(images), *rest)
    torch.testing.assert_close(answer, whole @ WHOLE.T @ low, rtol=1e-3, atol=1e-3)


def test_parts_of_records_at_the_right_potentials_are_the_gradient_of_transport():
    low = torch.kron(dct_basis(4, 3), dct_basis(4, 3))
    points = project_low_frequencies(
        torch.rand(CLASSES, 5, *SHAPE, generator=make_rng()), low
    ).requires_grad_()
    records, marks = make_images(14, 1)
    costs = [
        squared_euclidean_cost(
            points[label], project_low_frequencies(records[marks == label], low)
        ).sqrt()
        for label in range(CLASSES)
    ]
    total = sum(entropic_transport_cost(cost, 0.5, num_iterations=200) for cost in costs)
    (expected,) = torch.autograd.grad(total, points)
    potentials = torch.stack(
        [solve_potentials(cost.detach(), 0.5, num_iterations=200).f for cost in costs]
    )
    answer = make_gate(SUM, records, marks, Spec(SHAPE, CLASSES)).sum(
        "transport_gradient",
        compute_record_gradient,
        points.detach(),
        potentials,
        low,
        0.5,
        clip_norm=1.0,
        per_class=True,
    )
    torch.testing.assert_close((answer / 7).float(), expected, rtol=1e-2, atol=1e-3)
    assert float(expected.norm()) > 0.1


def make_trainer(**settings):
    method = DPSinkhorn(**TINY | settings)
    net = initialize_weights(
        GENERATORS["DcganGenerator"]((1, 8, 8), 2, method.latent_dim, method.generator_channels),
        make_rng(),
    )
    return SinkhornTrainer(method, net, IMAGE_SPEC, Streams(0, Runtime("cpu")))


def train(count, answer=None, **settings):
    """A generator after so many answers; without any, they say that nothing is to move."""
    trainer = make_trainer(steps=1000, learning_rate=0.01, batch_size=20, **settings)
    for step in range(count):
        zero = torch.zeros_like(trainer.noisy_gradient)
        trainer.train_step(step + 100, answer(trainer) if answer else zero)
    return trainer


def high_energy(images):
    """Energy of images of 8x8 beyond the four lowest frequencies of each side, a pixel."""
    low = project_low_frequencies(images, HALF).square().sum() / images.numel()
    return float((2 * images - 1).square().mean() - low)


@pytest.mark.parametrize("clip", ["record", "batch"])
def test_answers_move_the_images_downhill_and_none_drive_them_apart(clip):
    def brighter(trainer):  # the gradient of minus the sum of all pixels
        answer = torch.zeros_like(trainer.noisy_gradient)
        answer[:, 0] = -1.0
        return answer

    start = train(0, clip_unit=clip, fresh_fraction=0.0)
    end = train(30, brighter, clip_unit=clip, fresh_fraction=0.0)
    assert end.images.mean() > start.images.mean() + 0.1
    still = train(30, clip_unit=clip, fresh_fraction=0.0)
    apart = train(30, clip_unit=clip, fresh_fraction=1.0)
    assert apart.points.std(0).mean() > 1.5 * still.points.std(0).mean()


def test_high_frequencies_which_no_answer_holds_are_not_driven_apart():
    """Records hold the low frequencies where they are; nothing would hold the others."""
    start = train(0).images
    held = train(40, lambda trainer: trainer.repulsion.clone()).images
    full = torch.kron(dct_basis(8, 8), dct_basis(8, 8))
    low = full.T @ HALF @ HALF.T @ full
    driven = train(40, lambda trainer: trainer.repulsion @ low, frequency_fraction=1.0).images
    assert high_energy(held) < 0.5 * high_energy(start)
    assert high_energy(driven) > 3 * high_energy(start)
    paper, paper_driven = (
        train(40, clip_unit="batch", frequency_fraction=fraction).images
        for fraction in (DPSinkhorn().frequency_fraction, 1.0)
    )
    assert high_energy(paper) < 0.5 * high_energy(paper_driven)


@pytest.mark.parametrize("bound", [1.0, 0.3])
def test_images_distributed_as_the_records_are_stay_where_they_are(bound):
    """The repulsion cancels the records' pull on average, clipped or not."""
    settings = TINY | {"batch_size": 40, "clip_norm": bound}
    trainer = make_trainer(**settings)
    method = DPSinkhorn(**settings, sample_rate=1.0)
    gaps = []
    for _ in range(60):
        trainer._draw_batch()
        latents = torch.randn(40, trainer.settings.latent_dim, generator=trainer.rng)
        images = trainer.generator_trainer.net(latents, trainer.labels).detach()
        gate = make_gate(SUM, images, trainer.labels, IMAGE_SPEC)
        pull = method._query_record_gradients(gate, trainer).float()
        gaps.append((pull - trainer.repulsion).mean(0))
    gaps = torch.stack(gaps)  # [60, frequencies]
    error = gaps.std(0).square().sum().sqrt() / math.sqrt(60)
    assert gaps.mean(0).norm() < 2 * error


QUICK = {"steps": 80, "learning_rate": 0.04, "ema_decay": 0.9}


def score_on_digits(noise, **more):
    """The accuracy on held-out digits of logistic regression on generated images."""
    records = load_dataset("digits", "train", public=True).records()
    method = DPSinkhorn(
        **{
            "sample_rate": 0.05,
            "max_sample_size": 90,
            "batch_size": 30,
            "steps": 120,
            "generator_channels": 8,
            "learning_rate": 5e-3,
            "ema_decay": 0.97,
            "sinkhorn_iterations": 12,
            "noise_multiplier": noise,
            **more,
        }
    )
    spec = Spec((1, 8, 8), 10, len(records.labels))
    gate = make_gate(
        method.plan(spec), records.images, records.labels, spec, chunk=160, insecure_seed=0
    )
    artifact = method.fit(gate, Streams(0, Runtime("cpu")), ignore_progress)
    assert artifact.is_consistent_with(spec)
    images, labels = artifact.sample(spec, 1000)
    test = load_dataset("digits", "test", public=True).records()
    model = LogisticRegression(max_iter=300).fit(images.flatten(1).numpy(), labels.numpy())
    return model.score(test.images.flatten(1).numpy(), test.labels.numpy())


@pytest.mark.parametrize(
    ("noise", "settings", "least", "most"),
    [
        (0.3, QUICK, 0.5, 1.0),
        pytest.param(50.0, QUICK, 0.0, 0.4, marks=pytest.mark.slow),
        # 72 records a step, 240 steps: epsilon near 10
        pytest.param(0.75, {"steps": 240}, 0.6, 1.0, marks=pytest.mark.slow),
        # clipped as a whole it learns too but bears little noise
        pytest.param(0.0, {"clip_unit": "batch"}, 0.5, 1.0, marks=pytest.mark.slow),
        pytest.param(0.02, {"clip_unit": "batch"}, 0.4, 1.0, marks=pytest.mark.slow),
        pytest.param(0.75, {"clip_unit": "batch"}, 0.0, 0.4, marks=pytest.mark.slow),
    ],
)
def test_it_learns_digits_unless_the_noise_is_large(noise, settings, least, most):
    score = score_on_digits(noise, **settings)
    assert least <= score <= most
