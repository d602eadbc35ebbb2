"""Scores to statements: rates with bounds, lower bounds on epsilon with their ceilings, and the verdict against the certificate.

Pure statistics, no data: a score is higher for a likelier member. What they prove about sensitive records is itself secret, so every
result says whether it is ``publishable``, and is not unless the caller says so.
"""

from privot.audit.many_runs import Bound, gaussian_epsilon, many_runs
from privot.audit.one_run import one_run, one_run_gaussian
from privot.audit.operating_points import Point, Points, least, most, tpr_at
from privot.audit.roc import Advantage, Curve, Interval, advantage, mean_auc, roc
from privot.audit.verdict import Verdict, judge

__all__ = [
    "Advantage",
    "Bound",
    "Curve",
    "Interval",
    "Point",
    "Points",
    "Verdict",
    "advantage",
    "gaussian_epsilon",
    "judge",
    "least",
    "many_runs",
    "mean_auc",
    "most",
    "one_run",
    "one_run_gaussian",
    "roc",
    "tpr_at",
]
