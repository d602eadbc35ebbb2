"""Inversion by search: many victims at once are what one alone is, and images are recovered."""

import copy

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from support.seeding import seed_generator
from torch import nn
from torch.nn import functional

from privot.attacks.inversion import gradient_distances as distances
from privot.attacks.inversion import wasserstein_variants as variants
from privot.attacks.inversion.attacks import INVERSION_ATTACKS, InversionAttack, invert
from privot.attacks.inversion.batched_lbfgs import BatchedLbfgs
from privot.attacks.inversion.labels import recover_labels
from privot.attacks.inversion.models import (
    cnn6,
    compute_logistic_loss,
    lenet,
    sample_initial_weights,
)
from privot.attacks.inversion.objectives import OBJECTIVES
from privot.attacks.inversion.problem import Problem, compute_victim_gradients
from privot.attacks.inversion.problem_checks import check_update
from privot.attacks.inversion.search import ImageSearch
from privot.attacks.inversion.search_evaluation import extract_images
from privot.attacks.inversion.search_phase import SearchPhase
from privot.data import load_dataset
from privot.errors import DataError, PrivotError, SettingError

pytestmark = pytest.mark.usefixtures("one_thread")
LOSS = functional.cross_entropy
HYBRID = InversionAttack(
    "in short", (SearchPhase("norm", "adam", 30, 0.1), SearchPhase("squared", "lbfgs-search", 40))
)
QUICK = INVERSION_ATTACKS["idlg"].replace_optimizer("lbfgs-search", 60)
CLOSE = 1e-2  # mean squared error of a success


def load_records(count, batch=1):
    dataset = load_dataset("digits", "test", public=True)
    images, labels = dataset._read_records(slice(0, count * batch))
    return images.view(count, batch, 1, 8, 8), labels.view(count, batch)


def make_problem(count, batch=1, labels=None, **more):
    """Digits, each sent by a LeNet with weights of its own."""
    images, true_labels = load_records(count, batch)
    labels = true_labels if labels is None else labels
    net = lenet((1, 8, 8), 10)
    weights = sample_initial_weights(net, count, seed_generator(3), 0.5)
    return Problem.from_images(net, LOSS, images, labels, weights, **more), images, labels


def compute_errors(result, images):
    return (result.images - images).square().flatten(1).mean(1)


def patch_problem(problem, **changes):
    """Past the checks of a problem."""
    patched = copy.copy(problem)
    for name, value in changes.items():
        object.__setattr__(patched, name, value)
    return patched


# What a client sends


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("make", [lenet, cnn6])
def test_updates_of_all_victims_are_those_of_each_alone(make, batch):
    images, labels = load_records(3, batch)
    net = make((1, 8, 8), 10)
    weights = sample_initial_weights(net, 3, seed_generator())
    problem = Problem.from_images(net, LOSS, images, labels, weights)
    for victim in range(3):
        net.load_state_dict({name: value[victim] for name, value in weights.items()})
        net.zero_grad()
        LOSS(net(images[victim]), labels[victim]).backward()
        for name, weight in net.named_parameters():
            gradient = problem.update[name][victim]
            torch.testing.assert_close(gradient, weight.grad, rtol=1e-4, atol=1e-6)


