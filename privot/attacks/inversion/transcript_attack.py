r"""Do the slopes that an owner sent in a federated run give its images back? Attacks on the record of what the server saw.

For each class c, from all answers a_c of the owner to images of that class:

    added up   m_c + s * (sum of a_c, as pixels), the one s that is best for the truth: no attacker does better on this line;
    learned    m_c + A a_c, the linear least squares estimate, learned from imitated owners who hold other records.

m_c is the mean of held-out images of the class: what anyone has who heard nothing. Beside them two controls, as if nothing were sanitized:
the learned attack on raw slopes, and the search for an image by the critic's raw gradient in its weights, as in plain federated learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from privot.attacks.inversion.attacks import invert, named
from privot.attacks.inversion.linear_estimator import Shadows
from privot.attacks.inversion.problem import Found, Problem
from privot.attacks.inversion.scoring import THRESHOLD, judge
from privot.attacks.inversion.simulated_clients import imitated
from privot.attacks.inversion.transcript import Tapped
from privot.components.sharded_critics import State, waves
from privot.data.dataset import Public, Records, Sensitive
from privot.errors import DataError, SettingError
from privot.federated.messages import Terms
from privot.nets.functional_critic import Critic
from privot.progress import Progress, silent
from privot.runtime import Runtime

MEAN = "mean image"
ADDED = "added up"
LEARNED = "learned"
# the controls
SLOPES = "raw slopes"
GRADIENTS = "raw gradient"
ROOM = 1.0  # decibels above the mean image that still count as nothing


@dataclass(frozen=True)
class Wire:
    """``images`` records of the owner are judged at most; ``shadows`` owners are imitated; ``checked`` records are for the raw gradient."""

    images: int = 300
    shadows: int = 64
    checked: int = 4
    attack: str = "hybrid"
    threshold: float = THRESHOLD
    seed: int = 0

    def __post_init__(self) -> None:
        named(self.attack)
        if self.images < 1 or self.shadows < 5 or self.checked < 1 or not self.threshold > 0:
            raise SettingError(
                f"images={self.images}, shadows={self.shadows}, checked={self.checked}: at least 1, 5 and 1 are needed"
            )

    def run(
        self,
        heard: Tapped,
        box: Sensitive | Public,
        aside: Sensitive | Public,
        runtime: Runtime | None = None,
        progress: Progress = silent,
    ) -> Overheard:
        """All attacks on what ``heard`` has of the owner whose records ``box`` holds; ``aside`` holds records of others."""
        terms = heard.terms
        device = (runtime or Runtime()).target
        generator = torch.Generator().manual_seed(self.seed)
        if any(
            (each.spec.shape, each.spec.classes) != (terms.shape, terms.classes)
            for each in (box, aside)
        ):
            raise DataError(
                f"the terms are of images {list(terms.shape)} in {terms.classes} classes, and these records are others"
            )
        own, other = (each._take(slice(None)) for each in (box, aside))
        means, there = _means(other, terms.classes)
        held = min(len(own.labels), terms.settings.records, len(other.labels))
        shown = own.labels[torch.randperm(len(own.labels), generator=generator)[:held]]
        drawn = torch.stack(
            [_alike(other, shown, generator) for _ in range(self.shadows)]
        )  # [shadows, held]
        images = other.images[drawn].to(device)
        labels = other.labels[drawn].to(device)
        raw, state = imitated(terms, heard.images, images, labels, generator, progress)
        shadows = Shadows(images, labels, means)
        deviation = 2 * float(terms.settings.noise or 0.0)
        some = torch.arange(held) * len(own.labels) // held
        mine, _ = imitated(
            terms,
            heard.images,
            own.images[some][None].to(device),
            own.labels[some][None].to(device),
            generator,
        )
        judged = (there[own.labels]).nonzero().flatten()
        if not len(judged):
            raise DataError(
                "aside has no record of any class that the owner has: give other held-out records"
            )
        judged = judged[
            torch.randperm(len(judged), generator=generator)[: self.images].sort().values
        ]
        true = Records(own.images[judged], own.labels[judged])
        sums = _pixels(terms, heard.values.sum((0, 2)))
        guesses = {
            MEAN: means,
            ADDED: means + _along(true, means, sums) * sums,
            LEARNED: means
            + shadows.learned(heard.values, bounded(terms, raw), deviation, generator),
            SLOPES: means + shadows.learned(mine[0], raw, 0.0, generator),
        }
        tiers: dict[str, Any] = {"labels": {"label_accuracy": 1.0, "given": True}}
        pictures = {}
        for name, guess in guesses.items():
            pictures[name] = guess[true.labels].clamp(0, 1)
            tiers[name] = self._judged(pictures[name], true)
        few = Records(true.images[: self.checked], true.labels[: self.checked])
        searched = self._searched(
            terms, {name: each[0] for name, each in state.items()}, few, device, progress
        )
        tiers[GRADIENTS] = self._judged(searched, few)
        pictures[GRADIENTS] = searched
        return Overheard(
            self,
            heard,
            tiers,
            pictures,
            true.images,
            isinstance(box, Public) and isinstance(aside, Public),
        )

    def _judged(self, guess: Tensor, true: Records) -> dict[str, Any]:
        once = torch.ones(len(guess))
        found = Found(guess[:, None], true.labels[:, None], once.long(), once)
        return judge(found, true.images[:, None], true.labels[:, None], self.threshold).to_json()

    def _searched(
        self, terms: Terms, state: State, few: Records, device: torch.device, progress: Progress
    ) -> Tensor:
        """Images [checked, ...] whose gradient in the weights of such a critic is that of the records; its last rows tell the labels."""
        net = Judging(
            Critic(terms.shape, terms.classes, terms.settings.width),
            state["weights"],
            state["along"],
        ).to(device)
        images = few.images[:, None].to(device)
        labels = few.labels[:, None].to(device)
        problem = Problem.of(net, liked, images, labels, classes=max(2, terms.classes))
        # A critic's gradient is long, and full steps of L-BFGS jump out of the valley: on FEMNIST 16 dB, and with these more than 20.
        phases = [
            replace(each, rate=0.1, steps=1500) if each.optimiser == "lbfgs" else each
            for each in named(self.attack).phases
        ]
        search = replace(named(self.attack), phases=tuple(phases))
        return (
            invert(problem, search, labels=labels, seed=self.seed, progress=progress)
            .images[:, 0]
            .clamp(0, 1)
            .cpu()
        )


class Judging(nn.Module):
    """A critic as a net: images [batch, ...] to its score of each under every label, [batch, classes]."""

    def __init__(self, critic: Critic, weights: Tensor, along: Tensor):
        super().__init__()
        self.critic = critic
        self.weights = nn.Parameter(weights.detach().clone())
        self.register_buffer("along", along.detach().clone())

    def forward(self, images: Tensor) -> Tensor:
        every = torch.arange(self.critic.classes, device=images.device)

        def score(label: Tensor) -> Tensor:
            return self.critic.score(self.weights, self.along, images, label.expand(len(images)))  # type: ignore[arg-type]

        return vmap(score)(every).T


def liked(scores: Tensor, labels: Tensor) -> Tensor:
    """What a critic's loss says of records: -E D(x, y). Its other part is of generated images, which the server knows."""
    return -scores.gather(1, labels[:, None]).mean()


