"""The named attacks: which labels, which objective, which optimiser; and `invert`, which runs one on all victims of a problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from privot.attacks.inversion.labels import recovered
from privot.attacks.inversion.objectives import OBJECTIVES
from privot.attacks.inversion.problem import Found, Problem
from privot.attacks.inversion.search import Phase, Search, Watch, pixels
from privot.errors import SettingError
from privot.progress import Progress, silent

SOLVED = 1e-3  # a smaller squared residual means that the search ended at an image and not elsewhere; the attacker sees it


@dataclass(frozen=True)
class Attack:
    """``joint`` searches for the labels, too; else they are recovered first, or given. Phases follow each other."""

    title: str
    phases: tuple[Phase, ...]
    joint: bool = False

    def under(self, optimiser: str, steps: int | None = None, rate: float | None = None) -> Attack:
        """The same with one optimiser in every phase; its usual rate is 0.1 for adam and 1 for the others."""
        usual = 0.1 if optimiser == "adam" else 1.0
        made = [
            replace(each, optimiser=optimiser, rate=rate or usual, steps=steps or each.steps)
            for each in self.phases
        ]
        return replace(self, phases=tuple(made))


COSINE = Phase("cosine", "adam", 4800, 0.1, signed=True, falls=True, box=True, smooth=1e-4)
ATTACKS = {
    "dlg": Attack("DLG (Zhu et al. 2019)", (Phase("squared"),), joint=True),
    "idlg": Attack("iDLG (Zhao et al. 2020)", (Phase("squared"),)),
    "wdlg": Attack("WDLG (Wang et al. 2023), the norm", (Phase("norm"),)),
    "wdlg-layer": Attack("WDLG, a critic a tensor", (Phase("by-layer"),)),
    "wdlg-l1": Attack("WDLG, linear critic of clipped weights", (Phase("absolute"),)),
    "wdlg-index": Attack("WDLG, points (index, value)", (Phase("index-value"),)),
    "wdlg-sliced": Attack("WDLG, sliced over filters", (Phase("sliced"),)),
    "wdlg-sorted": Attack("WDLG, sorted entries", (Phase("sorted"),)),
    "wdlg-critic": Attack("WDLG, learned critic", (Phase("critic", "adam", 300, 0.1),)),
    "cosine": Attack("Inverting Gradients (Geiping et al. 2020)", (COSINE,)),
    "hybrid": Attack(
        "Adam on the norm, then L-BFGS on its square",
        (Phase("norm", "adam", 100, 0.1), Phase("squared", "lbfgs", 900)),
    ),
}


def invert(
    problem: Problem,
    attack: str | Attack = "wdlg",
    *,
    labels: Tensor | None = None,
    restarts: int = 0,
    seed: int = 0,
    trace: tuple[int, ...] = (),
    watch: Watch | None = None,
    portion: int | None = None,
    progress: Progress = silent,
) -> Found:
    """Images and labels behind the updates of all victims at once.

    ``labels`` [N, batch] if the attacker knows them. Victims whose residual says that they are not solved begin anew up to ``restarts``
    times, and keep the best try. ``trace`` names evaluations at which all images are kept; ``watch`` sees every one. ``portion`` victims
    are in memory at a time.

    >>> from torch import nn
    >>> net, x = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double(), torch.rand(2, 1, 1, 2, 2).double()
    >>> found = invert(Problem.of(net, nn.functional.cross_entropy, x, torch.tensor([[0], [2]])), "idlg", restarts=5)
    >>> found.labels.tolist(), bool((found.images - x).abs().max() < 0.05)
    ([[0], [2]], True)
    """
    chosen = named(attack)
    if restarts < 0 or (portion is not None and portion < 1):
        raise SettingError(
            f"restarts={restarts}, portion={portion}: not under 0, and at least 1 victim at a time"
        )
    wanted = (problem.count, problem.batch)
    if labels is not None and (
        labels.shape != wanted or not 0 <= int(labels.min()) <= int(labels.max()) < problem.classes
    ):
        raise SettingError(
            f"labels: [{problem.count}, {problem.batch}] from 0 to {problem.classes - 1} are needed"
        )
    generator = torch.Generator().manual_seed(seed)
    if labels is None and not chosen.joint:
        labels = recovered(problem, seed)
    whole = torch.arange(problem.count, device=problem.example.device)
    parts = []
    for which in whole.split(portion or problem.count):
        known = None if labels is None or chosen.joint else labels[which]
        parts.append(
            _some(
                problem.pick(which),
                chosen,
                known,
                restarts,
                generator,
                trace,
                _shifted(watch, which),
                progress,
            )
        )
    return parts[0] if len(parts) == 1 else _joined(parts)


def named(attack: str | Attack) -> Attack:
    """An attack by its name."""
    if isinstance(attack, str) and attack not in ATTACKS:
        raise SettingError(f"no attack {attack!r}: there are {', '.join(ATTACKS)}")
    return ATTACKS[attack] if isinstance(attack, str) else attack


def _some(
    problem: Problem,
    attack: Attack,
    labels: Tensor | None,
    restarts: int,
    generator: torch.Generator,
    trace: tuple[int, ...],
    watch: Watch | None,
    progress: Progress,
) -> Found:
    kept = _Kept(trace, watch)
    end: Search | None = None
    scale_free = OBJECTIVES[attack.phases[-1].objective].residual is OBJECTIVES["cosine"].residual
    solved = 1e-6 if scale_free else SOLVED
    for attempt in range(restarts + 1):
        if end is None:
            which = torch.arange(problem.count, device=problem.example.device)
        else:
            which = (~(end.residual < solved)).nonzero()[:, 0]
            if not len(which):
                break
        tried = Search.begin(
            problem.pick(which), None if labels is None else labels[which], generator
        )
        before = 0
        for phase in attack.phases:
            tried = tried.run(
                phase, generator, kept.after(before, which) if attempt == 0 else None, progress
            )
            before += phase.steps
        if end is None:
            end = tried
            continue
        better = tried.residual < end.residual[which]
        end.x[which] = torch.where(better[:, None], tried.x, end.x[which])
        end.residual[which] = torch.where(better, tried.residual, end.residual[which])
        end.steps[which] += tried.steps
    assert end is not None
    images = pixels(problem, end.x)
    return Found(
        images, end.told(end.x), end.steps, end.residual, kept.pictures(images) if trace else None
    )


class _Kept:
    """Images of all victims at some evaluations; a victim that has stopped shows where it stopped."""

    def __init__(self, wanted: tuple[int, ...], watch: Watch | None):
        self.wanted = sorted(wanted)
        self.watch = watch
        self.taken = dict[int, tuple[Tensor, Tensor]]()

    def after(self, before: int, all_of: Tensor) -> Watch | None:
        """A watch for a phase that begins after so many evaluations."""
        if not self.wanted and self.watch is None:
            return None

        def see(step: int, which: Tensor, images: Tensor) -> None:
            if before + step in self.wanted:
                self.taken[before + step] = (which, images.clone())
            if self.watch is not None:
                self.watch(before + step, which, images)

        return see

    def pictures(self, last: Tensor) -> tuple[tuple[int, Tensor], ...]:
        """(evaluation, images [N, ...]): those that were gone by then show their end."""
        found = []
        for step, (which, images) in sorted(self.taken.items()):
            shown = last.clone()
            shown[which] = images
            found.append((step, shown))
        return tuple(found)


def _shifted(watch: Watch | None, which: Tensor) -> Watch | None:
    return None if watch is None else lambda step, here, images: watch(step, which[here], images)


def _joined(parts: list[Found]) -> Found:
    """Portions one after another; where one of them ended early its last images stand in the trace."""
    times = sorted({step for part in parts if part.trace for step, _ in part.trace})
    trace = [
        (time, torch.cat([dict(part.trace or ()).get(time, part.images) for part in parts]))
        for time in times
    ]
    return Found(
        torch.cat([each.images for each in parts]),
        torch.cat([each.labels for each in parts]),
        torch.cat([each.steps for each in parts]),
        torch.cat([each.loss for each in parts]),
        tuple(trace) if parts[0].trace is not None else None,
    )
