"""Settings of the private set, their defaults by the data, and the rounds that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from privot.components.method_base import MethodBase
from privot.components.validation import (
    require_choice,
    require_count,
    require_noise_multiplier,
    require_range,
)
from privot.data.spec import Spec
from privot.errors import SettingError

# The networks of a round are divided into queries of at least this many networks, and at most this
# many queries. Query results are stored one by one, so that a crashed run can be resumed.
MIN_NETS_PER_QUERY = 10
MAX_QUERIES_PER_ROUND = 64
# By number of channels: shares of the budget for class means, random networks, networks pretrained
# on synthetic images, and each round of trained networks. How they were chosen:
# docs/methods/private-set.md.
DEFAULT_BUDGET_SHARES = {1: (0.05, 0.35, 0.0, 0.60), 3: (0.05, 0.0, 0.35, 0.60)}
DEFAULT_TEXTURE_NORM = {1: 0.0, 3: 0.7}
DEFAULT_INIT_FROM_SYNTHETIC = {1: False, 3: True}
# DCT coefficients that images lack cannot take up noise.
DEFAULT_FREQUENCY_FRACTION = {1: 1.0, 3: 0.5}
LARGE_IMAGE_SIDE = 24  # pixels; images with a smaller side need less
LARGE_IMAGE_SETTINGS = {
    "num_random_nets": 150,
    "nets_per_round": 40,
    "net_width": 128,
    "steps": 2000,
    "net_train_epochs": 200,
}
SMALL_IMAGE_SETTINGS = {
    "num_random_nets": 30,
    "nets_per_round": 10,
    "net_width": 16,
    "steps": 150,
    "net_train_epochs": 40,
}
# For large color images on a CPU: pretraining takes most of the time there, and random networks
# reach more in the same time.
COLOR_CPU_SETTINGS = {
    "budget_shares": (0.1, 0.3, 0.0, 0.6),
    "num_random_nets": 20,
    "net_width": 16,
    "steps": 250,
    "nets_per_round": 5,
    "net_train_epochs": 25,
    "nets_per_step": 1,
}


class RoundPlan(NamedTuple):
    """What a round of features queries."""

    num_features: int  # networks, times the augmentations of each network
    budget_share: float  # share of mu²


@dataclass(frozen=True, kw_only=True)
class PrivateSetSettings(MethodBase):
    """Settings of the private set. None stands for a default that depends on the data."""

    noise_multiplier: float | None = None  # of the whole run; None: calibrated to the budget
    neighbours: str = "add-remove"  # neighboring data sets: "replace" or "add-remove" one record
    images_per_class: int = 50  # images of each class; other numbers can be made later for free
    # Shares of mu² for class means, random networks, pretrained networks, and each round of trained
    # networks. None: by the channels.
    budget_shares: tuple[float, ...] | None = None
    num_random_nets: int | None = None  # random networks; None: by the side of the images
    num_pretrained_nets: int = 20  # networks that are pretrained on synthetic images
    pretrain_epochs: int = 15  # epochs of their pretraining
    augmentations: int = 1  # augmentations, and so features, of each pretrained or trained network
    nets_per_round: int | None = None  # trained networks of a round; None: by the side
    net_width: int | None = None  # channels of the networks; None: by the side of the images
    net_depth: int = 3  # convolutional blocks of the networks
    texture_norm: float | None = None  # norm of texture features; None: 0 for gray, .7 for color
    # Whether images start as synthetic images around the class means, and not as noise around them.
    # None: only for color images.
    init_from_synthetic: bool | None = None
    frequency_fraction: float | None = None  # optimized DCT coefficients; None: 1 gray, .5 color
    steps: int | None = None  # optimization steps before each round and at the end; None: by side
    nets_per_step: int = 4  # networks of each round in one optimization step
    learning_rate: float = 0.02  # initial learning rate of Adam on the images
    net_train_epochs: int | None = None  # epochs of the trained networks; None: by the side
    soft_label_weight: float = 0.0  # weight of network predictions in soft labels; 0: hard labels
    keep_answers: bool = True  # store the query results in the release, for sets of other sizes

    def __post_init__(self) -> None:
        require_choice(self, "neighbours", ("replace", "add-remove"))
        require_count(
            self,
            "images_per_class",
            "num_random_nets",
            "num_pretrained_nets",
            "pretrain_epochs",
            "augmentations",
            "nets_per_round",
            "net_width",
            "net_depth",
            "steps",
            "nets_per_step",
            "net_train_epochs",
        )
        if self.budget_shares is not None:
            _validate_budget_shares(self.budget_shares)
        require_range(self, "learning_rate", above=0, below=1)
        require_range(self, "frequency_fraction", above=0, maximum=1)
        require_range(self, "soft_label_weight", minimum=0, below=1)
        require_range(self, "texture_norm", minimum=0, maximum=10)
        require_noise_multiplier(self)

    def resolve_setting(self, spec: Spec, setting_name: str) -> int:
        """Return a setting, or its default by the side of the images."""
        value: int | None = getattr(self, setting_name)
        if value is not None:
            return value
        return self._defaults_by_side(spec)[setting_name]

    def resolve_texture_norm(self, spec: Spec) -> float:
        """Return the norm of texture features, or its default by the channels."""
        if self.texture_norm is None:
            return DEFAULT_TEXTURE_NORM[spec.shape[0]]
        return self.texture_norm

    def get_budget_shares(self, spec: Spec) -> tuple[float, ...]:
        """Return the budget shares, scaled to the sum 1."""
        shares = self.budget_shares or DEFAULT_BUDGET_SHARES[spec.shape[0]]
        return tuple(share / sum(shares) for share in shares)

    def plan_rounds(self, spec: Spec) -> dict[str, RoundPlan]:
        """Return the rounds of features by name, without those whose budget share is 0."""
        _, random_share, pretrained_share, *trained_shares = self.get_budget_shares(spec)
        num_trained = self.resolve_setting(spec, "nets_per_round") * self.augmentations
        rounds = {
            "random": RoundPlan(self.resolve_setting(spec, "num_random_nets"), random_share),
            "pretrained": RoundPlan(
                self.num_pretrained_nets * self.augmentations, pretrained_share
            ),
        }
        for index, share in enumerate(trained_shares):
            rounds[f"trained{index + 1}"] = RoundPlan(num_trained, share)
        return {name: plan for name, plan in rounds.items() if plan.budget_share}

    @staticmethod
    def _defaults_by_side(spec: Spec) -> dict[str, int]:
        is_large = spec.shape[1] >= LARGE_IMAGE_SIDE
        return LARGE_IMAGE_SETTINGS if is_large else SMALL_IMAGE_SETTINGS

    @classmethod
    def suggest_settings(cls, spec: Spec) -> dict[str, Any]:
        """Suggest the settings for the side of the images."""
        return dict(cls._defaults_by_side(spec))

    @classmethod
    def suggest_cpu_settings(cls, spec: Spec) -> dict[str, Any]:
        """Suggest other settings on a CPU. How they were chosen: docs/methods/private-set.md."""
        is_large_color = spec.shape[0] == 3 and spec.shape[1] >= LARGE_IMAGE_SIDE
        return dict(COLOR_CPU_SETTINGS) if is_large_color else {}


def _validate_budget_shares(shares: tuple[float, ...]) -> None:
    """Raise an error unless the shares are complete and those of all queries are above 0."""
    if (
        len(shares) < 3
        or not all(0 <= share <= 1e6 for share in shares)
        or not sum(shares[1:3])
        or not all(share > 0 for share in (shares[0], *shares[3:]))
    ):
        raise SettingError(
            f"private-set.budget_shares={shares} is not valid. Give the shares of class means, "
            "random networks and pretrained networks, then one for each round of trained networks. "
            "One of the second and third may be 0; all others must be above 0."
        )


def count_queries(num_features: int) -> int:
    """Return the number of queries into which the features of a round are divided."""
    return min(-(-num_features // MIN_NETS_PER_QUERY), MAX_QUERIES_PER_ROUND)
