"""The certificate against Jacobians by differences, and attacks that start at the truth."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
from support.seeding import seed_generator
from torch import nn
from torch.func import vjp
from torch.nn import functional as F

from privot.attacks.inversion.box_least_squares import solve_box_least_squares
from privot.attacks.inversion.cramer_rao import CramerRaoBound, compute_cramer_rao_bound
from privot.attacks.inversion.defenses import (
    ClippingDefense,
    NoiseDefense,
    PruningDefense,
    QuantizationDefense,
)
from privot.attacks.inversion.gauss_newton import refine_by_gauss_newton
from privot.attacks.inversion.models import lenet, sample_initial_weights
from privot.attacks.inversion.problem import Problem, Reconstruction, compute_victim_gradients
from privot.data import load_dataset
from privot.errors import DataError

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (1, 8, 8)
COUNT = 6


def draw(seed, *shape):
    return torch.randn(shape, generator=seed_generator(seed), dtype=torch.float64)


@cache
def build_problem():
    """Six digits, a LeNet each: (problem, images, labels, certificate)."""
    images, labels = (part[:COUNT, None] for part in load_dataset("digits", public=True).records())
    images = images.double()
    net = lenet(SHAPE, 10)
    weights = sample_initial_weights(net, COUNT, seed_generator(), 0.5)
    weights = {name: weight.double() for name, weight in weights.items()}
    problem = Problem.from_images(net, F.cross_entropy, images, labels, weights)
    return problem, images, labels, compute_cramer_rao_bound(problem, images, labels)


def compute_mse(images, truth):
    return (images - truth).square().flatten(1).mean(1)


def compute_flat(problem, images, labels):
    gradients = compute_victim_gradients(problem, images, labels)
    return torch.cat([gradients[name].flatten(1) for name in problem.update], 1)


def compute_differences(problem, images, labels):
    """The Jacobian [entries, values] of one victim's update, by central differences."""
    size = images.numel()
    step = 1e-4
    moves = (step * torch.eye(size, dtype=torch.float64)).view(size, *images.shape[1:])
    many = problem.select(torch.zeros(size, dtype=torch.long))
    labels = labels.expand(size, -1)
    up, down = (compute_flat(many, images + move, labels) for move in (moves, -moves))
    return ((up - down) / (2 * step)).T


def search_from_truth(problem, labels, update, start, information, steps=120):
    """Least squares within the bounds, by projected gradients that know the curvature."""
    top = torch.linalg.eigvalsh(information)[:, -1].view(-1, 1, 1, 1, 1) * 1.05
    x = ahead = start.clone()
    for step in range(steps):
        value, pull = vjp(lambda x: compute_flat(problem, x, labels), ahead)
        fresh = (ahead + pull(update - value)[0] / top).clamp(0, 1)
        x, ahead = fresh, fresh + step / (step + 3) * (fresh - x)
    return x


def test_the_information_is_that_of_the_jacobian():
    problem, images, labels, bound = build_problem()
    one = problem.select(torch.tensor([2]))
    jacobian = compute_differences(one, images[2:3], labels[2:3])
    expected = jacobian.T @ jacobian
    atol = float(1e-7 * expected.max())
    torch.testing.assert_close(bound.fisher_information[2], expected, rtol=1e-5, atol=atol)
    mse = 1e-4 * (1 / torch.linalg.svdvals(jacobian) ** 2).mean()
    assert torch.allclose(bound.predict_unbiased_mse(1e-2)[2], mse, rtol=1e-3)
    assert bound.rank.tolist() == [64] * COUNT