def bounded(terms: Terms, slopes: Tensor) -> Tensor:
    """Slopes [..., c, h, w] as an owner brings them to norm 1, before its noise."""
    norms = slopes.flatten(-3).norm(dim=-1)[..., None, None, None]
    return slopes / (norms + 1e-12 if terms.settings.full else norms.clamp(min=1))


def _means(records: Records, classes: int) -> tuple[Tensor, Tensor]:
    """Mean image of each class [classes, c, h, w], of all where a class has none, and which are there [classes]."""
    marks = nn.functional.one_hot(records.labels, classes).float()
    counts = marks.sum(0)
    means = (
        torch.einsum("nk,n...->k...", marks, records.images)
        / counts.clamp(min=1)[:, None, None, None]
    )
    return torch.where((counts > 0)[:, None, None, None], means, records.images.mean(0)), counts > 0


def _alike(records: Records, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Places of records with these labels, drawn at random; of any label where one is not there: [len(labels)]."""
    order = torch.rand(len(labels), len(records.labels), generator=generator)
    fits = labels[:, None] == records.labels
    return torch.where(fits, order, order - 1).argmax(1)


def _along(true: Records, means: Tensor, sums: Tensor) -> float:
    """The s for which m + s * sums is nearest to the truth."""
    way = sums[true.labels]
    return float(
        ((true.images - means[true.labels]) * way).sum() / way.square().sum().clamp(min=1e-30)
    )


def _pixels(terms: Terms, values: Tensor) -> Tensor:
    down, across = (
        waves(side, terms.settings.detail, terms.settings.window) for side in terms.shape[1:]
    )
    return down @ values.float() @ across.T


@dataclass(frozen=True)
class Overheard:
    """What the wire gave. ``tiers`` {name: figures}; ``pictures`` {name: [judged, c, h, w]} beside the ``true`` images."""

    wire: Wire
    heard: Tapped
    tiers: dict[str, Any]
    pictures: dict[str, Tensor]
    true: Tensor
    publishable: bool

    @property
    def title(self) -> str:
        rounds = len(self.heard.values)
        numbers = self.heard.values[0].numel()
        return f"what {self.heard.name} sent in {rounds} rounds, {numbers} noisy numbers each"

    @property
    def best(self) -> str:
        """The attack on what was sent that came nearest."""
        return max((ADDED, LEARNED), key=lambda name: self.tiers[name]["psnr"])

    @property
    def gain(self) -> float:
        """Decibels of the best attack above the mean image."""
        return float(self.tiers[self.best]["psnr"] - self.tiers[MEAN]["psnr"])

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        control = f"a raw gradient would have given {self.tiers[GRADIENTS]['psnr']:.1f} dB"
        found = f"{self.tiers[self.best]['psnr']:.1f} dB, {self.gain:+.2f} beside the mean image"
        if self.gain > ROOM:
            return f"these answers tell of the images: {self.best}, they reach {found}; {control}"
        return f"no attack came {ROOM:g} dB above the mean image, which is no proof (best: {found}); {control}"

    def to_json(self) -> dict[str, Any]:
        """All but the images."""
        plan = self.heard.terms.plan()
        settings = self.heard.terms.settings
        return {
            "inversion": asdict(self.wire) | {"net": "critic", "images": len(self.true)},
            "title": self.title,
            "tiers": self.tiers,
            "defence": {
                "clip": 1.0,
                "noise": settings.noise,
                "noise_std": 2 * float(settings.noise or 0.0),
            },
            "guarantee": None,
            "plan": plan.to_json(),
            "owner": self.heard.name,
            "run": self.heard.terms.run,
            "rounds": len(self.heard.values),
            "bytes_down": self.heard.bytes[0],
            "bytes_up": self.heard.bytes[1],
            "worst": self.best,
            "gain": self.gain,
            "sentence": self.sentence,
            "publishable": self.publishable,
        }

    def strip(self, rows: int = 8) -> Tensor:
        """[columns, rows, c, h, w]: what each attack made of some images, and the images."""
        few = min(rows, len(self.pictures[GRADIENTS]))
        return torch.stack([*(each[:few] for each in self.pictures.values()), self.true[:few]])

    def heads(self) -> Sequence[str]:
        """Names of the columns of `strip`."""
        return [*self.pictures, "true"]
