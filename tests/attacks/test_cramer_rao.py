"""The certificate against what it predicts: Jacobians by differences, and attacks that start at the truth, the best they can do."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
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


@cache
def made():
    """Six digits, a LeNet each: (problem, images, labels, certificate)."""
    images, labels = (each[:COUNT] for each in load_dataset("digits", public=True).records())
    images = images.double()[:, None]
    labels = labels[:, None]
    net = lenet(SHAPE, 10)
    weights = {
        name: each.double()
        for name, each in sample_initial_weights(
            net, COUNT, torch.Generator().manual_seed(0), 0.5
        ).items()
    }
    problem = Problem.from_images(net, F.cross_entropy, images, labels, weights)
    return problem, images, labels, compute_cramer_rao_bound(problem, images, labels)


def flat(problem, images, labels):
    found = compute_victim_gradients(problem, images, labels)
    return torch.cat([found[name].flatten(1) for name in problem.update], 1)


def differences(problem, images, labels):
    """The Jacobian [entries, values] of one victim's update, by central differences."""
    size = images.numel()
    step = 1e-4
    moved = (step * torch.eye(size, dtype=torch.float64)).view(size, *images.shape[1:])
    many = problem.select(torch.zeros(size, dtype=torch.long))
    known = labels.expand(size, -1)
    return ((flat(many, images + moved, known) - flat(many, images - moved, known)) / (2 * step)).T


def attacked(problem, labels, seen, start, information, steps=120):
    """Least squares within the box, by projected gradients that know the curvature, from the truth."""
    top = torch.linalg.eigvalsh(information)[:, -1].view(-1, 1, 1, 1, 1) * 1.05
    x = ahead = start.clone()
    for step in range(steps):
        value, pull = vjp(lambda x: flat(problem, x, labels), ahead)
        fresh = (ahead + pull(seen - value)[0] / top).clamp(0, 1)
        x, ahead = fresh, fresh + step / (step + 3) * (fresh - x)
    return x


def test_the_information_is_that_of_the_jacobian():
    problem, images, labels, found = made()
    one = problem.select(torch.tensor([2]))
    jacobian = differences(one, images[2:3], labels[2:3])
    expected = jacobian.T @ jacobian
    assert torch.allclose(
        found.fisher_information[2], expected, rtol=1e-5, atol=1e-7 * expected.max()
    )
    singular = torch.linalg.svdvals(jacobian)
    assert torch.allclose(
        found.predict_unbiased_mse(1e-2)[2], 1e-4 * (1 / singular**2).mean(), rtol=1e-3
    )
    assert found.rank.tolist() == [64] * COUNT


