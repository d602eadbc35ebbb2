"""Privot: private synthetic data by optimal transport. Code goes to the data; only sanitized values come back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from privot.data import Public, Sensitive, Spec
    from privot.errors import PrivotError, PrivotWarning
    from privot.local.dataset import Privatized
    from privot.local.privatize import channel_for, privatize
    from privot.methods import make, methods
    from privot.privacy.plan import Budget, Risk
    from privot.release import Guarantee, NoGuarantee, Release, verify
    from privot.synthesis import resize, synthesize
    from privot.synthesis.inputs import load

__version__ = "0.1.0"

_HOME = {
    "privot.data": ("Public", "Sensitive", "Spec"),
    "privot.synthesis.inputs": ("load",),
    "privot.local.dataset": ("Privatized",),
    "privot.errors": ("PrivotError", "PrivotWarning"),
    "privot.local.privatize": ("channel_for", "privatize"),
    "privot.methods": ("make", "methods"),
    "privot.privacy.plan": ("Budget", "Risk"),
    "privot.release": ("Guarantee", "NoGuarantee", "Release", "verify"),
    "privot.synthesis": ("resize", "synthesize"),
}
__all__ = [  # loaded on first use, so that `privot --help` does not wait for torch
    "Budget",
    "Guarantee",
    "NoGuarantee",
    "Privatized",
    "PrivotError",
    "PrivotWarning",
    "Public",
    "Release",
    "Risk",
    "Sensitive",
    "Spec",
    "channel_for",
    "load",
    "make",
    "methods",
    "privatize",
    "resize",
    "synthesize",
    "verify",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'privot' has no attribute {name!r}")
