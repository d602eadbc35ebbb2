"""Does this gradient leak the image? Attacks on one shared update, many victims as one computation.

`audit` answers for an update of a model of your own, `invert` runs one named attack on a `Problem`, and `certify` says how well the best
one can do. Everything here is the owner's own: reconstructions are as secret as the records.
"""

from privot.attacks.inversion.attacks import ATTACKS, Attack, invert
from privot.attacks.inversion.cramer_rao import Certificate, certify
from privot.attacks.inversion.leakage_check import Audit, audit
from privot.attacks.inversion.problem import Found, Problem, check, gradients
from privot.attacks.inversion.scoring import Judgement, judge

__all__ = [
    "ATTACKS",
    "Attack",
    "Audit",
    "Certificate",
    "Found",
    "Judgement",
    "Problem",
    "audit",
    "certify",
    "check",
    "gradients",
    "invert",
    "judge",
]
