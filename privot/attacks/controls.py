"""Proof that an attack works: it must find the members of what is made to leak, and nobody in what cannot.

An AUC of 0.52 may mean a private release or a broken attack. So every attack first runs on a *leaky* control, where it must reach its
stated power, and on a *null* control, where it must not beat chance at 99 % confidence (one seed in a hundred does so by chance). Both are
made of the embedded digits, a public data set, in seconds and deterministically by a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import hypergeom
from torch import Tensor, nn

from privot.attacks.membership import gan_leaks, nearest, tracing
from privot.attacks.membership.lira import half, lira
from privot.attacks.membership.loss import confidence, negative_loss
from privot.attacks.membership.rmia import rmia
from privot.audit.curve import roc
from privot.data.load import load
from privot.data.records import Public, Records
from privot.errors import SettingError

CONFIDENCE = 0.99
COUNT = 200  # candidates, half of them members
MODELS = 16  # the victim and its shadows
STEPS, HIDDEN = 150, 64  # of nets that learn 100 records by heart, a third of them under a wrong label


@dataclass(frozen=True)
class Power:
    """AUC on the ``leaky`` and the ``null`` control, and ``chance``: how probable so good a null score is if there is nothing to find.

    ``passed`` says that leaky reached ``stated`` and null did not beat chance; ``sentence`` says it in words.
    """

    name: str
    leaky: float
    null: float
    chance: float
    stated: float
    passed: bool
    sentence: str
    publishable: bool = True


class Scores(NamedTuple):
    """Of candidates that were in the training data, and of others."""

    members: np.ndarray
    others: np.ndarray


def power(name: str, seed: int = 0) -> Power:
    """Run both controls of an attack, see `CONTROLS`.

    >>> power("nearest-pixels").passed
    True
    """
    if name not in CONTROLS:
        raise SettingError(f"no attack {name!r}: there are {', '.join(CONTROLS)}")
    control, stated = CONTROLS[name]
    leaky, null = control(True, seed), control(False, seed)
    found, nothing, by_chance = roc(*leaky).auc, roc(*null).auc, chance(*null)
    passed = found >= stated and by_chance > 1 - CONFIDENCE
    sentence = f"{name}: AUC {found:.3f} where all leaks (at least {stated:g} is its stated power), {nothing:.3f} where nothing can"
    verdict = f"chance gives that with probability {by_chance:.2g}: {'it works' if passed else 'DO NOT TRUST ITS FIGURES'}"
    return Power(name, found, nothing, by_chance, stated, passed, f"{sentence}; {verdict}")


def chance(members: np.ndarray, others: np.ndarray, seed: int = 0) -> float:
    """Exact p-value of "members score higher": the upper half is guessed to be members, and so many right guesses are hypergeometric.

    Ties are broken at random. No threshold is tuned, and nothing is asymptotic.

    >>> chance(np.arange(10.0) + 10, np.arange(10.0)) < 1e-5
    True
    """
    scores, total = np.concatenate([members, others]), len(members) + len(others)
    order = np.lexsort((np.random.default_rng(seed).random(total), -scores))[: total // 2]
    return float(hypergeom.sf((order < len(members)).sum() - 1, total, len(members), total // 2))


@cache
def digits(seed: int) -> tuple[Records, Records, Records]:
    """Three parts of the digits at random: 200 candidates, the first half of whom are members; 100 and 400 others."""
    box = load("digits", public=True)
    assert isinstance(box, Public)
    images, labels = box.records()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[: COUNT + 500].split((COUNT, 100, 400))
    parts = [Records(images[each], labels[each]) for each in order]
    return parts[0], parts[1], parts[2]


def by_heart(images: Tensor, labels: Tensor, members: np.ndarray, steps: int, seed: int, hidden: int = HIDDEN) -> Tensor:
    """Nets of one hidden layer trained side by side, each on its own members: logits [nets, candidates, classes].

    ``members`` is bool [nets, learned]; images beyond the learned ones are only looked at. Nothing holds the nets back, so that they
    learn every record; with 0 steps they know nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    x, held = 2 * images.flatten(1) - 1, torch.from_numpy(members).float()
    nets, learned, classes = len(held), held.shape[1], 10
    sizes = ((nets, x.shape[1], hidden), (nets, 1, hidden), (nets, hidden, classes), (nets, 1, classes))
    reach = (x.shape[1] ** -0.5, 0.0, hidden**-0.5, 0.0)
    weights = [(torch.randn(size, generator=generator) * each).requires_grad_() for size, each in zip(sizes, reach, strict=True)]
    adam = torch.optim.Adam(weights, lr=0.01)

    def logits(rows: Tensor) -> Tensor:
        return (rows @ weights[0] + weights[1]).relu() @ weights[2] + weights[3]

    for _ in range(steps):
        adam.zero_grad()
        losses = nn.functional.cross_entropy(logits(x[:learned]).flatten(0, 1), labels[:learned].repeat(nets), reduction="none")
        (losses.view(nets, learned) * held).sum().backward()  # nets share nothing: each has its own gradient; Adam knows no scale
        adam.step()
    with torch.no_grad():
        return logits(x)


