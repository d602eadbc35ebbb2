"""The conditions, besides the budget, under which a client agrees to terms."""

from __future__ import annotations

from dataclasses import dataclass

from privot.errors import MessageError
from privot.federated.messages import Terms
from privot.nets.functional_critic import Critic

# Floating-point operations that fit into the time of the smallest critic step.
MIN_STEP_FLOPS = 1e9


@dataclass(frozen=True)
class ClientPolicy:
    """States which terms a client accepts.

    Attributes:
        unit: The privacy unit that terms must protect: "client", or "record", which is weaker;
            with "record" both are accepted.
        max_flops: Largest cost of a whole run, in floating-point operations. With default terms for
            300 writers each client has about 4e12.
        max_memory_bytes: Largest memory of a run, in bytes.
    """

    unit: str = "client"
    max_flops: float = 1e15
    max_memory_bytes: float = 4e9

    def check(self, terms: Terms) -> None:
        """Raise `MessageError` if the terms do not meet the conditions."""
        settings = terms.settings
        if settings.unit not in ("client", self.unit):
            raise MessageError(
                f"This client accepts terms that protect a {self.unit}; "
                f"these protect a {settings.unit}."
            )
        if not settings.noise_multiplier:
            raise MessageError("Terms without noise protect nobody.")
        if not (
            estimate_client_flops(terms) <= self.max_flops
            and settings.estimate_memory(terms.spec) <= self.max_memory_bytes
        ):
            raise MessageError(
                "These terms need more computation or memory than this client offers: "
                "use fewer rounds or critic steps, or smaller critics."
            )


def estimate_client_flops(terms: Terms) -> float:
    """Estimate the floating-point operations of one client in a run.

    Every critic step costs at least `MIN_STEP_FLOPS`.
    """
    settings = terms.settings
    critic = Critic(terms.shape, terms.num_classes, settings.critic_channels)
    warmup_steps = 5.0 * settings.warmup_rounds
    training_steps = settings.rounds * settings.critic_steps
    steps = (warmup_steps + training_steps) * settings.critics_per_client
    # A critic step runs two images forward and backward, and one image through a double backward
    # pass. An input gradient runs one image forward and backward.
    step_flops = max(MIN_STEP_FLOPS, 14.0 * critic.flops * settings.critic_batch_size)
    return (
        steps * step_flops
        + 3.0 * critic.flops * settings.rounds * settings.batch_per_class * terms.num_classes
    )
