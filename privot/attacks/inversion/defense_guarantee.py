"""The guarantee of a defense over a whole training run, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from privot.attacks.inversion.defenses import ClippingDefense, GradientDefense, Pipeline
from privot.errors import SettingError
from privot.privacy.plan import Budget, Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.release import Guarantee, NoGuarantee


@dataclass(frozen=True)
class DpSgdRun:
    """A run of DP-SGD with Poisson sampling.

    Attributes:
        dataset_size: Number of records.
        batch_size: Expected size of a batch.
        steps: Number of updates.
        delta: Delta of the guarantee.
    """

    dataset_size: int
    batch_size: int
    steps: int
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not 0 < self.batch_size <= self.dataset_size or self.steps < 1:
            raise SettingError(
                f"dataset_size={self.dataset_size}, batch_size={self.batch_size}, "
                f"steps={self.steps}: the batch must be within the data set, and at least one "
                "step is needed."
            )
        Budget(1.0, self.delta)

    def plan(self, noise_multiplier: float) -> Plan:
        """Plan one clipped sum for each step; neighbours differ by one record.

        >>> round(DpSgdRun(60_000, 256, 1_000).plan(1.0).cost().epsilon(1e-5), 2)
        0.73
        """
        sample_rate = self.batch_size / self.dataset_size
        stage = Stage("gradients", "sum", noise_multiplier, self.steps, Poisson(sample_rate))
        return Plan((stage,), Neighbours.ADD_REMOVE)


def derive_defense_guarantee(
    defense: GradientDefense | None, training: DpSgdRun
) -> Guarantee | NoGuarantee:
    """Derive the guarantee of a run in which every update goes through the defense.

    Neighbouring data sets differ by one record that is added or removed.

    privacy: the epsilon follows from the noise multiplier, the sampling and the steps. The number
    by which a noisy sum is divided is post-processing, and so are pruning and rounding after the
    noise. An update of a single image is the worst batch that such a run can sample, not another
    kind of run.
    """
    first = defense.defenses[0] if isinstance(defense, Pipeline) else defense
    if first is None:
        return NoGuarantee("The gradient is sent without any defense.")
    if not isinstance(first, ClippingDefense):
        return NoGuarantee(
            "Nothing limits what one record contributes to an update, so no noise is enough. "
            "Clip the gradient of each record first."
        )
    if not first.noise_multiplier:
        return NoGuarantee("Gradients are clipped, but no noise is added.")
    return Guarantee.from_plan(training.plan(first.noise_multiplier), training.delta)
