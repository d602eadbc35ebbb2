"""Owners that an attacker makes up: critics that learn from records of its own, on the very images that a real owner was sent.

All of what an owner computes is known but its records and its draws, so an imitation, which has draws of its own, says what some other
owner would have said.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from privot.components.client_critics import beginning
from privot.components.sharded_critics import (
    STEPS,
    State,
    farthest,
    learned,
    slope,
    untaught,
    warmed,
    waves,
)
from privot.federated.messages import Terms
from privot.nets.functional_critic import Critic, Sketch
from privot.progress import Progress, silent


def imitated(
    terms: Terms,
    requests: Tensor,
    images: Tensor,
    labels: Tensor,
    generator: torch.Generator,
    progress: Progress = silent,
) -> tuple[Tensor, State]:
    """Slopes [owners, rounds, classes, rows, c, h', w'] before any clip and noise, of owners with images [owners, count, c, h, w].

    ``requests`` uint8 [rounds, classes, rows, c, h, w]; also what the critics know at the end. Where the unit is the record an owner has
    several critics; here it has one of all its records, which knows more.
    """
    settings = terms.settings
    count = len(images)
    device = images.device
    critic = Critic(terms.shape, terms.classes, settings.width)
    sketch = Sketch(terms.shape, terms.classes)
    down, across = (
        waves(side, settings.detail, settings.window).to(device) for side in terms.shape[1:]
    )
    begun = untaught(
        critic, sketch, count, beginning(), alike=True
    )  # from weights that anyone knows
    state = {name: each.to(device) for name, each in begun.items()}

    def uniform(steps: int) -> Tensor:
        return torch.rand(count, steps, batch, generator=generator).to(device)

    def taught(
        query: Callable[..., State],
        critic: Critic,
        other: Any,
        places: Tensor,
        drawn: Tensor,
        mix: Tensor,
        age: int,
    ) -> State:
        """A lesson of all, each by its own places, draws and mixtures [owners, steps, batch, ...], as real owners have them."""
        by = (
            torch.randint(
                -far, far + 1, (count, places.shape[1], 2, batch, 2), generator=generator
            ).to(device)
            if far
            else None
        )
        each = vmap(query, in_dims=(0, 0, 0, None, None, 0, 0, 0, None, None, 0 if far else None))
        begun = torch.tensor(float(age), device=device)
        return each(
            images,
            labels,
            state,
            critic,
            other,
            places,
            drawn,
            mix,
            begun,
            settings.critic_rate,
            by,
        )

    batch = settings.critic_batch
    far = farthest(settings.shift, terms.shape)
    for turn in range(settings.warm):
        codes = torch.randn(count, STEPS, batch, sketch.code, generator=generator).to(device)
        progress("imitating owners: first lessons", turn, settings.warm)
        state = taught(warmed, critic, sketch, uniform(STEPS), codes, uniform(STEPS), turn)
    every = torch.arange(terms.classes, device=device).repeat_interleave(requests.shape[2])
    found = []
    for turn, sent in enumerate(requests):
        progress("imitating owners", turn, len(requests))
        fakes = sent.to(device).float() / 255
        steps = settings.lessons
        which = torch.randint(fakes.shape[1], (count, steps, batch), generator=generator).to(device)
        state = taught(
            learned,
            critic,
            fakes,
            uniform(steps),
            which,
            uniform(steps),
            STEPS * settings.warm + turn * steps,
        )
        one = vmap(
            functools.partial(slope, critic=critic, down=down, across=across), in_dims=(None, 0, 0)
        )
        found.append(
            vmap(one, in_dims=(0, None, None))(state, fakes.flatten(0, 1), every)
            .unflatten(1, fakes.shape[:2])
            .cpu()
        )
    progress("imitating owners", len(requests), len(requests))
    return torch.stack(found, 1), state
