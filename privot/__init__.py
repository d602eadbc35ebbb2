"""Privot: private synthetic data by optimal transport. Code goes to the data; only sanitized values come back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from privot.data import Public, Sensitive, Spec, load
    from privot.errors import PrivotError
    from privot.methods import make, methods
    from privot.privacy.plan import Budget, Risk
    from privot.release import Guarantee, NoGuarantee, Release, verify
    from privot.synthesis import resize, synthesize

__version__ = "0.1.0"

_HOME = {
    "privot.data": ("Public", "Sensitive", "Spec", "load"),
    "privot.errors": ("PrivotError",),
    "privot.methods": ("make", "methods"),
    "privot.privacy.plan": ("Budget", "Risk"),
    "privot.release": ("Guarantee", "NoGuarantee", "Release", "verify"),
    "privot.synthesis": ("resize", "synthesize"),
}
__all__ = [  # loaded on first use, so that `privot --help` does not wait for torch
    "Budget", "Guarantee", "NoGuarantee", "PrivotError", "Public", "Release", "Risk", "Sensitive", "Spec", "load", "make", "methods",
    "resize", "synthesize", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'privot' has no attribute {name!r}")
