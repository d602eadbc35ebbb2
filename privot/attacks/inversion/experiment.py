"""An owner's experiment on their own records: what would updates of these images tell, with this net and this defence?

Tiers, from the cheapest: labels read off, what the certificate predicts, closed form, search. The answer is the worst of them, as a search
that fails is no sign of safety. Reconstructions are as secret as the records.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from privot.attacks.inversion import rgap, spear
from privot.attacks.inversion.attacks import Attack, invert, named
from privot.attacks.inversion.cramer_rao import certify
from privot.attacks.inversion.defense_guarantee import Training, promise
from privot.attacks.inversion.defenses import Defended, made
from privot.attacks.inversion.labels import recovered
from privot.attacks.inversion.models import NETS, drawn
from privot.attacks.inversion.problem import Found, Problem
from privot.attacks.inversion.scoring import THRESHOLD, Judgement, judge, overlap
from privot.data.dataset import Public, Sensitive
from privot.errors import PrivotError, SettingError
from privot.progress import Progress, silent
from privot.release import Guarantee
from privot.runtime import Runtime

TRACE = (1, 10, 20, 50, 100, 200, 400)
TARGETS = (20, 15, 10)  # decibels at which the certificate says how much noise it takes
WORDS = {
    "clip": "clipped to",
    "noise": "noise",
    "prune": "smallest share dropped",
    "bits": "bits an entry",
}


@dataclass(frozen=True)
class Experiment:
    """``images`` updates of ``batch`` records each, sent by fresh nets. ``noise`` is a multiplier with a ``clip``, else absolute.

    The certificate and the closed form take the first ``checked`` victims. ``adaptive`` attackers know the defence.
    """

    net: str = "lenet"
    attack: str = "wdlg"
    images: int = 300
    batch: int = 1
    optimiser: str | None = None  # None: the attack's own
    steps: int | None = None
    rate: float | None = None
    restarts: int = 0
    noise: float = 0.0
    clip: float | None = None
    prune: float = 0.0
    bits: int | None = None
    adaptive: bool = True
    checked: int = 4
    threshold: float = THRESHOLD
    training: Training | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        named(self.attack)
        if self.net not in NETS:
            raise SettingError(
                f"no net {self.net!r}: there are {', '.join(NETS)}; your own go through privot.attacks.inversion.audit"
            )
        if self.images < 1 or self.batch < 1 or self.checked < 0 or not self.threshold > 0:
            raise SettingError(
                f"images={self.images}, batch={self.batch}, checked={self.checked}: at least 1, 1 and 0 are needed"
            )
        if self.net == "cnn6" and (self.batch > 1 or named(self.attack).joint):
            raise SettingError(
                "cnn6: its one logit tells no label, so one image with a known label is attacked; not dlg, and --batch 1"
            )

    @property
    def defence(self) -> Defended | None:
        """What clients do before they send."""
        return made(
            noise=self.noise, clip=self.clip, prune=self.prune, bits=self.bits, batch=self.batch
        )

    def search(self) -> Attack:
        """The attack under its optimiser; an attacker who cannot know the scale compares directions."""
        chosen = named(self.attack)
        if self.optimiser or self.steps or self.rate:
            first = chosen.phases[0]
            chosen = chosen.under(
                self.optimiser or first.optimiser,
                self.steps,
                self.rate or (None if self.optimiser else first.rate),
            )
        if self.adaptive and self.defence is not None and self.defence.objective == "cosine":
            chosen = replace(
                chosen, phases=tuple(replace(each, objective="cosine") for each in chosen.phases)
            )
        return chosen

    def victims(
        self, box: Sensitive | Public, device: torch.device
    ) -> tuple[Problem, Tensor, Tensor, Tensor | None]:
        """The updates, the images and labels behind them, and the labels as far as the attacker has them from elsewhere."""
        generator = torch.Generator().manual_seed(self.seed)
        count = self.images * self.batch
        if box._count() < count:
            raise SettingError(
                f"images={self.images}, batch={self.batch}: {count} records are needed, and there are fewer"
            )
        records = box._take(torch.randperm(box._count(), generator=generator)[:count].sort().values)
        images = records.images.unflatten(0, (self.images, self.batch))
        labels = records.labels.unflatten(0, (self.images, self.batch))
        make, loss, reach = NETS[self.net]
        one = self.net == "cnn6"  # a logit for odd labels against even ones
        net: nn.Module = make(box.spec.shape, 1 if one else box.spec.classes).to(device)
        labels = labels % 2 if one else labels
        weights = {
            name: each.to(device)
            for name, each in drawn(net, self.images, generator, reach).items()
        }
        images = images.to(device)
        labels = labels.to(device)
        problem = Problem.of(net, loss, images, labels, weights, self.defence, generator=generator)
        return problem, images, labels, labels if one else None

    def run(
        self, box: Sensitive | Public, runtime: Runtime | None = None, progress: Progress = silent
    ) -> Inverted:
        """All tiers."""
        problem, images, labels, known = self.victims(box, (runtime or Runtime()).target)
        seen = (
            self.defence.adapted(problem) if self.adaptive and self.defence is not None else problem
        )
        told = (
            1.0
            if known is not None
            else float(overlap(recovered(problem, self.seed), labels).mean())
        )
        few = torch.arange(min(self.checked, self.images), device=images.device)
        tiers: dict[str, Any] = {"labels": {"label_accuracy": told, "given": known is not None}}
        if len(few):
            progress("certificate", 0, 1)
            tiers["certificate"] = self._certified(problem.pick(few), images[few], labels[few])
            progress("certificate", 1, 1)
            tiers["closed form"] = self._closed(problem.pick(few), images[few], labels[few])
        search = self.search()
        start = time.perf_counter()
        found = invert(
            seen,
            search,
            labels=known,
            restarts=self.restarts,
            seed=self.seed,
            trace=TRACE,
            progress=progress,
        )
        took = time.perf_counter() - start
        judged = judge(found, images, labels, self.threshold)
        extra = {
            "steps": float(found.steps.double().mean()),
            "seconds": took,
            "objective": search.phases[-1].objective,
        }
        tiers["search"] = judged.to_json() | extra
        return Inverted(self, search.title, tiers, found, judged, images, isinstance(box, Public))

    def _certified(self, problem: Problem, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """What the Jacobian predicts, in the median over the victims; without noise there is nothing to predict but the rank."""
        defence = self.defence
        try:
            sure = certify(problem, images, labels, defence)
        except PrivotError as error:
            return {"victims": len(images), "refused": str(error)}
        std = 0.0 if defence is None else defence.noise_std
        rank = int(sure.rank.min())
        best = (
            float(sure.mse(std).median()) if std or rank < images[0].numel() else None
        )  # of no noise it predicts nothing but the rank
        noise = {str(target): float(sure.noise_for(target).max()) for target in TARGETS}
        return {
            "victims": len(images),
            "noise_std": std,
            "rank": rank,
            "of": images[0].numel(),
            "median_mse": best,
            "noise_for": noise,
        }

    def _closed(self, problem: Problem, images: Tensor, labels: Tensor) -> dict[str, Any]:
        try:
            found = (
                rgap.invert(problem) if self.batch == 1 else spear.invert(problem, seed=self.seed)
            )
        except PrivotError as error:
            return {"victims": len(images), "refused": str(error)}
        return judge(found, images, labels, self.threshold).to_json()


@dataclass(frozen=True)
class Inverted:
    """What an experiment found. ``tiers`` {name: figures}; ``true`` [N, batch, c, h, w] are the images that were looked for."""

    experiment: Experiment
    title: str
    tiers: dict[str, dict[str, Any]]
    found: Found
    judged: Judgement
    true: Tensor
    publishable: bool

    @property
    def worst(self) -> str:
        """The tier with the smallest median error."""
        tried = {
            name: each["median_mse"]
            for name, each in self.tiers.items()
            if each.get("median_mse") is not None
        }
        return min(tried, key=lambda name: tried[name])

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        error = self.tiers[self.worst]["median_mse"]
        level = (
            "exactly"
            if error < 1e-12
            else f"with {-10 * torch.tensor(error).log10():.1f} dB in the median"
        )
        told = f"{100 * self.tiers['labels']['label_accuracy']:.0f} % of the labels"
        if error < self.experiment.threshold:
            how = (
                "the certificate predicts images"
                if self.worst == "certificate"
                else f"{self.worst} gives images back"
            )
            return f"these updates leak: {how} {level}; {told} are read off"
        best = f"best: {self.worst}, {level}"
        return f"no tier came under MSE {self.experiment.threshold:g} in the median ({best}), which is no proof; {told} leak"

    def to_json(self) -> dict[str, Any]:
        """All but the images."""
        experiment = self.experiment
        claim = (
            None
            if experiment.training is None
            else promise(experiment.defence, experiment.training)
        )
        stated = None if claim is None else {"kind": type(claim).__name__} | asdict(claim)
        if isinstance(claim, Guarantee):
            stated = {
                "kind": "Guarantee",
                "epsilon": claim.epsilon,
                "delta": claim.delta,
                "neighbours": "add or remove one record",
            }
        defence = {word: getattr(experiment, word) for word in WORDS if getattr(experiment, word)}
        if experiment.defence is not None:
            defence["noise_std"] = experiment.defence.noise_std
        return {
            "inversion": asdict(experiment)
            | {"training": experiment.training and asdict(experiment.training)},
            "title": self.title,
            "defence": defence,
            "guarantee": stated,
            "tiers": self.tiers,
            "worst": self.worst,
            "sentence": self.sentence,
            "publishable": self.publishable,
        }

    def strip(self, rows: int = 8) -> Tensor:
        """[columns, rows, c, h, w]: the first images of some victims at steps of the search, at its end, and as they are."""
        steps = [each for _, each in self.found.trace or ()]
        return torch.stack(
            [each[:rows, 0].clamp(0, 1) for each in (*steps, self.found.images, self.true)]
        )

    def heads(self) -> list[str]:
        """Names of the columns of `strip`."""
        return [*(str(step) for step, _ in self.found.trace or ()), "end", "true"]
