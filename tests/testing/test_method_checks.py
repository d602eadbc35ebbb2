"""Every method passes every check, and every check can fail."""

import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from support.tiny_settings import AUDIT_SETTINGS, EXTRA_SETTINGS, NUM_CLASSES, SHAPE
from testing.miniatures import Means

import privot.baselines
import privot.methods
from privot.data.spec import Spec
from privot.errors import QueryError, ReleaseError, SettingError
from privot.methods import list_methods, make_method
from privot.synthesis.preflight import resolve_plan
from privot.testing import METHOD_CHECKS, check_method
from privot.testing.declaration_checks import HEADINGS

DOCS = Path(__file__).parents[2] / "docs" / "methods"
SLOW = ("neighbours", "devices", "resume")  # `test_neighbours.py` has a short form of the first

# Settings that take another path through a method.
OTHER_PATHS = {
    "sliced-flow": (
        {"mode": "records"},
        {"mode": "resampled", "sample_size": 12},
        {"space": "public"},
        {"space": "private"},
    ),
    "sliced-generator": (
        {"generator": "conv"},
        {"mode": "records"},
        {"space": "public"},
        {"space": "private"},
    ),
    "gs-wgan": ({"routing": "step"}, {"normalize_gradients": True}),
    "merf": ({"generator": "conv"},),
    "kernel-points": ({"zca": True}, {"init": "real"}),
    "distribution-matching": ({"init": "real"},),
    "entropic-gan": ({"loss": "nll"},),
}
# Names of files, where they are not the name of the method.
FILES = {
    "federated-average-gan": "fedavg_gan",
    "kernel-points": "kip",
    "merf": "dp_merf",
    "merf-ae": "dp_merf_ae",
    "real-subset": "random_subset",
}


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in METHOD_CHECKS
    ],
)
@pytest.mark.parametrize("name", list_methods())
def test_methods_pass(name, check):
    settings = EXTRA_SETTINGS.get(name)
    audit_settings = AUDIT_SETTINGS.get(name)
    check_method(list_methods()[name], settings, audit_settings=audit_settings, only=[check])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, settings) for name, paths in OTHER_PATHS.items() for settings in paths],
    ids=str,
)
def test_other_paths_keep_to_one_device(name, settings):
    settings = {**EXTRA_SETTINGS.get(name, {}), **settings}
    check_method(list_methods()[name], settings, only=["devices"])


def test_a_method_is_a_file_with_a_page():
    for package in (privot.methods, privot.baselines):
        files = {module.name for module in pkgutil.iter_modules(package.__path__)}
        methods = {
            FILES.get(name, name.replace("-", "_"))
            for name, method_class in list_methods().items()
            if method_class.__module__.startswith(package.__name__)
        }
        for file in files - methods:  # what baselines share
            assert not hasattr(importlib.import_module(f"{package.__name__}.{file}"), "METHOD")
        assert methods <= files
    assert all((DOCS / f"{name}.md").is_file() for name in list_methods())


def test_names_are_checked():
    with pytest.raises(SettingError, match="did you mean 'merf'"):
        make_method("mref")
    with pytest.raises(SettingError, match="did you mean 'num_features'"):
        make_method("merf", {"num_featuress": 1})
    with pytest.raises(SettingError):
        resolve_plan(Spec(SHAPE, NUM_CLASSES), make_method("merf"), None)
    with pytest.raises(SettingError, match="no check 'plans'"):
        check_method(Means, only=["plans"])


# Faulty methods


__doc__ += "\n".join(f"\n**{heading}** Text." for heading in HEADINGS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Complete(Means):
    """A miniature with all that a method declares."""

    noise_multiplier: float | None = None
    num_features: int = 3
    name: ClassVar[str] = "complete"
    title: ClassVar[str] = "Class means"
    trusted_party: ClassVar[str] = "the data owner"
    guarantee_summary: ClassVar[str] = "(epsilon, delta)"
    citation: ClassVar[str] = "@misc{means,\n  title = {M},\n  author = {A},\n  year = {2024},\n}"

    def __post_init__(self):
        noise_multiplier = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        if not noise_multiplier >= 0 or self.num_features < 1:
            raise SettingError("out of range")


def sum_less(self, gate, query=None):
    """Fewer queries than planned."""
    return torch.zeros(gate.spec.num_classes, gate.spec.num_features)


class Mixing(Complete):
    def release(self, gate, sums, leaked=0.0):
        return super().release(gate, sums, torch.ones(gate.spec.shape))


class Unrepeatable(Complete):
    def release(self, gate, sums, leaked=0.0):
        return super().release(gate, sums, torch.randn(gate.spec.shape))


class Reporting(Complete):
    def fit(self, gate, streams, progress):
        progress("training", 2, 1)
        return super().fit(gate, streams, progress)


class Leaking(Complete):
    def release(self, gate, sums, leaked=0.0):
        return super().release(gate, sums, gate._dataset._count_records() // 30)


class ReadingWhilePlanning(Complete):
    def plan(self, spec):
        Path(__file__).read_text()
        return super().plan(spec)


class NotFinite(Complete):
    def release(self, gate, sums, leaked=0.0):
        return super().release(gate, sums, torch.nan if gate.spec.class_sizes else 0.0)


class AcceptingAnything(Complete):
    def __post_init__(self):
        """Check nothing."""


class RandomOnResume(Complete):
    runs: ClassVar[list] = []

    def release(self, gate, sums, leaked=0.0):
        self.runs.append(1)
        return super().release(gate, sums, float(len(self.runs)))


FAULTY = {
    "declaration": (type("NoTitle", (Complete,), {"title": ""}), "title"),
    "settings": (AcceptingAnything, "is accepted"),
    "plan": (ReadingWhilePlanning, "touched a record or a file"),
    "release": (Reporting, "progress passes its end"),
    "declared-sizes": (NotFinite, "not finite"),
    "replay": (Unrepeatable, "another release"),
    "resume": (RandomOnResume, "the release differs"),
    "neighbours": (Leaking, "more than its query results"),
    "audit": (type("Silent", (Complete,), {"query_means": sum_less}), "fewer queries"),
    "devices": (Mixing, "CPU"),
}


# A run that breaks fails with the error of the run.
FAILURES = (AssertionError, ReleaseError, QueryError)


@pytest.mark.parametrize("check", METHOD_CHECKS)
def test_a_faulty_method_fails_its_check(check):
    assert check_method(Complete, only=[check]) == [check]
    faulty, problem = FAULTY[check]
    with pytest.raises(FAILURES, match=problem):
        check_method(faulty, only=[check])


def test_the_method_of_the_documentation_passes(tmp_path, monkeypatch):
    """The page is followed to the letter: its code is a file, and its check runs."""
    page = (DOCS.parent / "adding_a_method.md").read_text()
    method, check = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "class_means.py").write_text(method)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("class_means")
    exec(check, {"ClassMeans": module.METHOD})