def test_one_net_for_all_is_the_same_net_for_each():
    images, labels = load_records(4)
    net = lenet((1, 8, 8), 10)
    one = Problem.from_images(net, LOSS, images, labels)
    copies = {name: weight[None].expand(4, *weight.shape) for name, weight in one.weights.items()}
    many = Problem.from_images(net, LOSS, images, labels, copies)
    assert (one.has_shared_weights, many.has_shared_weights) == (True, False)
    again = compute_victim_gradients(one, images, labels)
    for name, gradient in one.update.items():
        torch.testing.assert_close(gradient, many.update[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-6)


def test_a_defense_sees_the_gradient_of_each_image():
    plain, _, _ = make_problem(2, batch=3)
    shapes = {}

    def average(update, generator):
        shapes.update({name: list(value.shape) for name, value in update.items()})
        return {name: value.mean(1) for name, value in update.items()}

    defended, _, _ = make_problem(2, batch=3, defense=average)
    assert shapes["dense.bias"] == [2, 3, 10]
    for name, gradient in plain.update.items():
        torch.testing.assert_close(gradient, defended.update[name], rtol=1e-4, atol=1e-6)


# Bad input: one line, with the remedy


class Round(nn.Module):
    def forward(self, x):
        return x.round()


class Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient * 2


class Double(nn.Module):
    def forward(self, x):
        return Once.apply(x)


def check(*layers, **changed):
    """Check the weights of a net, or of a LeNet, as its update."""
    net = nn.Sequential(*layers) if layers else lenet((1, 8, 8), 10)
    update = {name: weight.detach()[None] for name, weight in net.named_parameters()}
    return check_update(net, update | changed, loss_fn=LOSS, shape=(1, 8, 8))


def recover_one(net, loss, label):
    return recover_labels(
        Problem.from_images(net, loss, load_records(1)[0], torch.tensor([[label]]))
    )


def build_lenet_problem(images, labels):
    return Problem.from_images(lenet((1, 8, 8), 10), LOSS, images, torch.tensor(labels))


FLAT = nn.Flatten()
LAST = nn.Linear(64, 10)
BAD = {
    "is missing. Send": lambda: check_update(
        lenet((1, 8, 8), 10), {"conv1.bias": torch.zeros(1, 12)}
    ),
    "no trainable parameter other": lambda: check(other=torch.zeros(1, 2)),
    r"dense.bias has shape \[1, 11\]": lambda: check(**{"dense.bias": torch.zeros(1, 11)}),
    "not finite. Look for an overflow": lambda: check(
        **{"dense.bias": torch.full((1, 10), torch.nan)}
    ),
    "batch norm in training mode.*Call model.eval": lambda: check(FLAT, nn.BatchNorm1d(64), LAST),
    "dropout in training mode.*Call model.eval": lambda: check(FLAT, nn.Dropout(), LAST),
    "does not depend smoothly": lambda: check(FLAT, Round(), LAST),
    "second derivative is wrong: .* Write that layer": lambda: check(FLAT, LAST, Double()),
    "no trainable parameter": lambda: check_update(FLAT, {}),
    "Use 0 to 9": lambda: build_lenet_problem(torch.rand(1, 1, 1, 8, 8), [[10]]),
    r"\[N, batch.* are needed": lambda: build_lenet_problem(torch.rand(2, 1, 8, 8), [0, 1]),
    "no attack 'dgl'. Choose one of dlg": lambda: invert(make_problem(1)[0], "dgl"),
    "no objective": lambda: SearchPhase("cubed"),
    "no optimizer": lambda: SearchPhase("norm", "sgd"),
    "needs adam": lambda: SearchPhase("critic", "lbfgs"),
    "labels: ": lambda: invert(make_problem(1)[0], "idlg", labels=torch.tensor([[12]])),
    "use the attack dlg": lambda: recover_one(nn.Sequential(nn.Conv2d(1, 10, 8), FLAT), LOSS, 0),
    "Give the labels": lambda: recover_one(cnn6((1, 8, 8)), compute_logistic_loss, 1),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused_in_one_line(words):
    with pytest.raises(PrivotError, match=words) as caught:
        BAD[words]()
    assert isinstance(caught.value, (DataError, SettingError))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_a_wrong_second_derivative_is_seen_whatever_the_weights(count):
    """Along one direction one net of sixteen would pass; along eight it is once in 4e9."""
    for _ in range(count):
        with pytest.raises(SettingError, match="second derivative is wrong"):
            check(FLAT, nn.Linear(64, 10), Double())
    frozen = nn.BatchNorm1d(16).eval()
    check(FLAT, nn.Linear(64, 16), nn.ReLU(), frozen, nn.Linear(16, 10))  # passes


# Labels


def test_labels_are_recovered_exactly_of_one_image_and_mostly_of_a_batch():
    relu = nn.Sequential(FLAT, nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10, bias=False))
    problem, images, labels = make_problem(50)
    assert torch.equal(recover_labels(problem), labels)
    # no bias: row sums, where features are not negative
    assert torch.equal(recover_labels(Problem.from_images(relu, LOSS, images, labels)), labels)
    bare = Problem.from_images(cnn6((1, 8, 8), 10), LOSS, *load_records(3))
    assert recover_labels(bare).shape == (3, 1)
    problem, images, labels = make_problem(20, batch=4)
    without_bias = Problem.from_images(relu, LOSS, images, labels)
    for given, share in ((problem, 0.9), (without_bias, 0.8)):
        assert (recover_labels(given) == labels.sort(1).values).float().mean() > share


# Objectives


@pytest.fixture
def pair():
    generator = seed_generator()

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [{"a": draw(6, 4), "b": draw(6)} for _ in range(2)]


def test_the_norm_is_the_dual_of_two_single_points(pair):
    one, two = pair
    gap = distances.flatten_tensor_dict(one) - distances.flatten_tensor_dict(two)
    norm = distances.compute_l2_gradient_distance(one, two)
    best = gap / gap.norm()  # a linear critic of gradient norm 1
    assert norm == pytest.approx(float(best @ gap), rel=1e-9)
    others = torch.randn(1000, len(gap), generator=seed_generator(1), dtype=torch.float64)
    assert ((others / others.norm(dim=1, keepdim=True)) @ gap).max() < norm


def test_sorted_is_the_cheapest_assignment_of_entries(pair):
    one, two = pair
    total = 0
    for name in two:
        cost = (one[name].flatten()[:, None] - two[name].flatten()).square()
        total += cost[linear_sum_assignment(cost)].sum()
    assert variants.compute_sorted_gradient_distance(one, two) == pytest.approx(float(total))
    # by index and value: between sorted and squared
    near, *middle, far = (
        float(variants.compute_index_value_distance(one, two, weight))
        for weight in (0, 0.01, 0.3, 3, 1e4)
    )
    assert near == pytest.approx(float(total))
    assert far == pytest.approx(float(distances.compute_squared_gradient_distance(one, two)))
    assert near < middle[2] < far


def test_objectives_without_positions_cannot_see_a_permutation(pair):
    one, _ = pair
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    rows = {name: value[order] for name, value in one.items()}
    cells = {
        name: value.flatten()[torch.randperm(value.numel(), generator=seed_generator())].view_as(
            value
        )
        for name, value in one.items()
    }
    blind = {
        name: tuple(float(objective.distance(moved, one)) < 1e-12 for moved in (rows, cells))
        for name, objective in OBJECTIVES.items()
    }
    assert blind.pop("sorted") == (True, True)
    assert blind.pop("sliced") == (True, False)
    assert set(blind.values()) == {(False, False)}


# The optimizer


@pytest.mark.parametrize("history", [3, 100])  # full, and with room
def test_lbfgs_is_torch_s_for_each_problem(history):
    generator = seed_generator()
    curvatures = torch.rand(5, 8, generator=generator, dtype=torch.float64) * 3 + 0.2
    start = torch.randn(5, 8, generator=generator, dtype=torch.float64)

    def compute(x, curvature):
        coupling = (x[..., 1:] * x[..., :-1]).square().sum(-1)
        return (curvature * x.square()).sum(-1) + 0.1 * coupling

    ours = BatchedLbfgs(learning_rate=0.7, history_size=history, tolerance=0)
    x = start.clone()
    for _ in range(10):
        free = x.clone().requires_grad_()
        values = compute(free, curvatures)
        (gradient,) = torch.autograd.grad(values.sum(), free)
        x, _ = ours.step(x, values.detach(), gradient)
    how = {"lr": 0.7, "max_iter": 10, "max_eval": 100, "history_size": history}
    for number in range(5):
        own = start[number].clone().requires_grad_()
        theirs = torch.optim.LBFGS([own], tolerance_grad=0, tolerance_change=0, **how)

        def closure(own=own, theirs=theirs, number=number):
            theirs.zero_grad()
            value = compute(own, curvatures[number])
            value.backward()
            return value

        theirs.step(closure)
        torch.testing.assert_close(x[number], own.detach(), rtol=1e-9, atol=1e-9)


def test_backtracking_descends_where_a_full_step_does_not():
    """log cosh: its gradient is flat far out, so full steps jump over the valley for good."""
    x = torch.tensor([[3.0], [6.0]], dtype=torch.float64)
    search = BatchedLbfgs(learning_rate=1.0, use_line_search=True)
    for _ in range(30):
        x, _ = search.step(x, torch.cosh(x).log().sum(1), torch.tanh(x))
    assert torch.cosh(x).log().sum(1).max() < 1e-8


def test_a_victim_does_not_depend_on_the_others():
    """Although some end early and leave the computation."""
    problem, _, labels = make_problem(6)
    start = torch.randn(6, 64, generator=seed_generator())
    phase = SearchPhase("squared", "lbfgs-search", 60)

    def search(problem, labels, start):
        generator = torch.Generator()
        return ImageSearch.initialize(problem, labels, generator, start).run_phase(phase, generator)

    together = search(problem, labels, start.clone())
    images = extract_images(problem, together.x)
    assert len(set(together.steps.tolist())) > 2
    last = torch.tensor([5])
    alone = search(problem.select(last), labels[last], start[last])
    assert abs(int(alone.steps[0]) - int(together.steps[5])) <= 3  # rounding of other kernels
    image = extract_images(problem, alone.x)[0]
    torch.testing.assert_close(image, images[5], rtol=0, atol=0.02)


def test_a_victim_with_a_broken_update_harms_nobody():
    problem, images, labels = make_problem(4)
    update = {name: value.clone() for name, value in problem.update.items()}
    update["dense.bias"][1] = torch.nan
    result = invert(patch_problem(problem, update=update), QUICK, labels=labels)
    assert (compute_errors(result, images)[[0, 2, 3]] < CLOSE).all()
    assert result.steps[1] <= 2


# Attacks


@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param("dlg", 0.6, marks=pytest.mark.slow),
        ("idlg", 0.8),
        pytest.param("hybrid", 0.8, marks=pytest.mark.slow),
        ("wdlg", 0.8),
    ],
)
def test_images_are_recovered(name, share):
    problem, images, labels = make_problem(6)
    attacks = {
        "dlg": INVERSION_ATTACKS["dlg"].replace_optimizer("lbfgs-search", 60),
        "idlg": QUICK,
        "hybrid": HYBRID,
        "wdlg": INVERSION_ATTACKS["wdlg"].replace_optimizer("adam", 60),
    }
    result = invert(problem, attacks[name])
    assert (compute_errors(result, images) < CLOSE).float().mean() >= share
    assert (result.labels == labels).float().mean() > 0.9


