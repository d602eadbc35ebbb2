"""Settings that a federation's server and clients agree on, and what both derive from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from privot.components.critic_gradients import build_gradient_basis
from privot.components.method_base import MethodBase
from privot.components.pretraining import PRETRAIN_SOURCES
from privot.components.sharded_gan import GENERATOR_CLASSES
from privot.components.validation import (
    require_choice,
    require_noise_multiplier,
    require_range,
)
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets.functional_critic import Critic
from privot.nets.tiny_generator import TinyGenerator

# Copies of a critic's weights and of a batch while it is trained: Adam's moments, gradients and
# intermediate values.
MEMORY_COPIES = 8
MAX_SETTING = 10**6  # largest value of a count: settings may come from an untrusted message


def require_clients(spec: Spec, method_name: str) -> int:
    """Return the number of clients of a data set.

    Raises:
        SettingError: The data set has no clients.
    """
    if spec.num_clients is None:
        raise SettingError(
            f"{method_name} needs data that belongs to clients, and this data set has none. "
            "Choose a built-in data set with clients, or divide this one among N clients by "
            "--clients N or load(..., num_clients=N)."
        )
    return spec.num_clients


@dataclass(frozen=True, kw_only=True)
class FederatedSettings(MethodBase):
    """Settings of the clients' critics and of the server's generator.

    >>> FederatedSettings().compute_gradient_shape(Spec((1, 28, 28), 62))
    (1, 14, 14)
    """

    name: ClassVar[str] = "federation"
    stage: ClassVar[str] = "gradients"

    # Settings that are reduced in this order on a CPU, down to these values; see
    # `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {
        "generator_channels": 16,
        "critic_channels": 8,
        "warmup_rounds": 10,
        "rounds": 50,
    }

    noise_multiplier: float | None = None  # of one gradient; None: calibrated to the budget
    unit: str = "client"  # what the guarantee protects: "client" (all its records) or "record"
    num_critics: int = 20  # critics of each client, if the unit is the record; else one
    records_per_critic: int = 320  # records in a critic's shard: more are cut, fewer are repeated
    rounds: int = 200  # communication rounds
    batch_per_class: int = 1  # generated images of each class that a client receives in a round
    clients_per_round: int = 0  # clients queried in a round, in turn; 0: all
    critic_steps: int = 2  # steps of a critic before it is queried
    warmup_rounds: int = 60  # rounds of five critic steps against tiny generators, at the start
    critic_batch_size: int = 32  # records in a critic step
    critic_channels: int = 32  # channels of a critic's first feature maps
    critic_learning_rate: float = 1e-4  # learning rate of the critics' Adam
    max_shift: int = 0  # largest random shift of the critics' inputs, in pixels; at most side / 14
    frequency_fraction: float = 0.5  # fraction of the DCT coefficients of each side in a gradient
    window_size: int = 0  # pixels in the middle of each side that gradients cover; 0: all
    normalize_gradients: bool = True  # scale gradients to norm 1; False: only clip longer ones
    mask_missing_classes: bool = True  # zero gradients for classes of which a client has no record
    generator: str = "dcgan"  # architecture of the generator: "dcgan" or "residual"
    latent_dim: int = 16  # dimension of the generator's latent vectors
    generator_channels: int = 64  # channels of the generator's last feature maps
    generator_learning_rate: float = 6e-4  # learning rate of the generator's Adam
    ema_decay: float = 0.995  # decay per round of the generator's averaged weights
    pretrain: str = "off"  # "glyphs": pretrain the generator on characters of public fonts
    pretrain_steps: int = 2000  # pretraining steps

    def __post_init__(self) -> None:
        require_range(
            self,
            "num_critics",
            "records_per_critic",
            "rounds",
            "batch_per_class",
            "critic_steps",
            "critic_batch_size",
            "critic_channels",
            "latent_dim",
            "generator_channels",
            "pretrain_steps",
            minimum=1,
            maximum=MAX_SETTING,
        )
        require_choice(self, "unit", ("client", "record"))
        require_choice(self, "generator", tuple(GENERATOR_CLASSES))
        require_choice(self, "pretrain", PRETRAIN_SOURCES)
        require_range(
            self,
            "clients_per_round",
            "warmup_rounds",
            "window_size",
            "max_shift",
            minimum=0,
            maximum=MAX_SETTING,
        )
        require_range(self, "generator_learning_rate", "critic_learning_rate", above=0, below=1)
        require_range(self, "ema_decay", minimum=0, below=1)
        require_range(self, "frequency_fraction", above=0, maximum=1)
        require_noise_multiplier(self)

    @property
    def critics_per_client(self) -> int:
        """Number of critics of each client."""
        return self.num_critics if self.unit == "record" else 1

    def count_groups(self, num_clients: int) -> int:
        """Count the groups of clients that take turns."""
        return math.ceil(num_clients / min(self.clients_per_round or num_clients, num_clients))

    def schedule_clients(self, round_number: int, num_clients: int) -> list[int]:
        """Choose the clients of a round, by a public schedule.

        The numbers of rounds of two clients differ by one at most.

        Args:
            round_number: Number of the round, from 0.
            num_clients: Number of all clients.

        Returns:
            Indices of the clients that are queried.

        >>> pairs = FederatedSettings(clients_per_round=2)
        >>> pairs.schedule_clients(0, 5), pairs.schedule_clients(2, 5)
        ([0, 1], [4])
        >>> FederatedSettings().schedule_clients(7, 3)
        [0, 1, 2]
        """
        group_size = min(self.clients_per_round or num_clients, num_clients)
        group = round_number % self.count_groups(num_clients)
        return list(range(group * group_size, min((group + 1) * group_size, num_clients)))

    def compute_gradient_shape(self, spec: Spec) -> tuple[int, int, int]:
        """Return the shape of one gradient: (channels, rows, columns)."""
        rows, columns = (
            build_gradient_basis(side, self.frequency_fraction, self.window_size).shape[1]
            for side in spec.shape[1:]
        )
        return spec.shape[0], rows, columns

    def estimate_memory(self, spec: Spec) -> float:
        """Estimate the memory of one client in bytes.

        It counts the critics with their training state, the records in their shards, a training
        batch and the images of a round.

        >>> spec = Spec((1, 28, 28), 62)
        >>> settings = [FederatedSettings(unit=unit) for unit in ("client", "record")]
        >>> [round(each.estimate_memory(spec) / 1e9, 2) for each in settings]
        [0.05, 1.14]
        """
        critic = Critic(spec.shape, spec.num_classes, self.critic_channels)
        tiny_generator = TinyGenerator(spec.shape, spec.num_classes)
        conv_channels = [
            shape[0] for name, shape in critic.parameter_shapes.items() if name.startswith("conv")
        ]
        map_elements = sum(
            channels * math.prod(side)
            for channels, side in zip(conv_channels, critic.map_sides[1:], strict=True)
        )
        num_weights = sum(
            math.prod(shape)
            for net in (critic, tiny_generator)
            for shape in net.parameter_shapes.values()
        )
        num_pixels = math.prod(spec.shape)
        num_images = self.batch_per_class * spec.num_classes
        per_critic = (
            MEMORY_COPIES * (num_weights + self.critic_batch_size * (num_pixels + map_elements))
            + self.records_per_critic * num_pixels
        )
        # All images of a round are queried at once. If each draws its critic, it needs a copy of
        # that critic's state.
        per_image = MEMORY_COPIES * (num_pixels + map_elements) + (
            4 * num_weights if self.critics_per_client > 1 else 0
        )
        return 4.0 * (self.critics_per_client * per_critic + num_images * per_image)
