r"""Search for images whose gradient is the observed one, for all victims in lock-step.

    min_x  distance(dL/dW (x, y), g) + smooth * TV(x),

by Adam or L-BFGS. Each victim keeps the iterate with the smallest observable residual, stops by itself, and leaves the computation; those
that were not solved begin anew elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from privot.attacks.inversion.batched_adam import Adam
from privot.attacks.inversion.batched_lbfgs import Lbfgs
from privot.attacks.inversion.conv_as_matmul import Patches
from privot.attacks.inversion.learned_distance import Critics, difference
from privot.attacks.inversion.objectives import OBJECTIVES, total_variation
from privot.attacks.inversion.problem import Problem, Tensors, gradients
from privot.errors import SettingError
from privot.progress import Progress, silent

EVERY = 20  # evaluations between two looks of the host: a GPU should not wait for it
SHRINK = 0.75  # when so few of the victims are still at it, the others leave the computation
Watch = Callable[
    [int, Tensor, Tensor], None
]  # (evaluation, which victims [n], their images [n, batch, c, h, w])


@dataclass(frozen=True)
class Phase:
    """One way to search: ``steps`` evaluations at most of an objective under an optimiser (``adam``, ``lbfgs``, or ``lbfgs-search``).

    ``signed`` and ``falls`` are of Adam; ``box`` keeps values within the problem's bounds; ``smooth`` is the weight of total variation.
    """

    objective: str = "norm"
    optimiser: str = "lbfgs"
    steps: int = 1000
    rate: float = 1.0
    signed: bool = False
    falls: bool = False
    box: bool = False
    smooth: float = 0.0
    enough: float | None = (
        None  # a residual that ends the search; None: the objective's own, as published
    )

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise SettingError(
                f"no objective {self.objective!r}: there are {', '.join(OBJECTIVES)}"
            )
        if self.optimiser not in ("adam", "lbfgs", "lbfgs-search"):
            raise SettingError(
                f"no optimiser {self.optimiser!r}: there are adam, lbfgs, lbfgs-search"
            )
        if self.steps < 1 or not self.rate > 0 or self.smooth < 0:
            raise SettingError(
                f"steps={self.steps}, rate={self.rate:g}, smooth={self.smooth:g}: at least 1, over 0 and not under 0"
            )
        if OBJECTIVES[self.objective].learned and self.optimiser != "adam":
            raise SettingError(
                "critic: an objective that is learned on the way needs adam; L-BFGS remembers slopes of another one"
            )


@dataclass
class Search:
    """Where n of the victims are: ``x`` [n, D] holds the pixels and, where ``labels`` is None, logits of the labels after them."""

    problem: Problem
    labels: Tensor | None
    x: Tensor
    best: Tensor
    residual: Tensor
    steps: Tensor

    @classmethod
    def begin(
        cls,
        problem: Problem,
        labels: Tensor | None,
        generator: torch.Generator,
        x: Tensor | None = None,
    ) -> Search:
        """From noise, N(0, 1) in every pixel, as DLG does."""
        width = problem.batch * (
            int(torch.tensor(problem.shape).prod()) + (problem.classes if labels is None else 0)
        )
        x = (
            torch.randn(problem.count, width, generator=generator).to(problem.example)
            if x is None
            else x
        )
        return cls(
            problem,
            labels,
            x,
            x.clone(),
            x.new_full((len(x),), torch.inf),
            torch.zeros(len(x), dtype=torch.long, device=x.device),
        )

    def images(self, x: Tensor) -> Tensor:
        """[n, batch, c, h, w] of x [n, D]."""
        return pixels(self.problem, x)

    def told(self, x: Tensor) -> Tensor:
        """Labels [n, batch] of x [n, D]: the largest logit where they are searched for, too."""
        if self.labels is not None:
            return self.labels
        return (
            x[:, -self.problem.batch * self.problem.classes :]
            .unflatten(1, (self.problem.batch, self.problem.classes))
            .argmax(2)
        )

    def run(
        self,
        phase: Phase,
        generator: torch.Generator,
        watch: Watch | None = None,
        progress: Progress = silent,
    ) -> Search:
        """Go down for one phase, from x; afterwards x is the best iterate."""
        problem = self.problem
        labels = self.labels
        x = self.x
        here = torch.arange(len(x), device=x.device)
        active = torch.ones(len(x), dtype=torch.bool, device=x.device)
        objective = OBJECTIVES[phase.objective]
        enough = phase.enough or objective.enough
        best = x.clone()
        residual = torch.full_like(self.residual, torch.inf)
        steps = torch.zeros_like(self.steps)
        optimiser = _optimiser(phase, problem, x)
        critics = Critics.begin(problem.update, generator) if objective.learned else None
        look = _evaluation(problem, phase, labels is None)
        for step in range(phase.steps):
            if critics is not None:
                critics.learn(_guess(problem, x, labels), problem.update)
            value, left, slope = look(problem, x, labels, critics.weights if critics else None)
            better = active & (left < residual[here])
            best[here] = torch.where(better[:, None], x, best[here])
            residual[here] = torch.where(better, left, residual[here])
            steps[here] += active
            if watch is not None:
                watch(step + 1, here, pixels(problem, x))
            ahead, moving = optimiser.step(x, value, slope)
            active = active & moving & (left > enough)
            x = torch.where(active[:, None], ahead, x)
            if (step + 1) % EVERY == 0:
                count = int(active.sum())
                progress("inversion", step + 1, phase.steps)
                if not count:
                    break
                if count < SHRINK * len(x):
                    which = active.nonzero()[:, 0]
                    problem = problem.pick(which)
                    x = x[which]
                    here = here[which]
                    active = active[which]
                    labels = None if labels is None else labels[which]
                    optimiser.keep(which)
                    if critics is not None:
                        critics.keep(which)
        progress("inversion", phase.steps, phase.steps)
        return Search(self.problem, self.labels, best, best, residual, self.steps + steps)


def pixels(problem: Problem, x: Tensor) -> Tensor:
    """Images [n, batch, c, h, w] of x [n, D]."""
    size = problem.batch * problem.shape[0] * problem.shape[1] * problem.shape[2]
    return x[:, :size].unflatten(1, (problem.batch, *problem.shape))


def compared(
    found: Tensors, seen: Tensors, known: Tensors | None, slack: Tensors | None
) -> Tensors:
    """The guess, with what the attacker must not compare set to what was seen; see `Problem`. All are of one victim."""
    if slack is not None:
        gaps = {name: found[name] - seen[name] for name in seen}
        found = {
            name: seen[name] + gap.sign() * (gap.abs() - slack[name]).relu()
            for name, gap in gaps.items()
        }
    return (
        found
        if known is None
        else {name: torch.where(known[name], found[name], seen[name]) for name in seen}
    )


def _optimiser(phase: Phase, problem: Problem, x: Tensor) -> Any:
    walls: dict[str, Any] = {}
    if phase.box:
        size = pixels(problem, x[:1]).numel()
        for name, wall, far in (
            ("low", problem.bounds[0], -torch.inf),
            ("high", problem.bounds[1], torch.inf),
        ):
            walls[name] = torch.cat(
                [x.new_full((size,), wall), x.new_full((x.shape[1] - size,), far)]
            )
    if phase.optimiser == "adam":
        return Adam(phase.rate, phase.steps, phase.falls, phase.signed, **walls)
    enough = phase.enough or OBJECTIVES[phase.objective].enough
    return Lbfgs(
        phase.rate, backtrack=phase.optimiser == "lbfgs-search", tolerance=1e-3 * enough, **walls
    )


def _guess(problem: Problem, x: Tensor, labels: Tensor | None) -> Tensors:
    with torch.no_grad():
        return gradients(
            problem, pixels(problem, x), _soft(problem, x) if labels is None else labels
        )


def _soft(problem: Problem, x: Tensor) -> Tensor:
    return (
        x[..., -problem.batch * problem.classes :]
        .unflatten(-1, (problem.batch, problem.classes))
        .softmax(-1)
    )


def _evaluation(
    problem: Problem, phase: Phase, joint: bool
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The function (problem, x [n, D], labels, critic) -> value [n], residual [n], slope [n, D]."""
    objective = OBJECTIVES[phase.objective]
    guessed = problem.guessed
    shape = problem.shape
    batch = problem.batch
    size = batch * shape[0] * shape[1] * shape[2]

    def one(
        x: Tensor, labels: Any, weights: Tensors, seen: Tensors, known: Any, slack: Any, critic: Any
    ) -> tuple[Tensor, Tensor]:
        images = x[:size].unflatten(0, (batch, *shape))
        found = compared(
            guessed(weights, images, _soft(problem, x) if joint else labels), seen, known, slack
        )
        value = (
            objective.distance(found, seen) if critic is None else difference(critic, found, seen)
        )
        residual = (
            value.detach()
            if objective.residual is objective.distance
            else objective.residual(found, seen).detach()
        )
        return (value + phase.smooth * total_variation(images) if phase.smooth else value), residual

    def look(
        problem: Problem, x: Tensor, labels: Tensor | None, critic: Tensors | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = (x, labels, problem.weights, problem.update, problem.known, problem.slack, critic)
        axes = tuple(
            None if each is None or (place == 2 and problem.shared) else 0
            for place, each in enumerate(given)
        )
        with Patches(), torch.no_grad():
            slope, (value, left) = vmap(grad_and_value(one, has_aux=True), in_dims=axes)(*given)
        return value, left, slope

    return look