@pytest.mark.parametrize(
    ("name", "optimizer", "steps"),
    [
        pytest.param("wdlg-sorted", "lbfgs-search", 60, marks=pytest.mark.slow),
        ("wdlg-critic", "adam", 5),
    ],
)
def test_sorted_entries_and_a_short_critic_do_not_recover_the_image(name, optimizer, steps):
    problem, images, _ = make_problem(2)
    result = invert(problem, INVERSION_ATTACKS[name].replace_optimizer(optimizer, steps))
    assert result.images.isfinite().all()
    assert (compute_errors(result, images) > CLOSE).all()


@pytest.mark.slow
def test_under_adam_the_norm_needs_fewer_steps_than_dlg():
    problem, images, _ = make_problem(12)
    first = {}
    for name in ("dlg", "wdlg"):
        reached = torch.full((12,), 10_000)

        def watch(step, which, current, reached=reached):
            close = (current - images[which]).square().flatten(1).mean(1) < CLOSE
            reached[which] = torch.where(close, reached[which].clamp(max=step), reached[which])

        invert(problem, INVERSION_ATTACKS[name].replace_optimizer("adam", 300), callback=watch)
        first[name] = reached
    both = (first["dlg"] < 10_000) & (first["wdlg"] < 10_000)
    assert both.sum() >= 6
    assert (first["dlg"][both] / first["wdlg"][both]).median() > 1.5