def test_the_best_attack_is_as_good_as_predicted():
    problem, images, labels, found = made()
    which = torch.arange(COUNT).repeat(4)
    noise_std = torch.tensor([1e-3, 1e-2], dtype=torch.float64).repeat_interleave(2 * COUNT)[
        :, None
    ]
    many = problem.select(which)
    truth = images[which]
    known = labels[which]
    clean = flat(many, truth, known)
    seen = clean + noise_std * torch.randn(
        clean.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    guess = attacked(many, known, seen, truth, found.fisher_information[which])
    error = (guess - truth).square().flatten(1).mean(1).view(2, 2, COUNT)
    for level, ours in zip((1e-3, 1e-2), error, strict=True):
        assert abs((ours / found.predict_mse(level)).mean() - 1) < 0.2
        assert (found.predict_mse(level) < found.predict_unbiased_mse(level)).all()  # the box helps


def test_steps_of_gauss_and_newton_get_there_from_where_a_search_ends():
    """Without the truth, from images that are off by more than the noise will leave."""
    problem, images, labels, found = made()
    generator = torch.Generator().manual_seed(4)
    start = images + 0.1 * torch.randn(images.shape, generator=generator, dtype=torch.float64)
    for noise_std in (1e-3, 1e-2):
        update = {
            name: u + noise_std * torch.randn(u.shape, generator=generator, dtype=u.dtype)
            for name, u in problem.update.items()
        }
        begun = Reconstruction(
            start,
            labels,
            torch.zeros(COUNT, dtype=torch.long),
            torch.zeros(COUNT, dtype=torch.float64),
        )
        ended = refine_by_gauss_newton(replace(problem, update=update), begun)
        error = (ended.images - images).square().flatten(1).mean(1)
        assert abs((error / found.predict_mse(noise_std)).mean() - 1) < 0.3
        assert ((ended.images >= 0) & (ended.images <= 1)).all()


def test_without_the_box_it_is_the_bound_of_cramer_and_rao():
    problem, images, labels, found = made()
    generator = torch.Generator().manual_seed(2)
    ratios = []
    noise_std = 1e-4
    value, pull = vjp(lambda x: flat(problem, x, labels), images)
    for _ in range(40):  # one Newton step from the truth, which at this noise is all there is
        drawn = noise_std * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        move = torch.linalg.solve(found.fisher_information, pull(drawn)[0].flatten(1)[..., None])[
            ..., 0
        ]
        ratios.append(move.square().mean(1) / found.predict_unbiased_mse(noise_std))
    assert abs(torch.stack(ratios).mean() - 1) < 0.1


def test_the_noise_for_a_target():
    _, _, _, found = made()
    for target in (25.0, 12.0):
        assert (found.predict_psnr(found.find_noise_std(target)) - target).abs().max() < 0.5
    assert (found.find_noise_std(12.0) > found.find_noise_std(25.0)).all()
    assert found.find_noise_std(1.0).isinf().all()  # mid-grey is better than that, whatever is sent


def test_clipping_loses_the_length_and_no_more():
    problem, images, labels, found = made()
    value, pull = vjp(lambda x: flat(problem, x, labels), images)
    norms = value.norm(dim=1)
    bound = 0.5
    assert (norms > bound).all()
    along = pull(value / norms[:, None])[0].flatten(1)  # J^T of the direction
    expected = (bound / norms).square()[:, None, None] * (
        found.fisher_information - along[:, :, None] * along[:, None]
    )
    clipped = compute_cramer_rao_bound(problem, images, labels, ClippingDefense(bound))
    assert torch.allclose(
        clipped.fisher_information, expected, rtol=1e-6, atol=1e-9 * expected.abs().max()
    )
    assert (clipped.predict_unbiased_mse(1e-3) > found.predict_unbiased_mse(1e-3)).all()
    same = compute_cramer_rao_bound(
        problem, images, labels, ClippingDefense(float(norms.max()) * 2)
    )
    assert torch.allclose(same.fisher_information, found.fisher_information)


def test_other_defences():
    problem, images, labels, found = made()
    assert torch.allclose(
        compute_cramer_rao_bound(problem, images, labels, NoiseDefense(0.1)).fisher_information,
        found.fisher_information,
    )
    pruned = compute_cramer_rao_bound(problem, images, labels, PruningDefense(0.5))
    assert (pruned.predict_unbiased_mse(1e-3) > found.predict_unbiased_mse(1e-3)).all()
    spread = QuantizationDefense(8).compute_rounding_std(problem.update)
    rounded = compute_cramer_rao_bound(
        problem, images, labels, QuantizationDefense(8), relative_noise_std=spread
    )
    smallest, largest = (
        getattr(torch.stack(list(spread.values())), name)(0).values for name in ("min", "max")
    )
    assert (rounded.predict_unbiased_mse(1.0) > found.predict_unbiased_mse(smallest)).all()
    assert (rounded.predict_unbiased_mse(1.0) < found.predict_unbiased_mse(largest)).all()


def test_what_the_update_does_not_tell():
    """A net that sees means of 2 x 2 pixels tells 16 numbers of 64, and noise cannot make the rest worse than a guess."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)).double()
    _, images, labels, _ = made()
    found = compute_cramer_rao_bound(
        Problem.from_images(net, F.cross_entropy, images, labels), images, labels
    )
    assert found.rank.tolist() == [16] * COUNT
    assert found.predict_unbiased_mse(1e-3).isinf().all()
    assert torch.allclose(
        found.null_space_fraction, torch.full_like(found.null_space_fraction, 0.75)
    )
    pooled = F.interpolate(F.avg_pool2d(images[:, 0], 2), scale_factor=2)[:, None]
    means = (pooled - images).square().flatten(1).mean(1)
    assert ((found.predict_mse(1e-9) / means - 1).abs() < 0.5).all()
    assert (found.predict_mse(1e3) <= (images - 0.5).square().flatten(1).mean(1) + 1e-9).all()


def test_images_behind_one_update_are_unknown_together():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10)).double()
    _, images, labels, _ = made()
    pairs = images.view(3, 2, *SHAPE)
    both = labels.view(3, 2)
    found = compute_cramer_rao_bound(
        problem := Problem.from_images(net, F.cross_entropy, pairs, both),
        pairs,
        both,
        chunk_size=50,
    )
    assert found.fisher_information.shape == (3, 128, 128)
    one = problem.select(torch.tensor([1]))
    jacobian = differences(one, pairs[1:2], both[1:2])
    assert torch.allclose(found.fisher_information[1], jacobian.T @ jacobian, atol=1e-7)
    alone = compute_cramer_rao_bound(
        Problem.from_images(net, F.cross_entropy, images, labels), images, labels
    )
    assert (
        found.predict_unbiased_mse(1e-3).mean() > 4 * alone.predict_unbiased_mse(1e-3).mean()
    )  # half the signal each, and each hides the other


def test_the_box_against_a_solver():
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(2, 30, 12, generator=generator, dtype=torch.float64)
    aim = torch.randn(2, 12, 3, generator=generator, dtype=torch.float64)
    found = solve_box_least_squares(factor.mT @ factor, aim, (0.0, 1.0), 2000)
    for victim in range(2):
        for draw in range(3):
            expected = lsq_linear(
                factor[victim].numpy(),
                (factor[victim] @ aim[victim, :, draw]).numpy(),
                (0, 1),
                tol=1e-12,
            ).x
            assert np.abs(found[victim, :, draw].numpy() - expected).max() < 1e-5


def test_float32_updates_and_other_boxes():
    problem, images, labels, found = made()
    single = replace(
        problem,
        weights={n: w.float() for n, w in problem.weights.items()},
        update={n: u.float() for n, u in problem.update.items()},
    )
    assert torch.allclose(
        compute_cramer_rao_bound(single, images.float(), labels).predict_unbiased_mse(1.0),
        found.predict_unbiased_mse(1.0),
        rtol=1e-3,
    )
    wide = CramerRaoBound(**{**vars(found), "images": found.images * 2 - 1, "bounds": (-1.0, 1.0)})
    assert (
        wide.predict_psnr(1e-3) > found.predict_psnr(1e-3)
    ).all()  # the same error in a box twice as wide


def test_images_that_are_not_behind_the_updates():
    problem, images, labels, _ = made()
    with pytest.raises(DataError, match="6 x 1"):
        compute_cramer_rao_bound(problem, images[:4], labels[:4])
    assert problem.to_float64().reference_tensor.dtype == torch.float64
