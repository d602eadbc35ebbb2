"""Does this gradient leak the image? Attacks on one shared update, many victims as one computation.

`audit` answers for an update of a model of your own, `invert` runs one named attack on a `Problem`, and `certify` says how well the best
one can do. Everything here is the owner's own: reconstructions are as secret as the records.
"""

from privot.attacks.inversion.attacking import ATTACKS, Attack, invert
from privot.attacks.inversion.auditing import Audit, audit
from privot.attacks.inversion.certificate import Certificate, certify
from privot.attacks.inversion.judging import Judgement, judge
from privot.attacks.inversion.victims import Found, Problem, check, gradients

__all__ = [
    "ATTACKS", "Attack", "Audit", "Certificate", "Found", "Judgement", "Problem",
    "audit", "certify", "check", "gradients", "invert", "judge",
]  # fmt: skip
