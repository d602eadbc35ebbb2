"""Does my update leak, and how much noise stops it? Attacks in tiers, from the cheapest, on the owner's own model, batch and update.

A search that fails is no sign of safety, so the answer is the worst of all tiers: labels, certificate, closed form, search with restarts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from privot.attacks.inversion.attacks import invert
from privot.attacks.inversion.cramer_rao import certify
from privot.attacks.inversion.gauss_newton import refine
from privot.attacks.inversion.labels import recovered
from privot.attacks.inversion.problem import Found, Loss, Problem, Tensors, gradients
from privot.attacks.inversion.problem_checks import check, trainable
from privot.attacks.inversion.rgap import doubled
from privot.attacks.inversion.rgap import invert as closed_form
from privot.attacks.inversion.scoring import THRESHOLD, judge, overlap
from privot.attacks.inversion.spear import invert as relu_batch
from privot.errors import DataError, PrivotError, SettingError
from privot.progress import Progress, silent

FITS = (
    1 - 1e-5
)  # the least cosine of an update with the gradient it is said to be: bfloat16 has more, another image up to 0.9997
EXACT = 60.0  # decibels: a tenth of a grey level
MOST = 4096  # values behind an update, of which the certificate takes the eigenvalues
ROUNDING = 1e-5  # of the update's own size: what float32 leaves


@dataclass(frozen=True)
class Tier:
    """What one kind of attack found: the smallest error over the images of the batch, clamped to the box; None where it cannot run.

    The certificate's is the mean over the batch that the best attack is expected to have.
    """

    name: str
    mse: float | None
    note: str = ""

    @property
    def psnr(self) -> float | None:
        """In decibels; 200 stands for exact."""
        return (
            None
            if self.mse is None
            else min(200.0, -10 * torch.tensor(self.mse, dtype=torch.float64).log10().item())
        )


@dataclass(frozen=True)
class Audit:
    """``fit`` is the cosine of the update with the batch's gradient, ``scale`` its size beside it, ``noise_std`` the rest, on each entry.

    ``labels`` is the share of labels that were read off. ``noise_for`` {decibels: noise_std} says what would keep the best attack there.
    ``images`` [batch, c, h, w] are the best reconstruction. All of it is as secret as the batch.
    """

    fit: float
    scale: float
    noise_std: float
    labels: float
    tiers: tuple[Tier, ...]
    threshold: float
    noise_for: dict[int, float] = field(default_factory=dict)
    images: Tensor | None = None

    @property
    def worst(self) -> Tier | None:
        """The tier that came nearest."""
        tried = [tier for tier in self.tiers if tier.mse is not None]
        return min(tried, key=lambda tier: tier.mse or 0.0, default=None)

    @property
    def leaks(self) -> bool:
        """Whether any tier is under the threshold."""
        return self.worst is not None and (self.worst.mse or 0.0) < self.threshold

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        told = f"{100 * self.labels:.0f} % of the labels are read off it"
        if self.worst is None or self.worst.psnr is None:
            return f"no tier applies to this model, which says nothing of safety; {told}"
        near = "an exact copy" if self.worst.psnr >= EXACT else f"{self.worst.psnr:.1f} dB"
        verb = (
            "the certificate predicts"
            if self.worst.name == "certificate"
            else f"{self.worst.name} reaches"
        )
        return f"{'this update leaks' if self.leaks else 'no tier came near, which is no proof'}: {verb} {near}; {told}"

    def to_json(self) -> dict[str, Any]:
        """All but the images."""
        rows = [asdict(tier) | {"psnr": tier.psnr} for tier in self.tiers]
        return asdict(replace(self, images=None)) | {
            "tiers": rows,
            "leaks": self.leaks,
            "sentence": self.sentence,
        }


def audit(
    model: nn.Module,
    loss: Loss,
    batch: tuple[Tensor, Tensor],
    update: Tensors,
    *,
    defended: bool = False,
    attack: str = "hybrid",
    restarts: int = 2,
    threshold: float = THRESHOLD,
    bounds: tuple[float, float] = (0.0, 1.0),
    targets: tuple[int, ...] = (20, 15, 10),
    seed: int = 0,
    progress: Progress = silent,
) -> Audit:
    """Try all tiers on the ``update`` {name: [...]} that ``model`` (as it was then) sent for ``batch`` = (images [b, c, h, w], labels [b]).

    The update may be the gradient or what it was scaled to (a step, a clipped gradient). It is compared with the batch's gradient first;
    one that does not fit is refused, unless it is ``defended`` (noise, pruning, coarse rounding).

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4)).requires_grad_()
    >>> x, y = torch.rand(1, 1, 4, 4), torch.tensor([2])
    >>> update = dict(zip(["1.weight", "1.bias"], torch.autograd.grad(nn.functional.cross_entropy(net(x), y), net.parameters())))
    >>> [(tier.name, tier.mse < 1e-6) for tier in audit(net, nn.functional.cross_entropy, (x, y), update, restarts=0).tiers[:2]]
    [('certificate', True), ('closed form', True)]
    """
    images, labels = _checked(model, loss, batch, update)
    own = trainable(model)
    stacked = {name: each.detach()[None] for name, each in update.items()}
    with torch.no_grad():
        width = model(images).shape[-1]
    start = Problem(
        model,
        loss,
        own,
        stacked,
        tuple(images.shape[1:]),
        max(2, width),
        len(images),
        bounds,  # type: ignore[arg-type]
    )
    if not 0 <= int(labels.min()) <= int(labels.max()) < start.classes:
        raise DataError(
            f"labels from {int(labels.min())} to {int(labels.max())}, but the model has {start.classes} classes"
        )
    x = images[None]
    y = labels[None]
    fit, scale, noise_std = _fit(start, x, y)
    if abs(fit) < FITS and not defended:
        mend = "look at weights, labels, normalisation, eval mode and loss, or say defended=True if it was changed on purpose"
        raise DataError(
            f"the update does not fit: its cosine with the batch's gradient is {fit:.5f}; {mend}"
        )
    factor = 1 / scale if scale else 1.0
    problem = replace(
        start, update={name: each * factor for name, each in stacked.items()}
    )  # the attacker may know the scale
    noise_std = noise_std * abs(factor)
    tiers = []
    best = None
    told = _labels(problem, y, seed)
    sure, noise_for = _certified(problem, x, y, noise_std, targets)
    tiers.append(sure)
    exact: Callable[[Problem], Found] = closed_form if problem.batch == 1 else relu_batch
    tries: dict[str, Callable[[], Found]] = {
        "closed form": lambda: exact(problem),
        f"search ({attack})": lambda: invert(
            problem, attack, restarts=restarts, seed=seed, progress=progress
        ),
    }
    for name, run in tries.items():
        tier, found = _tried(name, run, x, y, bounds, threshold)
        if tier.mse is not None and (best is None or tier.mse < best[0]):
            best = tier.mse, found
        tiers.append(tier)
    if (
        noise_std and best is not None and best[1] is not None and x[0].numel() <= MOST
    ):  # least squares within the box, from the best so far
        start_at = best[1]
        tier, found = _tried("refined", lambda: refine(problem, start_at), x, y, bounds, threshold)
        tiers.append(tier)
        best = (tier.mse, found) if tier.mse is not None and tier.mse < best[0] else best
    pictures = best[1].images[0] if best and best[1] else None
    return Audit(fit, scale, noise_std, told, tuple(tiers), threshold, noise_for, pictures)


def _checked(
    model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor], update: Tensors
) -> tuple[Tensor, Tensor]:
    """The batch, if it and the update are of the right kind."""
    if (
        len(batch) != 2
        or batch[0].ndim != 4
        or batch[1].shape != batch[0].shape[:1]
        or not len(batch[1])
    ):
        raise DataError("batch: (images [b, c, h, w], labels [b]) are needed, at least one of each")
    if not batch[0].isfinite().all():
        raise DataError("batch: images have values that are not finite; mend the data")
    check(
        model,
        {name: each.detach()[None] for name, each in update.items()},
        loss=loss,
        shape=tuple(batch[0].shape[1:]),
        batch=len(batch[1]),
    )
    some = next(model.parameters())
    return batch[0].detach().to(some), batch[1].to(some.device)


def _fit(problem: Problem, images: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """(cosine, scale, noise) of the update u = scale g + noise, by least squares."""
    exact = doubled(problem)
    true = gradients(exact, images.double(), labels)
    g, u = (
        torch.cat([each[name].flatten() for name in problem.update])
        for each in (true, exact.update)
    )
    if not g.norm() or not u.norm():
        raise DataError(
            "update: it or the gradient of the batch is 0 everywhere, so nothing can be compared"
        )
    scale = u @ g / (g @ g)
    rest = (u - scale * g).norm() / len(u) ** 0.5
    rest = torch.where(rest < ROUNDING * u.norm() / len(u) ** 0.5, 0.0, rest)
    return float(u @ g / (u.norm() * g.norm())), float(scale), float(rest)


def _labels(problem: Problem, labels: Tensor, seed: int) -> float:
    try:
        return float(overlap(recovered(problem, seed), labels)[0])
    except SettingError:
        return 0.0


def _certified(
    problem: Problem, images: Tensor, labels: Tensor, noise_std: float, targets: tuple[int, ...]
) -> tuple[Tier, dict[int, float]]:
    """What the Jacobian predicts at the noise that is there."""
    if (size := images[0].numel()) > MOST:
        return Tier(
            "certificate", None, f"{size} values are behind the update, and it takes {MOST} at most"
        ), {}
    sure = certify(problem, images, labels)
    rank = int(sure.rank[0])
    all_of = f"rank {int(sure.rank[0])} of {size}"
    error = float(sure.mse(noise_std)[0]) if noise_std or rank < size else 0.0
    return Tier("certificate", error, all_of), {
        target: float(sure.noise_for(target)[0]) for target in targets
    }


def _tried(
    name: str,
    run: Callable[[], Found],
    images: Tensor,
    labels: Tensor,
    bounds: tuple[float, float],
    threshold: float,
) -> tuple[Tier, Found | None]:
    try:
        found = run()
    except PrivotError as error:
        return Tier(name, None, str(error)), None
    seen = judge(found, images, labels, threshold, bounds=bounds)
    similar = float(seen.ssim[0, seen.mse[0].argmin()])
    return Tier(
        name,
        float(seen.nearest[0].min()),
        f"SSIM {similar:.3f}, residual {float(found.loss[0]):.1e}",
    ), found
