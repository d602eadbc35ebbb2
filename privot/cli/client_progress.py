"""What the command line shows of an owner in a federated run, on the owner's own side."""

from __future__ import annotations

from typing import Any

from privot.cli.options import err_console, say
from privot.progress import Progress, round_up

STOPPED = "this owner has stopped for good, and takes no further part in the run"


class Watched:
    """An owner that tells what it agreed to and how far the run has come; `more` says whether it is still needed, ``ended`` why not."""

    def __init__(self, owner: Any, progress: Progress, delta: float):
        self.owner = owner
        self.progress = progress
        self.delta = delta
        self.rounds = 0
        self.last = owner.last
        self.ended = STOPPED if owner.left else ""  # why this owner's part ended before the run
        self.waits = (
            not self.ended and not self._turns()
        )  # for a message, though no turn is left: the last answer may not have arrived

    def reply(self, message: bytes) -> bytes:
        from privot.federated.messages import Answer, Refusal, Terms, unpack

        raw: bytes = self.owner.reply(message)
        said = unpack(raw)
        agreed = self.owner.terms
        if self.owner.left:
            self.ended = STOPPED
        elif (
            isinstance(said, Refusal) and agreed is None and said.round < 0 and said.run.strip("0")
        ):
            self.ended = f"the terms of run {said.run[:8]} were refused: {said.reason}"
        if isinstance(said, Terms):
            cost = round_up(float(said.plan().cost().epsilon(self.delta)))
            say(
                f"agreed     to run {said.run[:8]}: {said.settings.rounds} rounds, epsilon {cost}, {said.settings.unit}",
                err_console,
            )
        elif isinstance(said, Answer):
            self.rounds = self.rounds + (said.round != self.last)
            self.last = said.round
            self.waits = False
            self.progress("answers", said.round + 1, agreed.settings.rounds)
        return raw

    def more(self) -> bool:
        """Whether a turn of this owner is left in the terms that were agreed to, or its last answer may be asked for again."""
        return not self.ended and (self.waits or self._turns())

    def _turns(self) -> bool:
        agreed = self.owner.terms
        return self.last < 0 or bool(
            self.last + agreed.settings.groups(agreed.owners) < agreed.settings.rounds
        )
