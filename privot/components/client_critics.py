"""The owners' half: critics that each learn from what one owner holds, and say through a gate where images should go.

It is the same code for one owner behind its own gate, at the end of a cable, and for all of them side by side behind one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from privot.components.federated_settings import Federation
from privot.components.sharded_critics import Critics, State, learned, slope, whole_slope
from privot.nets.functional_critic import Critic
from privot.privacy.gate import Gate
from privot.runtime import Progress, Streams, silent


def taught(
    images: Tensor,
    labels: Tensor,
    state: State,
    critic: Critic,
    fakes: Tensor,
    at: Tensor,
    *lesson: Any,
) -> State:
    """What a critic knows after a lesson against the images its owner was sent: ``fakes`` [asked, classes, rows, ...].

    ``at`` [owners] says in which row of these an owner finds its own. It also learns which classes it has records of.
    """
    known = (labels[:, None] == torch.arange(critic.classes, device=labels.device)).any(0)
    return learned(images, labels, state, critic, fakes[at[state["owner"][None]]][0], *lesson) | {
        "known": known
    }


def wish(state: State, image: Tensor, label: Tensor, full: bool, known: bool, **how: Any) -> Tensor:
    """A `slope`: if ``full`` brought to norm 1, as noise is scaled to that; if ``known`` none for classes that the critic never saw."""
    found = (whole_slope if full else slope)(state, image, label, **how)
    return found * state["known"][label[None]] if known else found


def beginning() -> torch.Generator:
    """Draws the first weights of an owner's critic: the same in every run, so anyone knows them."""
    return Streams(0).generator("an owner's critic")


class Owners:
    """The critics of all owners behind ``gate``; they warm up unless ``begun`` says that they did before."""

    def __init__(
        self,
        gate: Gate,
        settings: Federation,
        streams: Streams,
        progress: Progress = silent,
        begun: bool | None = None,
    ):
        self.gate = gate
        self.settings = settings
        self.count = gate.spec.owners or 1
        self.whole = gate.plan.stages[0].steps
        left = gate.left(settings.stage)
        draws = streams.generator(
            f"lessons of owners, {left} left", streams.runtime.target
        )  # another each time that a process takes it up
        # The first weights are those of every run, so that owners who hear nothing of one another begin alike.
        self.team = Critics(
            gate,
            beginning(),
            draws,
            self.count * settings.parts,
            settings.width,
            settings.critic_batch,
            settings.critic_rate,
            settings.detail,
            settings.window,
            settings.records,
            settings.shift,
        )
        owner = torch.arange(self.count).repeat_interleave(settings.parts)
        known = torch.zeros(len(owner), gate.spec.classes, dtype=torch.bool)
        self.team.begin(
            0 if (left < self.whole if begun is None else begun) else settings.warm,
            progress,
            owner=owner,
            known=known,
        )

    def answers(self, places: Sequence[int], images: Tensor, turn: int | None = None) -> Tensor:
        """The owners in these places learn from images uint8 [asked, classes, rows, ...], and say where each should go, with noise.

        Slopes are float64 [asked, classes, rows, channels, h, w], in frequencies. ``turn`` is how often these owners were asked before.
        """
        settings = self.settings
        (asked, classes, rows) = images.shape[:3]
        turn = (
            (self.whole - self.gate.left(settings.stage)) // (classes * rows)
            if turn is None
            else turn
        )
        fakes = images.float() / 255
        some = torch.tensor(places)
        parts = torch.arange(settings.parts)
        at = (
            torch.zeros(self.count, dtype=torch.int64)
            .index_copy_(0, some, torch.arange(asked))
            .to(fakes.device, non_blocking=True)
        )
        lesson = self.team.lesson(
            rows, settings.lessons, 5 * settings.warm + turn * settings.lessons
        )
        # privacy: who learns depends on who is asked, which the server knows.
        learners = (some[:, None] * settings.parts + parts).flatten()
        self.gate.update(
            taught, self.team.critic, fakes, at, *lesson, some=learners, looks=settings.critic_batch
        )
        query = functools.partial(wish, full=settings.full, known=settings.known, **self.team.how)
        labels = (
            torch.arange(classes, device=fakes.device).repeat_interleave(rows).expand(asked, -1)
        )
        everyone = list(places) == list(range(self.count))
        said = self.gate.deal(
            settings.stage,
            query,
            fakes.flatten(1, 2),
            labels,
            bound=1.0,
            some=None if everyone else some,
        )
        return said.unflatten(1, (classes, rows))
