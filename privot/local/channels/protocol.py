"""The contract of a channel."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from torch import Tensor

from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Plan


class Channel(Protocol):
    """The contract of a channel. Fields are public.

    `privatize` runs on the client, `compute_cost_matrix` on the server. A record has ``record_dim``
    values (a category is one value: its index), a generated point ``point_dim`` (a category is the
    vector of its probabilities), an output ``output_dim``.

    Attributes:
        name: The name in files and on the command line.
        epsilon: Epsilon of one record.
        delta: Delta of one record.
        temperature: The regularization of entropic transport for which ``exp(-cost / temperature)``
            is the density of an output, up to a factor that does not depend on the point.
        record_dim: Number of values of a record.
        point_dim: Number of values of a generated point.
        output_dim: Number of values of an output.
    """

    name: ClassVar[str]

    @property
    def epsilon(self) -> float: ...
    @property
    def delta(self) -> float: ...
    @property
    def temperature(self) -> float: ...
    @property
    def record_dim(self) -> int: ...
    @property
    def point_dim(self) -> int: ...
    @property
    def output_dim(self) -> int: ...

    def plan(self) -> Plan:
        """Give the events of one record, under ``local`` neighbours."""

    def privatize(self, records: Tensor, secret_random: SecretRandom | None = None) -> Tensor:
        """Privatize records [n, record_dim] on the client: outputs [n, output_dim]."""

    def to_points(self, records: Tensor) -> Tensor:
        """Convert records [n, record_dim] into points [n, point_dim]."""

    def compute_cost_matrix(self, points: Tensor, outputs: Tensor) -> Tensor:
        """Compute the cost of points [..., n, point_dim] and outputs [..., m, output_dim].

        Returns:
            [..., n, m]; differentiable in ``points``.
        """

    def compute_expected_cost(self) -> float:
        """Compute the mean cost of a record and its own output.

        The transport cost comes to this value where the distribution of the records was found.
        """

    def is_possible_output(self, outputs: Tensor) -> bool:
        """Whether the channel can give these outputs [n, output_dim]."""

    def with_epsilon(self, epsilon: float) -> Channel:
        """Build the same channel with another epsilon."""

    def predict_signal_to_noise(self, num_records: int) -> float:
        """Predict the signal-to-noise ratio of so many records; below 1 they show little."""

    def to_json(self) -> dict[str, Any]:
        """Describe the channel as plain data, without epsilon, which follows from the rest."""