@pytest.mark.slow
def test_the_best_attack_is_as_good_as_predicted():
    problem, images, labels, bound = build_problem()
    which = torch.arange(COUNT).repeat(4)
    noise_std = torch.tensor([1e-3, 1e-2], dtype=torch.float64).repeat_interleave(2 * COUNT)
    many = problem.select(which)
    clean = compute_flat(many, images[which], labels[which])
    update = clean + noise_std[:, None] * draw(1, *clean.shape)
    information = bound.fisher_information[which]
    guess = search_from_truth(many, labels[which], update, images[which], information)
    errors = compute_mse(guess, images[which]).view(2, 2, COUNT)
    for level, ours in zip((1e-3, 1e-2), errors, strict=True):
        predicted = bound.predict_mse(level)
        assert abs((ours / predicted).mean() - 1) < 0.2
        assert (predicted < bound.predict_unbiased_mse(level)).all()  # bounds help


@pytest.mark.parametrize("noise_std", [pytest.param(1e-3, marks=pytest.mark.slow), 1e-2])
def test_gauss_newton_reaches_the_bound_from_where_a_search_ends(noise_std):
    """Without the truth, from images that are off by more than the noise will leave."""
    problem, images, labels, bound = build_problem()
    start = images + 0.1 * draw(4, *images.shape)
    update = {
        name: value + noise_std * draw(5 + number, *value.shape)
        for number, (name, value) in enumerate(problem.update.items())
    }
    zeros = torch.zeros(COUNT)
    reconstruction = Reconstruction(start, labels, zeros.long(), zeros.double())
    refined = refine_by_gauss_newton(replace(problem, update=update), reconstruction).images
    ratio = compute_mse(refined, images) / bound.predict_mse(noise_std)
    assert abs(ratio.mean() - 1) < 0.3
    assert ((refined >= 0) & (refined <= 1)).all()


def test_without_bounds_it_is_the_bound_of_cramer_and_rao():
    problem, images, labels, bound = build_problem()
    value, pull = vjp(lambda x: compute_flat(problem, x, labels), images)
    noise = 1e-4 * draw(2, 40, *value.shape)
    ratios = []
    for drawn in noise:  # one Newton step from the truth, which at this noise is all there is
        step = pull(drawn)[0].flatten(1)
        moves = torch.linalg.solve(bound.fisher_information, step)
        ratios.append(moves.square().mean(1) / bound.predict_unbiased_mse(1e-4))
    assert abs(torch.stack(ratios).mean() - 1) < 0.1


def test_the_noise_for_a_target():
    bound = build_problem()[-1]
    for target in (25.0, 12.0):
        assert (bound.predict_psnr(bound.find_noise_std(target)) - target).abs().max() < 0.5
    assert (bound.find_noise_std(12.0) > bound.find_noise_std(25.0)).all()
    assert bound.find_noise_std(1.0).isinf().all()  # mid-grey is better than that, without any


def test_clipping_loses_the_length_and_no_more():
    problem, images, labels, bound = build_problem()
    value, pull = vjp(lambda x: compute_flat(problem, x, labels), images)
    norms = value.norm(dim=1)
    clip_norm = 0.5
    assert (norms > clip_norm).all()
    along = pull(value / norms[:, None])[0].flatten(1)  # J^T of the direction
    rest = bound.fisher_information - along[:, :, None] * along[:, None]
    expected = (clip_norm / norms).square()[:, None, None] * rest
    clipped, same = (
        compute_cramer_rao_bound(problem, images, labels, ClippingDefense(norm))
        for norm in (clip_norm, float(norms.max()) * 2)
    )
    atol = float(1e-9 * expected.abs().max())
    torch.testing.assert_close(clipped.fisher_information, expected, rtol=1e-6, atol=atol)
    assert (clipped.predict_unbiased_mse(1e-3) > bound.predict_unbiased_mse(1e-3)).all()
    assert torch.allclose(same.fisher_information, bound.fisher_information)


