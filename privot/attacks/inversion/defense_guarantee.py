"""What a defence promises over a whole training run: an epsilon where there is a proof, else the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from privot.attacks.inversion.defenses import Clipped, Defended, Several
from privot.errors import SettingError
from privot.privacy.plan import Budget, Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.release import Guarantee, NoGuarantee


@dataclass(frozen=True)
class Training:
    """A run of DP-SGD: ``steps`` updates, each of a Poisson draw of ``batch`` of ``size`` records in the mean."""

    size: int
    batch: int
    steps: int
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not 0 < self.batch <= self.size or self.steps < 1:
            raise SettingError(
                f"size={self.size}, batch={self.batch}, steps={self.steps}: a batch within the size, and a step or more"
            )
        Budget(1.0, self.delta)

    def plan(self, noise: float) -> Plan:
        """A clipped sum a step, as the gate would answer it. Neighbours: one record more or less.

        >>> round(Training(60_000, 256, 1_000).plan(1.0).cost().epsilon(1e-5), 2)
        0.73
        """
        return Plan(
            (Stage("gradients", "sum", noise, self.steps, Poisson(self.batch / self.size)),),
            Neighbours.ADD_REMOVE,
        )


def promise(defence: Defended | None, training: Training) -> Guarantee | NoGuarantee:
    """The certificate of the run in which every update goes through the defence, for one record more or less.

    privacy: the epsilon follows from the multiplier, the draws and the steps; the number that a noisy sum is divided by is post-processing,
    and so are pruning and rounding after the noise. An update of one image alone is the worst draw of such a run, not another run.
    """
    first = defence.parts[0] if isinstance(defence, Several) else defence
    if first is None:
        return NoGuarantee("the gradient is sent as it is")
    if not isinstance(first, Clipped):
        return NoGuarantee(
            "nothing bounds what one record adds to an update, so no noise is enough: clip each record's gradient first"
        )
    if not first.noise:
        return NoGuarantee("gradients are clipped, but no noise is added")
    return Guarantee.of(training.plan(first.noise), training.delta)