@cache
def _models(leaky: bool, seed: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """Logits [models, candidates + population, classes], labels and members [models, candidates]; the victim is the first model."""
    candidates, _, population = digits(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    wrong = torch.rand(COUNT, generator=generator) < 1 / 3
    labels = torch.where(wrong, (candidates.labels + torch.randint(1, 10, (COUNT,), generator=generator)) % 10, candidates.labels)
    members = half(COUNT, MODELS, generator)
    images, labels = torch.cat([candidates.images, population.images]), torch.cat([labels, population.labels])
    return by_heart(images, labels, members, STEPS if leaky else 0, seed), labels, members


def _split(scores: np.ndarray, members: np.ndarray) -> Scores:
    return Scores(scores[members], scores[~members])


def _loss(leaky: bool, seed: int) -> Scores:
    logits, labels, members = _models(leaky, seed)
    return _split(negative_loss(logits[0], labels).numpy()[:COUNT], members[0])


def _lira(offline: bool) -> Callable[[bool, int], Scores]:
    def control(leaky: bool, seed: int) -> Scores:
        logits, labels, members = _models(leaky, seed)
        seen = confidence(logits, labels).numpy()[:, :COUNT]
        return _split(lira(seen[0], seen[1:], members[1:], offline=offline), members[0])

    return control


def _lira_on(metric: str) -> Callable[[bool, int], Scores]:
    """Sets that repeat the members of each model, a little blurred; or, the victim's, as many others."""

    def control(leaky: bool, seed: int) -> Scores:
        (images, labels), others, _ = digits(seed)
        draws, members = torch.Generator().manual_seed(seed + 1), half(COUNT, MODELS, torch.Generator().manual_seed(seed + 2))
        sets = [Records(images[own], labels[own]) for own in torch.from_numpy(members)]
        if not leaky:
            sets[0] = others
        blurred = [Records((x + 0.05 * torch.randn(x.shape, generator=draws)).clamp(0, 1), y) for x, y in sets]
        seen = np.stack([nearest.nearest(images, x, metric, labels=labels, released_labels=y) for x, y in blurred])
        return _split(lira(seen[0], seen[1:], members[1:]), members[0])

    return control


def _rmia(leaky: bool, seed: int) -> Scores:
    logits, labels, members = _models(leaky, seed)
    seen = negative_loss(logits[:5], labels).numpy()  # four references: few are its strength
    own, theirs = seen[:, :COUNT], seen[:, COUNT:]
    return _split(rmia(own[0], own[1:], members[1:5], theirs[0], theirs[1:]), members[0])


FIRST = np.arange(COUNT) < COUNT // 2  # members of what is made of records as they are


def _held(leaky: bool, seed: int) -> Records:
    """Records that a release repeats: the members, or as many others."""
    candidates, others, _ = digits(seed)
    return Records(candidates.images[: COUNT // 2], candidates.labels[: COUNT // 2]) if leaky else others


def _nearest(metric: str) -> Callable[[bool, int], Scores]:
    def control(leaky: bool, seed: int) -> Scores:
        candidates, released = digits(seed)[0], _held(leaky, seed)
        blurred = released.images + 0.05 * torch.randn(released.images.shape, generator=torch.Generator().manual_seed(seed))  # no copies
        return _split(nearest.nearest(candidates.images, blurred.clamp(0, 1), metric), FIRST)

    return control


def _real_start(leaky: bool, seed: int) -> Scores:
    candidates, released = digits(seed)[0], _held(leaky, seed)
    moved = released.images + digits(seed)[2].images.mean(0) - released.images.mean(0)  # what distribution matching makes of its start
    return _split(nearest.cosine(candidates.images, moved), FIRST)


def _tracing(leaky: bool, seed: int) -> Scores:
    candidates, _, population = digits(seed)
    scores = tracing.trace(*candidates, *_held(leaky, seed), *population, nets=8, width=32, seed=seed)
    return _split(scores, FIRST)


class Memory(nn.Module):
    """A generator that stores images and gives the one whose key the code points at, or a blend of near ones: it leaks all."""

    images: Tensor
    labels: Tensor
    keys: Tensor

    def __init__(self, held: Records, generator: torch.Generator, code: int = 8):
        super().__init__()
        self.code = code
        self.register_buffer("images", held.images)
        self.register_buffer("labels", held.labels)
        self.register_buffer("keys", torch.randn(len(held.labels), code, generator=generator))

    def forward(self, codes: Tensor, labels: Tensor) -> Tensor:
        wrong = labels[:, None] != self.labels  # [codes, stored]
        shares = (2 * codes @ self.keys.T).masked_fill(wrong, -torch.inf).softmax(1)
        return (shares @ self.images.flatten(1)).view(-1, *self.images.shape[1:])


def _gan_leaks(kind: str) -> Callable[[bool, int], Scores]:
    def control(leaky: bool, seed: int) -> Scores:
        (images, labels), generator = digits(seed)[0], torch.Generator().manual_seed(seed)
        memory = Memory(_held(leaky, seed), generator)
        if kind == "full":
            given = torch.arange(2000) % 10
            generated = memory(torch.randn(2000, memory.code, generator=generator), given)
            return _split(gan_leaks.full_black_box(images, generated, labels=labels, generated_labels=given), FIRST)
        if kind == "partial":
            return _split(gan_leaks.partial_black_box(memory, images, labels, rounds=60, seed=seed), FIRST)
        return _split(gan_leaks.white_box(memory, images, labels, steps=60, restarts=2, rate=0.2, perceptual=0, seed=seed), FIRST)

    return control


# By attack: its control and its stated power, an AUC that it reached for each of the seeds 0 to 7 with something to spare.
CONTROLS: dict[str, tuple[Callable[[bool, int], Scores], float]] = {
    "loss": (_loss, 0.75),
    "lira": (_lira(False), 0.9),
    "lira-offline": (_lira(True), 0.8),
    "lira-pixels": (_lira_on("pixels"), 0.99),
    "lira-features": (_lira_on("features"), 0.99),
    "rmia": (_rmia, 0.8),
    "nearest-pixels": (_nearest("pixels"), 0.99),
    "nearest-features": (_nearest("features"), 0.99),
    "nearest-lpips": (_nearest("lpips"), 0.99),
    "real-start": (_real_start, 0.99),
    "tracing": (_tracing, 0.8),
    "gan-leaks-full": (_gan_leaks("full"), 0.95),
    "gan-leaks-partial": (_gan_leaks("partial"), 0.98),
    "gan-leaks-white": (_gan_leaks("white"), 0.98),
}
