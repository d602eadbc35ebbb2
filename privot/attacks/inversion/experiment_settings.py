"""The settings of an inversion experiment: model, attack, defense, and how many victims."""

from __future__ import annotations

from dataclasses import dataclass, replace

from privot.attacks.inversion.attacks import InversionAttack, resolve_inversion_attack
from privot.attacks.inversion.defense_guarantee import DpSgdRun
from privot.attacks.inversion.defenses import GradientDefense, build_defense
from privot.attacks.inversion.models import INVERSION_MODELS
from privot.attacks.inversion.scoring import LEAK_MSE_THRESHOLD
from privot.errors import SettingError


@dataclass(frozen=True)
class InversionSettings:
    """The settings of an inversion experiment.

    Attributes:
        model: a name in `INVERSION_MODELS`.
        attack: Attack of the search, a name in `INVERSION_ATTACKS`.
        num_victims: Number of updates.
        batch_size: Images behind each update.
        optimizer: Optimizer of the search. None: the attack's own.
        steps: Steps of each phase of the search. None: the attack's own.
        learning_rate: Learning rate. None: the attack's own, or the usual one of ``optimizer``.
        restarts: Restarts of the search.
        noise_scale: Gaussian noise on the update. With ``clip_norm`` it is the noise MULTIPLIER:
            the standard deviation on the clipped sum is noise_scale * clip_norm. Without
            ``clip_norm`` it is the STANDARD DEVIATION on each entry of the mean gradient.
        clip_norm: L2 norm to which the gradient of each image is clipped. None: no clipping.
        prune_fraction: Share of the smallest entries that are set to 0.
        bits: To which entries are rounded. None: no rounding.
        is_adaptive: Whether the attacker knows the defense.
        num_checked: Victims for the Cramér-Rao bound and the closed form.
        threshold: Mean squared error below which an image counts as leaked.
        training: a run of DP-SGD with this defense, whose epsilon is reported.
        seed: Seed of all random numbers.
    """

    model: str = "lenet"
    attack: str = "wdlg"
    num_victims: int = 300
    batch_size: int = 1
    optimizer: str | None = None
    steps: int | None = None
    learning_rate: float | None = None
    restarts: int = 0
    noise_scale: float = 0.0
    clip_norm: float | None = None
    prune_fraction: float = 0.0
    bits: int | None = None
    is_adaptive: bool = True
    num_checked: int = 4
    threshold: float = LEAK_MSE_THRESHOLD
    training: DpSgdRun | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        attack = resolve_inversion_attack(self.attack)
        if self.model not in INVERSION_MODELS:
            raise SettingError(
                f"There is no model {self.model!r}. Choose one of {', '.join(INVERSION_MODELS)}, "
                "or check your own model with privot.attacks.inversion.check_leakage."
            )
        if (
            self.num_victims < 1
            or self.batch_size < 1
            or self.num_checked < 0
            or not self.threshold > 0
        ):
            raise SettingError(
                f"num_victims={self.num_victims}, batch_size={self.batch_size}, "
                f"num_checked={self.num_checked}, threshold={self.threshold}: at least 1, at least "
                "1, at least 0 and above 0 are needed."
            )
        if self.has_one_logit and (self.batch_size > 1 or attack.optimize_labels):
            raise SettingError(
                "cnn6 has one logit, from which labels cannot be recovered. Use a batch of 1 and "
                "an attack other than dlg."
            )

    @property
    def has_one_logit(self) -> bool:
        """Whether the model separates odd from even labels; the attacker then knows the labels."""
        return self.model == "cnn6"

    @property
    def defense(self) -> GradientDefense | None:
        """What clients do before they send."""
        return build_defense(
            noise_scale=self.noise_scale,
            clip_norm=self.clip_norm,
            prune_fraction=self.prune_fraction,
            bits=self.bits,
            batch_size=self.batch_size,
        )

    def configure_attack(self) -> InversionAttack:
        """Build the search: the attack with its optimizer and the objective of the defense.

        An adaptive attacker who cannot know the scale of an update compares directions.
        """
        attack = resolve_inversion_attack(self.attack)
        if self.optimizer or self.steps or self.learning_rate:
            first_phase = attack.phases[0]
            attack = attack.replace_optimizer(
                self.optimizer or first_phase.optimizer,
                self.steps,
                self.learning_rate or (None if self.optimizer else first_phase.learning_rate),
            )
        if self.is_adaptive and self.defense is not None and self.defense.objective == "cosine":
            phases = tuple(replace(phase, objective="cosine") for phase in attack.phases)
            attack = replace(attack, phases=phases)
        return attack