@pytest.mark.slow
def test_a_batch_of_images_is_recovered():
    problem, images, labels = make_problem(3, 2, labels=torch.arange(6).view(3, 2))
    result = invert(problem, INVERSION_ATTACKS["idlg"].replace_optimizer("lbfgs-search", 150))
    assert torch.equal(result.labels, labels)
    errors = (result.images - images).square().flatten(2).mean(2)
    assert errors.lt(CLOSE).float().mean() > 0.6


def test_only_what_is_not_solved_restarts():
    problem, images, _ = make_problem(10)
    short = INVERSION_ATTACKS["idlg"].replace_optimizer("lbfgs", 40)
    once = invert(problem, short, seed=2)
    more = invert(problem, short, seed=2, restarts=2)
    solved = once.residual < 1e-3
    assert 0 < solved.sum() < 10
    assert torch.equal(more.steps[solved], once.steps[solved])
    assert (more.steps[~solved] > once.steps[~solved]).all()
    assert (more.residual <= once.residual).all()
    errors = [compute_errors(result, images) for result in (more, once)]
    assert (errors[0] < CLOSE).sum() > (errors[1] < CLOSE).sum()


@pytest.mark.parametrize(("optimizer", "rate"), [("adam", 0.1), ("lbfgs-search", 1.0)])
def test_bounds_hold(optimizer, rate):
    problem, _, _ = make_problem(4)
    bounded, free = (
        invert(problem, InversionAttack("one", (phase,)))
        for phase in (
            SearchPhase("squared", optimizer, 15, rate, clamp_to_bounds=True),
            SearchPhase("squared", optimizer, 3, rate),
        )
    )
    assert bounded.images.max() <= 1.0 or bounded.steps.max() == 1
    assert free.images.max() > 1


