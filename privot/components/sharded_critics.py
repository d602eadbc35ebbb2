"""Many critics, each on a shard of the records, kept behind the gate.

They learn on a public schedule, each from its own shard and from public images, and never hear of one another or of who was asked. All
randomness is public: places in a shard are drawn as fractions, since its size may be secret.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from privot.components.dct import cosines, middle
from privot.nets.functional_critic import Critic, Sketch, adam
from privot.privacy.gate import Gate
from privot.runtime import Progress

State = dict[str, Tensor]
GS_WGAN = """@inproceedings{chen2020gswgan,
  title     = {{GS-WGAN}: A Gradient-Sanitized Approach for Learning Differentially Private Generators},
  author    = {Chen, Dingfan and Orekondy, Tribhuvanesh and Fritz, Mario},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2020}
}"""
STEPS = 5  # of a critic for one of its throw-away generator, as in WGAN-GP


def untaught(
    critic: Critic, sketch: Sketch, count: int, public: torch.Generator, alike: bool
) -> State:
    """What ``count`` critics know before their first lesson; if ``alike`` every one of them the same."""
    weights, along = (
        each.expand(count, -1) for each in critic.begin(1 if alike else count, public)
    )
    drawn = sketch.begin(1 if alike else count, public).expand(count, -1)
    state = {
        "weights": weights,
        "mean": torch.zeros_like(weights),
        "square": torch.zeros_like(weights),
        "along": along,
    }
    return state | {
        "sketch": drawn,
        "sketch mean": torch.zeros_like(drawn),
        "sketch square": torch.zeros_like(drawn),
    }


def learned(
    images: Tensor,
    labels: Tensor,
    state: State,
    critic: Critic,
    fakes: Tensor,
    places: Tensor,
    which: Tensor,
    mix: Tensor,
    begun: Tensor,
    rate: float,
    by: Tensor | None = None,
) -> State:
    """What a shard knows after some steps of its critic against public ``fakes`` [classes, count, ...].

    ``places`` [steps, batch] in [0, 1) say which records, ``which`` [steps, batch] which fakes of the same labels; ``begun`` counts steps.
    ``by`` [steps, 2, batch, 2] are pixels by which real images and fakes are moved: see `moved`.
    """
    for turn in range(len(places)):
        some = (places[turn] * len(labels)).long()
        real = moved(images[some], by, turn, 0)
        fake = moved(fakes[labels[some], which[turn]], by, turn, 1)
        state = _judged(state, critic, real, fake, labels[some], mix[turn], begun + turn + 1, rate)
    return state


def warmed(
    images: Tensor,
    labels: Tensor,
    state: State,
    critic: Critic,
    sketch: Sketch,
    places: Tensor,
    codes: Tensor,
    mix: Tensor,
    begun: Tensor,
    rate: float,
    by: Tensor | None = None,
) -> State:
    """What a shard knows after some steps of its critic against its own throw-away generator, and one step of that."""
    for turn in range(len(places)):
        some = (places[turn] * len(labels)).long()
        fake = moved(sketch.draw(state["sketch"], codes[turn], labels[some]), by, turn, 1)
        state = _judged(
            state,
            critic,
            moved(images[some], by, turn, 0),
            fake,
            labels[some],
            mix[turn],
            begun * len(places) + turn + 1,
            rate,
        )

    def blame(weights: Tensor) -> Tensor:
        drawn = sketch.draw(weights, codes[0], labels[some])
        return -critic.score(state["weights"], state["along"], drawn, labels[some]).mean()

    names = ("sketch", "sketch mean", "sketch square")
    stepped = adam(
        state["sketch"],
        grad(blame)(state["sketch"]),
        state[names[1]],
        state[names[2]],
        begun + 1,
        10 * rate,
    )
    return state | dict(zip(names, stepped, strict=True))


def farthest(shift: int, shape: tuple[int, int, int]) -> int:
    """Pixels by which images are moved at most: as many as are asked for, but no more than a fourteenth of a side."""
    return min(shift, min(shape[1:]) // 14)


def moved(images: Tensor, by: Tensor | None, turn: int, side: int) -> Tensor:
    """Images [batch, ...], each moved down and to the right by ``by[turn, side]`` pixels; what comes in is black.

    Meant for critics of few records, which they could learn by heart: of both sides, moved at random, only what is common can be learned.

    >>> moved(torch.eye(3)[None, None], torch.tensor([[[[1, 0]]]]), 0, 0)[0, 0]
    tensor([[0., 0., 0.],
            [1., 0., 0.],
            [0., 1., 0.]])
    """
    if by is None:
        return images
    count, channels, height, width = images.shape
    own = by[turn, side]
    rows, columns = (
        torch.arange(size, device=own.device) - own[:, place, None]
        for place, size in enumerate((height, width))
    )
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & (
        (columns >= 0) & (columns < width)
    )[:, None, None, :]
    down = rows.clamp(0, height - 1)[:, None, :, None].expand(count, channels, height, width)
    across = columns.clamp(0, width - 1)[:, None, None, :].expand(count, channels, height, width)
    return images.gather(2, down).gather(3, across) * inside


def _judged(
    state: State,
    critic: Critic,
    real: Tensor,
    fake: Tensor,
    labels: Tensor,
    mix: Tensor,
    step: Tensor,
    rate: float,
) -> State:
    along = critic.turned(state["weights"], state["along"])
    slope = grad(critic.loss)(state["weights"], along, real, fake, labels, mix)
    weights, mean, square = adam(
        state["weights"], slope, state["mean"], state["square"], step, rate
    )
    return state | {"weights": weights, "mean": mean, "square": square, "along": along}


def slope(
    state: State, image: Tensor, label: Tensor, critic: Critic, down: Tensor, across: Tensor
) -> Tensor:
    """Where a critic would like an image to go, in its lowest frequencies: [channels, rows, columns]."""

    def score(x: Tensor) -> Tensor:
        return critic.score(state["weights"], state["along"], x[None], label[None])[0]

    return down.T @ grad(score)(image) @ across


def whole_slope(state: State, image: Tensor, label: Tensor, **how: Any) -> Tensor:
    """A `slope` brought to norm 1: noise is scaled to that, however short the slope is."""
    found = slope(state, image, label, **how)
    return found / (found.norm() + 1e-12)


def clipped_slopes(state: State, images: Tensor, labels: Tensor, **more: Any) -> Tensor:
    """All slopes of one critic, each of norm 1 at most: [rows, ...], of norm sqrt(rows) together."""
    found = torch.func.vmap(functools.partial(slope, state, **more))(images, labels)
    return found / found.flatten(1).norm(dim=1).clamp(min=1).view(-1, 1, 1, 1)


def waves(side: int, detail: float, window: int = 0) -> Tensor:
    """The cosines in which slopes are asked along a side: [side, numbers]."""
    return (
        middle(side, window, max(1, round(detail * window)))
        if 0 < window < side
        else cosines(side, max(1, round(detail * side)))
    )


@dataclass
class Critics:
    """A team of ``count`` critics behind a gate. ``public`` draws their first weights, ``draws`` what they are shown.

    Slopes are asked in a part ``detail`` of the frequencies of each side, or of its ``window`` pixels in the middle. ``most``: shards are
    of owners, as `Gate.split` says. What they learn from is moved by up to ``shift`` pixels.
    """

    gate: Gate
    public: torch.Generator
    draws: torch.Generator
    count: int
    width: int
    batch: int
    rate: float
    detail: float
    window: int = 0
    most: int = 0
    shift: int = 0

    def __post_init__(self) -> None:
        spec = self.gate.spec
        device = self.draws.device
        self.critic = Critic(spec.shape, spec.classes, self.width)
        self.sketch = Sketch(spec.shape, spec.classes)
        down, across = (waves(side, self.detail, self.window).to(device) for side in spec.shape[1:])
        self.how: dict[str, Any] = {"critic": self.critic, "down": down, "across": across}
        self.shift = farthest(self.shift, spec.shape)

    def begin(self, rounds: int, progress: Progress, **more: Tensor) -> None:
        """Split the records; then every critic learns for ``rounds`` rounds against a throw-away generator of its own.

        ``more`` [count, ...] is what critics know besides.
        """
        # Critics of owners begin alike: each alone must, and what they say of an image then agrees more.
        state = untaught(self.critic, self.sketch, self.count, self.public, alike=self.most > 0)
        self.gate.split(self.count, state | more, self.most)
        for turn in range(rounds):
            codes = torch.randn(
                STEPS, self.batch, self.sketch.code, generator=self.draws, device=self.draws.device
            )
            given = (
                self.critic,
                self.sketch,
                self._uniform(STEPS),
                codes,
                self._uniform(STEPS),
                self._number(turn),
                self.rate,
                self._by(STEPS),
            )
            self.gate.update(warmed, *given, looks=self.batch)
            progress("warming up the critics", turn + 1, rounds)

    def learn(self, fakes: Tensor, some: Tensor, steps: int, begun: int) -> None:
        """The critics ``some`` learn for ``steps`` steps, from their shards and from fakes [classes, count, ...]."""
        self.gate.update(
            learned,
            self.critic,
            fakes,
            *self.lesson(fakes.shape[1], steps, begun),
            some=some,
            looks=self.batch,
        )

    def lesson(self, fakes: int, steps: int, begun: int) -> tuple[Any, ...]:
        """What `learned` is told besides: places, which of the ``fakes`` of a class, mixtures, age, rate and how far images are moved."""
        which = torch.randint(
            fakes, (steps, self.batch), generator=self.draws, device=self.draws.device
        )
        return (
            self._uniform(steps),
            which,
            self._uniform(steps),
            self._number(begun),
            self.rate,
            self._by(steps),
        )

    def pixels(self, answer: Tensor) -> Tensor:
        """Slopes in frequencies as images again."""
        return self.how["down"] @ answer.float() @ self.how["across"].T

    def _uniform(self, steps: int) -> Tensor:
        return torch.rand(steps, self.batch, generator=self.draws, device=self.draws.device)

    def _by(self, steps: int) -> Tensor | None:
        if not self.shift:
            return None
        size = (steps, 2, self.batch, 2)
        return torch.randint(
            -self.shift, self.shift + 1, size, generator=self.draws, device=self.draws.device
        )

    def _number(self, value: int) -> Tensor:
        return torch.tensor(float(value), device=self.draws.device)
