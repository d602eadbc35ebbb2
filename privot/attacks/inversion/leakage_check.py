"""Does my update leak, and how much noise prevents it? Attack tiers on your own model and batch.

A search that fails does not show that an update is safe. So the result is the worst of all tiers:
label recovery, the Cramér-Rao bound, the closed form, and a search with restarts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from privot.attacks.inversion.attacks import invert
from privot.attacks.inversion.cramer_rao import compute_cramer_rao_bound
from privot.attacks.inversion.gauss_newton import refine_by_gauss_newton
from privot.attacks.inversion.labels import recover_labels
from privot.attacks.inversion.leakage_result import CRAMER_RAO_TIER, LeakageCheck, TierResult
from privot.attacks.inversion.leakage_tiers import TierRunner
from privot.attacks.inversion.problem import Problem, Reconstruction, compute_victim_gradients
from privot.attacks.inversion.problem_checks import (
    LossFunction,
    TensorDict,
    check_update,
    get_trainable_parameters,
)
from privot.attacks.inversion.rgap import reconstruct_by_rgap
from privot.attacks.inversion.scoring import LEAK_MSE_THRESHOLD, compute_label_overlap
from privot.attacks.inversion.spear import reconstruct_by_spear
from privot.errors import DataError, SettingError
from privot.progress import Progress, ignore_progress

# Least cosine of an update and the gradient that it is said to be. An update in bfloat16 has a
# larger one; the gradient of another image reaches up to 0.9997.
MIN_COSINE = 1 - 1e-5
MAX_PIXELS = 4096  # most values behind an update for which eigenvalues are computed
ROUNDING_TOLERANCE = 1e-5  # of the update's own size: rounding of float32


def check_leakage(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Tensor, Tensor],
    update: TensorDict,
    *,
    is_defended: bool = False,
    attack: str = "hybrid",
    restarts: int = 2,
    threshold: float = LEAK_MSE_THRESHOLD,
    bounds: tuple[float, float] = (0.0, 1.0),
    target_psnrs: tuple[int, ...] = (20, 15, 10),
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> LeakageCheck:
    """Try all tiers of attacks on an update of your own model.

    The update may be the gradient or a multiple of it (a step, a clipped gradient). It is compared
    with the gradient of the batch first.

    Args:
        model: The model with the weights from which the update was computed.
        loss_fn: Loss of the model.
        batch: Images [b, c, h, w] and labels [b] behind the update.
        update: {name: [...]}, what was sent.
        is_defended: Whether the update was changed on purpose (noise, pruning, coarse rounding), so
            that it need not fit the gradient of the batch.
        attack: The search, a name in `INVERSION_ATTACKS`.
        restarts: Restarts of the search.
        threshold: Mean squared error below which an image counts as leaked.
        bounds: Smallest and largest value of a pixel.
        target_psnrs: Decibels to which the reported noise would limit the best attack.
        seed: Seed of the attacks.
        progress: Shows the progress.

    Returns:
        The results of all tiers.

    Raises:
        DataError: Batch or update do not fit the model, or the update does not fit the batch.
        SettingError: The model cannot be attacked.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4)).requires_grad_()
    >>> images, labels = torch.rand(1, 1, 4, 4), torch.tensor([2])
    >>> loss = nn.functional.cross_entropy(net(images), labels)
    >>> update = dict(zip(["1.weight", "1.bias"], torch.autograd.grad(loss, net.parameters())))
    >>> batch = (images, labels)
    >>> check = check_leakage(net, nn.functional.cross_entropy, batch, update, restarts=0)
    >>> [(tier.name, tier.mse < 1e-6) for tier in check.tiers[:2]]
    [('cramer_rao_bound', True), ('closed form', True)]
    """
    images, labels = _validate_inputs(model, loss_fn, batch, update)
    problem = _build_problem(model, loss_fn, images, update, bounds)
    lowest = int(labels.min())
    highest = int(labels.max())
    if not 0 <= lowest <= highest < problem.classes:
        raise DataError(
            f"Labels are from {lowest} to {highest}, but the model has {problem.classes} classes."
        )
    tiers = TierRunner(images[None], labels[None], bounds, threshold)
    cosine, scale, noise_std = _fit_update_to_gradient(problem, tiers.images, tiers.labels)
    if abs(cosine) < MIN_COSINE and not is_defended:
        raise DataError(
            "The update does not fit: its cosine with the gradient of the batch is "
            f"{cosine:.5f}. Check weights, labels, normalization, eval mode and loss, or set "
            "is_defended=True if the update was changed on purpose."
        )
    # The attacker may know the scale.
    factor = 1 / scale if scale else 1.0
    problem = replace(
        problem, update={name: gradient * factor for name, gradient in problem.update.items()}
    )
    noise_std = noise_std * abs(factor)
    label_accuracy = _score_label_recovery(problem, tiers.labels, seed)
    bound, noise_std_for_psnr = _run_cramer_rao_tier(
        problem, tiers.images, tiers.labels, noise_std, target_psnrs
    )
    tiers.results.append(bound)
    reconstruct_exactly: Callable[[Problem], Reconstruction] = (
        reconstruct_by_rgap if problem.batch_size == 1 else reconstruct_by_spear
    )
    tiers.run("closed form", lambda: reconstruct_exactly(problem))
    tiers.run(
        f"search ({attack})",
        lambda: invert(problem, attack, restarts=restarts, seed=seed, progress=progress),
    )
    start = tiers.best
    if noise_std and start is not None and images.numel() <= MAX_PIXELS:
        tiers.run("Gauss-Newton", lambda: refine_by_gauss_newton(problem, start))
    return LeakageCheck(
        cosine,
        scale,
        noise_std,
        label_accuracy,
        tuple(tiers.results),
        threshold,
        noise_std_for_psnr,
        None if tiers.best is None else tiers.best.images[0],
    )


def _validate_inputs(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, Tensor], update: TensorDict
) -> tuple[Tensor, Tensor]:
    """Check batch and update.

    Args:
        model: The model.
        loss_fn: Loss of the model.
        batch: Images [b, c, h, w] and labels [b].
        update: {name: [...]}.

    Returns:
        Images and labels on the device of the model.

    Raises:
        DataError: They do not fit the model.
    """
    if (
        len(batch) != 2
        or batch[0].ndim != 4
        or batch[1].shape != batch[0].shape[:1]
        or not len(batch[1])
    ):
        raise DataError(
            "batch: give images [b, c, h, w] and labels [b], at least one of each, as a tuple."
        )
    if not batch[0].isfinite().all():
        raise DataError("batch: some values of the images are not finite. Correct the data.")
    check_update(
        model,
        {name: gradient.detach()[None] for name, gradient in update.items()},
        loss_fn=loss_fn,
        shape=tuple(batch[0].shape[1:]),
        batch_size=len(batch[1]),
    )
    parameter = next(model.parameters())
    return batch[0].detach().to(parameter), batch[1].to(parameter.device)


def _build_problem(
    model: nn.Module,
    loss_fn: LossFunction,
    images: Tensor,
    update: TensorDict,
    bounds: tuple[float, float],
) -> Problem:
    """Build the problem of one victim.

    Args:
        model: The model.
        loss_fn: Loss of the model.
        images: [b, c, h, w], for their number and shape.
        update: {name: [...]}.
        bounds: Smallest and largest value of a pixel.

    Returns:
        The problem.
    """
    with torch.no_grad():
        num_logits = model(images).shape[-1]
    batch_size, channels, height, width = images.shape
    return Problem(
        model,
        loss_fn,
        get_trainable_parameters(model),
        {name: gradient.detach()[None] for name, gradient in update.items()},
        (channels, height, width),
        max(2, num_logits),
        batch_size,
        bounds,
    )


def _fit_update_to_gradient(
    problem: Problem, images: Tensor, labels: Tensor
) -> tuple[float, float, float]:
    """Fit the update u = scale * g + noise by least squares.

    Args:
        problem: The update of one victim.
        images: [1, b, c, h, w].
        labels: [1, b].

    Returns:
        The cosine of u and g, the scale, and the standard deviation of the noise.

    Raises:
        DataError: u or g is 0.
    """
    exact = problem.to_float64()
    gradients = compute_victim_gradients(exact, images.double(), labels)
    gradient, update = (
        torch.cat([tensors[name].flatten() for name in problem.update])
        for tensors in (gradients, exact.update)
    )
    if not gradient.norm() or not update.norm():
        raise DataError(
            "update: the update or the gradient of the batch is 0 everywhere, so they cannot be "
            "compared."
        )
    scale = update @ gradient / (gradient @ gradient)
    noise_std = (update - scale * gradient).norm() / len(update) ** 0.5
    rounding_std = ROUNDING_TOLERANCE * update.norm() / len(update) ** 0.5
    noise_std = torch.where(noise_std < rounding_std, 0.0, noise_std)
    cosine = update @ gradient / (update.norm() * gradient.norm())
    return float(cosine), float(scale), float(noise_std)


def _score_label_recovery(problem: Problem, labels: Tensor, seed: int) -> float:
    """Return the share of the labels [1, b] that can be recovered; 0 where it does not apply."""
    try:
        return float(compute_label_overlap(recover_labels(problem, seed), labels)[0])
    except SettingError:
        return 0.0


def _run_cramer_rao_tier(
    problem: Problem,
    images: Tensor,
    labels: Tensor,
    noise_std: float,
    target_psnrs: tuple[int, ...],
) -> tuple[TierResult, dict[int, float]]:
    """Predict the error of the best attack at the noise that the update has.

    Args:
        problem: The update of one victim.
        images: The true images [1, b, c, h, w].
        labels: The true labels [1, b].
        noise_std: Standard deviation of the noise on each entry.
        target_psnrs: Decibels.

    Returns:
        The tier, and {decibels: noise_std} that limits the best attack to these decibels.
    """
    num_pixels = images[0].numel()
    if num_pixels > MAX_PIXELS:
        note = f"{num_pixels} values are behind the update, and {MAX_PIXELS} are the maximum."
        return TierResult(CRAMER_RAO_TIER, None, note), {}
    bound = compute_cramer_rao_bound(problem, images, labels)
    rank = int(bound.rank[0])
    # Without noise and with full rank the image is determined exactly.
    mse = float(bound.predict_mse(noise_std)[0]) if noise_std or rank < num_pixels else 0.0
    return TierResult(CRAMER_RAO_TIER, mse, f"rank {rank} of {num_pixels}"), {
        target: float(bound.find_noise_std(target)[0]) for target in target_psnrs
    }
