"""Optimal transport as pure mathematics: no data and no privacy.

Three families of losses: entropic transport between weighted points (`sinkhorn`), entropic
transport whose temperature is that of privacy noise (`entropic`), and sliced transport (`sliced`,
`sliced_distance`).
"""

from __future__ import annotations

from privot.transport.anderson import AndersonAcceleration
from privot.transport.costs import l1_cost
from privot.transport.entropic import (
    SinkhornOutput,
    count_sufficient_iterations,
    entropic_loss,
    likelihood_loss,
    solve_sinkhorn,
)
from privot.transport.sinkhorn import (
    Potentials,
    entropic_transport_cost,
    semi_debiased_loss,
    sinkhorn_divergence,
    solve_potentials,
    squared_euclidean_cost,
    transport_plan,
)
from privot.transport.sliced import (
    random_orthogonal_frames,
    resample_quantiles,
    slice_targets,
    sliced_flow_step,
    sliced_flow_step_with_error,
    sliced_target_loss,
)
from privot.transport.sliced_distance import (
    max_sliced_wasserstein_distance,
    sliced_wasserstein_distance,
)
from privot.transport.sorting import argsort_rows, isotonic_regression, sort_rows

__all__ = [
    "AndersonAcceleration",
    "Potentials",
    "SinkhornOutput",
    "argsort_rows",
    "count_sufficient_iterations",
    "entropic_loss",
    "entropic_transport_cost",
    "isotonic_regression",
    "l1_cost",
    "likelihood_loss",
    "max_sliced_wasserstein_distance",
    "random_orthogonal_frames",
    "resample_quantiles",
    "semi_debiased_loss",
    "sinkhorn_divergence",
    "slice_targets",
    "sliced_flow_step",
    "sliced_flow_step_with_error",
    "sliced_target_loss",
    "sliced_wasserstein_distance",
    "solve_potentials",
    "solve_sinkhorn",
    "sort_rows",
    "squared_euclidean_cost",
    "transport_plan",
]
