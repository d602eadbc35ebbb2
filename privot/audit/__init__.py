"""Statistics of attacks: rates with bounds, lower bounds on epsilon, and verdicts on certificates.

Scores are higher for likelier members. What scores prove about sensitive records is secret itself,
so every result has a flag ``publishable``, which is False unless the caller sets it. The audit of a
whole method is `privot.audit.runner.EpsilonAudit`.
"""

from privot.audit.many_runs import EpsilonBound, audit_many_runs, compute_gaussian_epsilon
from privot.audit.one_run import audit_one_run, audit_one_run_gaussian
from privot.audit.operating_points import (
    OperatingPoint,
    OperatingPoints,
    clopper_pearson_lower,
    clopper_pearson_upper,
    estimate_tpr_at_fpr,
)
from privot.audit.roc import (
    Advantage,
    ConfidenceInterval,
    RocCurve,
    bootstrap_mean_auc,
    compute_roc,
    estimate_advantage,
)
from privot.audit.verdict import Verdict, judge

__all__ = [
    "Advantage",
    "ConfidenceInterval",
    "EpsilonBound",
    "OperatingPoint",
    "OperatingPoints",
    "RocCurve",
    "Verdict",
    "audit_many_runs",
    "audit_one_run",
    "audit_one_run_gaussian",
    "bootstrap_mean_auc",
    "clopper_pearson_lower",
    "clopper_pearson_upper",
    "compute_gaussian_epsilon",
    "compute_roc",
    "estimate_advantage",
    "estimate_tpr_at_fpr",
    "judge",
]
