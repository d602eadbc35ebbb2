"""The settings of an attack on the transcript of a federated run."""

from __future__ import annotations

from dataclasses import dataclass

from privot.attacks.inversion.attacks import InversionAttack, resolve_inversion_attack
from privot.attacks.inversion.scoring import LEAK_MSE_THRESHOLD
from privot.errors import SettingError

MIN_SIMULATED_CLIENTS = 5  # one of them chooses the ridge


@dataclass(frozen=True)
class TranscriptAttackSettings:
    """The settings of an attack on a transcript.

    Attributes:
        num_images: Most records of the client that are scored.
        num_simulated_clients: Clients from which the linear estimate is learned, at least 5.
        num_checked: Records for the search from the raw weight gradient.
        attack: Attack of that search, a name in `INVERSION_ATTACKS` or an attack.
        threshold: Mean squared error below which an image counts as leaked.
        seed: Seed of all random numbers.
    """

    num_images: int = 300
    num_simulated_clients: int = 64
    num_checked: int = 4
    attack: str | InversionAttack = "hybrid"
    threshold: float = LEAK_MSE_THRESHOLD
    seed: int = 0

    def __post_init__(self) -> None:
        resolve_inversion_attack(self.attack)
        if (
            self.num_images < 1
            or self.num_simulated_clients < MIN_SIMULATED_CLIENTS
            or self.num_checked < 1
            or not self.threshold > 0
        ):
            raise SettingError(
                f"num_images={self.num_images}, "
                f"num_simulated_clients={self.num_simulated_clients}, "
                f"num_checked={self.num_checked}, threshold={self.threshold}: at least 1, at "
                f"least {MIN_SIMULATED_CLIENTS}, at least 1 and above 0 are needed."
            )
