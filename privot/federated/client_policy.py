"""What an owner asks of terms beside its budget: whom they must protect, and how much of its machine they may take."""

from __future__ import annotations

from dataclasses import dataclass

from privot.errors import MessageError
from privot.federated.messages import Terms
from privot.nets.functional_critic import Critic

STEP = 1e9  # floating-point operations in the time that the smallest step of a critic takes


@dataclass(frozen=True)
class Policy:
    """An owner's own conditions; terms that do not meet them are refused by name."""

    unit: str = "client"  # or "record", which promises less: then both are agreed to
    work: float = 1e15  # floating-point operations of the whole run; of 300 writers' default terms each has some 4e12 to do
    memory: float = 4e9  # bytes

    def check(self, terms: Terms) -> None:
        settings = terms.settings
        if settings.unit not in ("client", self.unit):
            raise MessageError(
                f"this owner agrees to terms that protect a {self.unit}, and these protect a {settings.unit}"
            )
        if not settings.noise:
            raise MessageError("terms without noise protect nobody")
        if not (work(terms) <= self.work and settings.memory(terms.spec) <= self.memory):
            raise MessageError(
                "these terms take more of this owner's machine than it lends: fewer rounds or lessons, smaller critics"
            )


def work(terms: Terms) -> float:
    """Floating-point operations of one owner's run, nearly; a step has its price however small it is."""
    settings = terms.settings
    critic = Critic(terms.shape, terms.classes, terms.settings.width)
    steps = (5.0 * settings.warm + settings.rounds * settings.lessons) * settings.parts
    # In a critic's step two images go forward and back, and one twice over; in a slope one does.
    return (
        steps * max(STEP, 14.0 * critic.work * settings.critic_batch)
        + 3.0 * critic.work * settings.rounds * settings.rows * terms.classes
    )
