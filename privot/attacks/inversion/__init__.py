"""Gradient inversion: attacks that reconstruct training images from a shared model update.

`check_leakage` tests one update of your own model, `invert` runs one named attack on a `Problem`,
and `compute_cramer_rao_bound` says how well the best attack can do. Use these attacks on your own
records only: reconstructions are as secret as the records.
"""

from privot.attacks.inversion.attacks import INVERSION_ATTACKS, InversionAttack, invert
from privot.attacks.inversion.cramer_rao import CramerRaoBound, compute_cramer_rao_bound
from privot.attacks.inversion.leakage_check import check_leakage
from privot.attacks.inversion.leakage_result import LeakageCheck
from privot.attacks.inversion.problem import Problem, Reconstruction, compute_victim_gradients
from privot.attacks.inversion.problem_checks import check_update
from privot.attacks.inversion.scoring import ReconstructionScores, score_reconstruction

__all__ = [
    "INVERSION_ATTACKS",
    "CramerRaoBound",
    "InversionAttack",
    "LeakageCheck",
    "Problem",
    "Reconstruction",
    "ReconstructionScores",
    "check_leakage",
    "check_update",
    "compute_cramer_rao_bound",
    "compute_victim_gradients",
    "invert",
    "score_reconstruction",
]
