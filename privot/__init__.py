"""Privot: private synthetic data by optimal transport. Only values with noise leave the data.

The names below are the public interface. Each is loaded at its first use, so that ``import privot``
and ``privot --help`` do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from privot.attacks.membership.runner import run_attack
    from privot.audit.runner import EpsilonAudit
    from privot.data import Public, Sensitive, Spec
    from privot.errors import PrivotError, PrivotWarning
    from privot.local.dataset import PrivatizedDataset
    from privot.local.privatize import build_image_channel, privatize
    from privot.measures.evaluator import Evaluator, measure
    from privot.measures.samples import Samples
    from privot.methods import list_methods, make_method
    from privot.privacy.guarantee import Guarantee, NoGuarantee
    from privot.privacy.ledger import Ledger
    from privot.privacy.plan import AttackPowerTarget, Budget
    from privot.release import Release
    from privot.release.verify import verify
    from privot.report import write_report
    from privot.runtime import Runtime
    from privot.synthesis.inputs import load
    from privot.synthesis.pipeline import synthesize
    from privot.synthesis.preflight import plan_run
    from privot.synthesis.resize import resize

__version__ = "0.1.0"

__all__ = [
    "AttackPowerTarget",
    "Budget",
    "EpsilonAudit",
    "Evaluator",
    "Guarantee",
    "Ledger",
    "NoGuarantee",
    "PrivatizedDataset",
    "PrivotError",
    "PrivotWarning",
    "Public",
    "Release",
    "Runtime",
    "Samples",
    "Sensitive",
    "Spec",
    "build_image_channel",
    "list_methods",
    "load",
    "make_method",
    "measure",
    "plan_run",
    "privatize",
    "resize",
    "run_attack",
    "synthesize",
    "verify",
    "write_report",
]

_MODULES = {  # where each public name is defined
    "AttackPowerTarget": "privot.privacy.plan",
    "Budget": "privot.privacy.plan",
    "EpsilonAudit": "privot.audit.runner",
    "Evaluator": "privot.measures.evaluator",
    "Guarantee": "privot.privacy.guarantee",
    "Ledger": "privot.privacy.ledger",
    "NoGuarantee": "privot.privacy.guarantee",
    "PrivatizedDataset": "privot.local.dataset",
    "PrivotError": "privot.errors",
    "PrivotWarning": "privot.errors",
    "Public": "privot.data",
    "Release": "privot.release",
    "Runtime": "privot.runtime",
    "Samples": "privot.measures.samples",
    "Sensitive": "privot.data",
    "Spec": "privot.data",
    "build_image_channel": "privot.local.privatize",
    "list_methods": "privot.methods",
    "load": "privot.synthesis.inputs",
    "make_method": "privot.methods",
    "measure": "privot.measures.evaluator",
    "plan_run": "privot.synthesis.preflight",
    "privatize": "privot.local.privatize",
    "resize": "privot.synthesis",
    "run_attack": "privot.attacks.membership.runner",
    "synthesize": "privot.synthesis",
    "verify": "privot.release.verify",
    "write_report": "privot.report",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'privot' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, whether they were used already or not."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