@pytest.mark.slow
def test_an_attacker_who_knows_what_was_pruned_does_better():
    def prune(update, generator):
        pruned = {}
        for name, value in update.items():
            sizes = value[:, 0].abs()
            limits = sizes.flatten(1).quantile(0.4, 1).view(-1, *[1] * (sizes.ndim - 1))
            pruned[name] = torch.where(sizes > limits, value[:, 0], 0)
        return pruned

    problem, images, labels = make_problem(4, defense=prune)
    mask = {name: value != 0 for name, value in problem.update.items()}
    naive, aware = (
        compute_errors(invert(given, QUICK, labels=labels), images).median()
        for given in (problem, patch_problem(problem, compare_mask=mask))
    )
    assert aware < naive / 4


def test_the_cells_of_a_quantizer_are_no_error():
    problem, images, labels = make_problem(2)
    wide = {name: torch.full_like(value, 0.01) for name, value in problem.update.items()}
    near = {name: value + 0.009 for name, value in problem.update.items()}
    search = ImageSearch.initialize(
        patch_problem(problem, slack=wide, update=near),
        labels,
        torch.Generator(),
        images.flatten(1),
    )
    state = search.run_phase(SearchPhase("squared", "adam", 1, 0.1), torch.Generator())
    assert (state.residual < 1e-9).all()


@pytest.mark.slow
def test_clipping_hides_nothing_from_an_objective_without_scale():
    problem, images, _ = make_problem(5)
    clipped = {name: 0.05 * value for name, value in problem.update.items()}
    problem = patch_problem(problem, update=clipped)
    cosine = InversionAttack("cosine", (SearchPhase("cosine", "lbfgs-search", 80),))
    plain, free = (compute_errors(invert(problem, attack), images) for attack in (QUICK, cosine))
    assert (plain > CLOSE).all()
    assert (free < CLOSE).float().mean() > 0.6


def test_traces_callbacks_and_chunks():
    problem, images, labels = make_problem(3)
    steps = []

    def watch(step, which, current):
        steps.append(step)

    result = invert(problem, QUICK, chunk_size=2, trace_steps=(1, 20, 50), callback=watch)
    assert torch.equal(result.labels, labels)
    assert (compute_errors(result, images) < CLOSE).sum() >= 2
    assert [step for step, _ in result.trace][:2] == [1, 20]
    assert all(current.shape == images.shape for _, current in result.trace)
    first = (result.trace[0][1] - images).square().mean()
    assert first > 10 * (result.images - images).square().mean()
    second = steps.index(1, 1)  # of the second chunk
    assert steps == [*range(1, second + 1), *range(1, len(steps) - second + 1)]
