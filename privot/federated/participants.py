"""What a server knows about each client of a run: consent, refusals and offenses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from privot.errors import ReleaseError
from privot.io import write_atomically

MAX_REFUSALS = 3  # refusals of a client after which the server sends it no further request

CONSENT_PENDING = "offered"
CONSENT_GIVEN = "agreed"
LEFT_RUN = "gone"


@dataclass(frozen=True)
class Offense:
    """States what a client did against the protocol, or failed to do.

    Attributes:
        client_name: The client.
        round: The round; -1 while the server asked for consent.
        reason: What happened, as a predicate: "did not answer in time".
        disqualifying: Whether the client is excluded from the rest of the run.
    """

    client_name: str
    round: int
    reason: str
    disqualifying: bool = True


@dataclass
class Participants:
    """Tracks the clients of a run.

    Attributes:
        client_names: All clients, in their public order.
        states: The state of each client: `CONSENT_PENDING`, `CONSENT_GIVEN` or `LEFT_RUN`.
        num_refusals: How many requests each client refused.
        offenses: All offenses, in the order in which they happened.
        missed_rounds: (client, round) of requests without an answer; the answer may arrive late.
    """

    client_names: tuple[str, ...]
    states: dict[str, str]
    num_refusals: dict[str, int]
    offenses: list[Offense] = field(default_factory=list)
    missed_rounds: set[tuple[str, int]] = field(default_factory=set)

    @classmethod
    def invite(cls, client_names: Sequence[str]) -> Participants:
        """Start with clients whose consent is pending."""
        return cls(
            tuple(client_names),
            dict.fromkeys(client_names, CONSENT_PENDING),
            dict.fromkeys(client_names, 0),
        )

    @property
    def active(self) -> list[str]:
        """Clients that agreed and have not left, in their order."""
        return [name for name in self.client_names if self.is_active(name)]

    def is_active(self, client_name: str) -> bool:
        """Return whether a client agreed and has not left."""
        return self.states[client_name] == CONSENT_GIVEN

    def has_left(self, client_name: str) -> bool:
        """Return whether a client left, was excluded, or never belonged to the run."""
        return self.states.get(client_name, LEFT_RUN) == LEFT_RUN

    def mark_left(self, client_name: str) -> None:
        """Record that a client takes no further part."""
        self.states[client_name] = LEFT_RUN

    def count_refusal(self, client_name: str) -> None:
        """Count a refused request; after `MAX_REFUSALS` the client receives no further one."""
        self.num_refusals[client_name] += 1
        if self.num_refusals[client_name] >= MAX_REFUSALS:
            self.mark_left(client_name)

    def report_missed_round(self, client_name: str, round_number: int) -> None:
        """Record that a client did not answer before the end of a round."""
        self.missed_rounds.add((client_name, round_number))
        reason = "did not answer in time"
        self.offenses.append(Offense(client_name, round_number, reason, disqualifying=False))

    def save(self, file: Path, terms_digest: str) -> None:
        """Write the state to a file of the run with these terms."""
        state = {
            "terms": terms_digest,
            "client_names": self.client_names,
            "client_states": self.states,
            "num_refusals": self.num_refusals,
            "offenses": [dataclasses.astuple(offense) for offense in self.offenses],
            "missed_rounds": sorted(self.missed_rounds),
        }
        write_atomically(file, json.dumps(state).encode())

    @classmethod
    def load(cls, file: Path, terms_digest: str, client_names: Sequence[str]) -> Participants:
        """Read the state of an unfinished run.

        Args:
            file: The file that `save` wrote.
            terms_digest: SHA-256 of the packed terms of the run.
            client_names: The clients of the run.

        Returns:
            The state.

        Raises:
            ReleaseError: The file is of a run with other terms or clients.
        """
        state = json.loads(file.read_text())
        if state["terms"] != terms_digest or tuple(state["client_names"]) != tuple(client_names):
            raise ReleaseError(
                f"{file.parent} holds a run with other terms or other clients. Resume it with the "
                "same ones, or remove the folder."
            )
        return cls(
            tuple(client_names),
            state["client_states"],
            state["num_refusals"],
            [Offense(*fields) for fields in state["offenses"]],
            {(name, round_number) for name, round_number in state["missed_rounds"]},
        )
