"""The open round of a server: the images that it sends and the answers that have arrived."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from privot.federated.messages import Request, pack_message


@dataclass
class OpenRound:
    """Holds the requests and answers of one round.

    Attributes:
        images: The generated images, uint8 [clients, classes, batch, channels, height, width].
        client_rows: The row of each scheduled client in `images`.
        answers: The packed answer of each client and its gradients, float32
            [classes, batch, channels, rows, columns].
    """

    images: Tensor = field(default_factory=lambda: torch.empty(0))
    client_rows: dict[str, int] = field(default_factory=dict)
    answers: dict[str, tuple[bytes, Tensor]] = field(default_factory=dict)

    @property
    def missing_clients(self) -> list[str]:
        """Scheduled clients whose answers have not arrived."""
        return [name for name in self.client_rows if name not in self.answers]

    def pack_request(self, client_name: str, run_id: str, round_number: int) -> bytes:
        """Pack the request to a client.

        Args:
            client_name: A scheduled client.
            run_id: The run.
            round_number: The number of this round.

        Returns:
            The packed request; the same bytes at every call.
        """
        images = self.images[self.client_rows[client_name]]
        return pack_message(Request(run_id, round_number, images))

    def stack_gradients(self) -> tuple[Tensor, Tensor]:
        """Stack the gradients of all scheduled clients, at least one of which has answered.

        Returns:
            The gradients, float32 [clients, classes, batch, channels, rows, columns], with zeros
            for clients without an answer, and a mask, bool [clients], of those that answered.
        """
        zeros = torch.zeros_like(next(iter(self.answers.values()))[1])
        gradients = torch.stack(
            [self.answers[name][1] if name in self.answers else zeros for name in self.client_rows]
        )
        answer_mask = torch.tensor([name in self.answers for name in self.client_rows])
        return gradients, answer_mask