def test_noise_pruning_and_rounding():
    problem, images, labels, bound = build_problem()
    noisy, pruned = (
        compute_cramer_rao_bound(problem, images, labels, defense)
        for defense in (NoiseDefense(0.1), PruningDefense(0.5))
    )
    assert torch.allclose(noisy.fisher_information, bound.fisher_information)
    assert (pruned.predict_unbiased_mse(1e-3) > bound.predict_unbiased_mse(1e-3)).all()
    defense = QuantizationDefense(8)
    std = defense.compute_rounding_std(problem.update)
    rounded = compute_cramer_rao_bound(problem, images, labels, defense, relative_noise_std=std)
    smallest, largest = torch.stack([*std.values()]).aminmax(dim=0)
    mse = rounded.predict_unbiased_mse(1.0)
    assert (mse > bound.predict_unbiased_mse(smallest)).all()
    assert (mse < bound.predict_unbiased_mse(largest)).all()


def test_pixels_that_the_update_does_not_show():
    """Means of 2 x 2 pixels are 16 numbers of 64; noise makes the rest no worse than a guess."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)).double()
    _, images, labels, _ = build_problem()
    problem = Problem.from_images(net, F.cross_entropy, images, labels)
    bound = compute_cramer_rao_bound(problem, images, labels)
    assert bound.rank.tolist() == [16] * COUNT
    assert bound.predict_unbiased_mse(1e-3).isinf().all()
    fraction = bound.null_space_fraction
    assert torch.allclose(fraction, torch.full_like(fraction, 0.75))
    pooled = F.interpolate(F.avg_pool2d(images[:, 0], 2), scale_factor=2)[:, None]
    assert ((bound.predict_mse(1e-9) / compute_mse(pooled, images) - 1).abs() < 0.5).all()
    assert (bound.predict_mse(1e3) <= compute_mse(0.5, images) + 1e-9).all()


def test_images_behind_one_update_are_unknown_together():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10)).double()
    _, images, labels, _ = build_problem()
    pairs = images.view(3, 2, *SHAPE)
    both = labels.view(3, 2)
    problem = Problem.from_images(net, F.cross_entropy, pairs, both)
    bound = compute_cramer_rao_bound(problem, pairs, both, chunk_size=50)
    assert bound.fisher_information.shape == (3, 128, 128)
    jacobian = compute_differences(problem.select(torch.tensor([1])), pairs[1:2], both[1:2])
    assert torch.allclose(bound.fisher_information[1], jacobian.T @ jacobian, atol=1e-7)
    single = Problem.from_images(net, F.cross_entropy, images, labels)
    alone = compute_cramer_rao_bound(single, images, labels).predict_unbiased_mse(1e-3).mean()
    # half the signal each, and one hides the other
    assert bound.predict_unbiased_mse(1e-3).mean() > 4 * alone


def test_bounded_least_squares_against_a_solver():
    factor = draw(0, 2, 30, 12)
    aim = draw(1, 2, 12, 3)
    solved = solve_box_least_squares(factor.mT @ factor, aim, (0.0, 1.0), 2000).numpy()
    goals = (factor @ aim).numpy()
    for victim in range(2):
        for column in range(3):
            given = (factor[victim].numpy(), goals[victim, :, column])
            expected = lsq_linear(*given, (0, 1), tol=1e-12).x
            np.testing.assert_allclose(solved[victim, :, column], expected, rtol=0, atol=1e-5)


def test_float32_updates_other_bounds_and_other_images():
    problem, images, labels, bound = build_problem()
    single = {
        part: {name: value.float() for name, value in getattr(problem, part).items()}
        for part in ("weights", "update")
    }
    of_single = compute_cramer_rao_bound(replace(problem, **single), images.float(), labels)
    mse = bound.predict_unbiased_mse(1.0)
    assert torch.allclose(of_single.predict_unbiased_mse(1.0), mse, rtol=1e-3)
    facts = {**vars(bound), "images": bound.images * 2 - 1, "bounds": (-1.0, 1.0)}
    # the same error in bounds twice as wide
    assert (CramerRaoBound(**facts).predict_psnr(1e-3) > bound.predict_psnr(1e-3)).all()
    with pytest.raises(DataError, match="6 x 1"):
        compute_cramer_rao_bound(problem, images[:4], labels[:4])
    assert problem.to_float64().reference_tensor.dtype == torch.float64
