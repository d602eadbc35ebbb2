"""Plant a bug in a function of the package, in a child process, and see which test notices.

A bug is a change of source text. The text it replaces must be in the function exactly once, so a
bug whose function has changed is an error and no silent survivor. The new code goes into the
function object itself, so every name of the function has it.
"""

import ast
import functools
import gc
import importlib
import inspect
import json
import os
import resource
import sys
import tempfile
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRAPPED = ("__func__", "__wrapped__", "fget")
UNUSED_PLUGINS = (
    "xdist cov cacheprovider playwright doctest faulthandler unraisableexception threadexception"
)


class Misplaced(Exception):
    """The text that a bug replaces is not in its function, or not once."""


@dataclass(frozen=True)
class Bug:
    """``old`` becomes ``new`` in ``target``; ``killers`` are node ids of tests that must notice.

    A target is "module:function", "module:Class.method" or "module:CONSTANT".
    """

    group: str
    name: str
    target: str
    old: str
    new: str
    killers: tuple[str, ...]

    def __str__(self):
        return f"{self.group}: {self.name}"


def load_bugs():
    entries = tomllib.loads(Path(__file__).with_name("planted_bugs.toml").read_text())["bug"]
    for entry in entries:
        entry["target"] = f"privot.privacy.{entry['target']}"
        entry["killers"] = (entry.pop("killer"),)
    return [Bug(**entry) for entry in entries]


def unwrap(thing):
    """The function behind a method, a property or a decorated function; a constant stays."""
    while not inspect.isfunction(thing):
        inner = [getattr(thing, name) for name in WRAPPED if hasattr(thing, name)]
        if not inner:
            break
        thing = inner[0]
    return thing


def locate(target):
    """(module, the function or None for a constant, its source) of a bug's target."""
    name, path = target.split(":")
    module = importlib.import_module(name)
    thing = unwrap(functools.reduce(inspect.getattr_static, path.split("."), module))
    if inspect.isfunction(thing):
        return module, thing, textwrap.dedent(inspect.getsource(thing))
    text = inspect.getsource(module)
    for node in ast.parse(text).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        is_assignment = isinstance(node, (ast.Assign, ast.AnnAssign))
        if is_assignment and ast.unparse(targets[0]) == path:
            return module, None, ast.get_source_segment(text, node)
    raise Misplaced(f"{target} has no source")


def changed(bug):
    """The source with the bug in it."""
    source = locate(bug.target)[2]
    if (count := source.count(bug.old)) != 1:
        raise Misplaced(f"{bug}: {bug.old!r} is {count} times in {bug.target}: plant it anew")
    return source.replace(bug.old, bug.new)


def plant(bug):
    """Put the bug into this process, for good."""
    module, function, _ = locate(bug.target)
    path = bug.target.split(":")[1]
    space = dict(vars(module) if function is None else function.__globals__)
    source = "from __future__ import annotations\n" + changed(bug)
    exec(compile(source, f"<planted in {path}>", "exec"), space)
    new = space[path.split(".")[-1]]
    if function is not None:
        new = unwrap(new)
        function.__code__ = new.__code__
        function.__defaults__ = new.__defaults__
        function.__kwdefaults__ = new.__kwdefaults__
    elif isinstance(old := vars(module)[path], dict):
        old.clear()
        old.update(new)
    else:
        setattr(module, path, new)
    for other in list(sys.modules.values()):  # what was computed before must not hide it
        if getattr(other, "__name__", "").startswith("privot"):
            for value in list(vars(other).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


class Witness:
    """A plugin that remembers which test failed first, and how."""

    def __init__(self):
        self.report = {"killer": "", "kind": "", "why": "", "passed": 0}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed and not self.report["killer"]:
            why = str(call.excinfo.value).split("\n")[0][:200]
            kind = call.excinfo.type.__name__
            self.report |= {"killer": item.nodeid, "kind": kind, "why": why}
        self.report["passed"] += report.passed and report.when == "call"
        return report


def run_in_child(tests, prepare=lambda: None, seconds=120):
    """Run tests in a child of this process, after ``prepare()`` there, to the first failure.

    {code: pytest's own, 70 if the child could not start or 71 if it died; killer, kind, why: of
    the failure; passed; output}
    """
    with tempfile.TemporaryFile() as report, tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            try:
                for number in (1, 2):
                    os.dup2(output.fileno(), number)
                try:
                    result = run_pytest(tests, prepare, seconds)
                except BaseException as error:
                    result = {"code": 70, "kind": type(error).__name__, "why": str(error)}
                report.write(json.dumps(result).encode())
                report.flush()
            finally:
                os._exit(0)  # nothing of the parent's is cleaned up twice
        os.waitpid(child, 0)
        report.seek(0)
        output.seek(0)
        result = {"code": 71, "killer": "", "kind": "", "why": "it died", "passed": 0}
        result |= json.loads(report.read() or "{}")
        return result | {"output": output.read()[-2000:].decode(errors="replace")}


def run_pytest(tests, prepare, seconds):
    import torch

    limit = 8 << 30  # a changed number may ask for all the memory of the machine
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    gc.freeze()  # what the parent has is not looked through again
    torch.set_num_threads(1)  # threads do not survive a fork
    for name in [name for name in os.environ if name.startswith("PYTEST_")] + ["PRIVOT_TRUST"]:
        os.environ.pop(name, None)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
    os.chdir(ROOT)
    prepare()
    witness = Witness()
    words = ["-x", "-q", "--tb=no", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    words += ["-o", "addopts=", f"--timeout={seconds}"]
    words += [word for plugin in UNUSED_PLUGINS.split() for word in ("-p", f"no:{plugin}")]
    code = pytest.main([*words, *tests], plugins=[witness])
    sys.stdout.flush()
    sys.stderr.flush()
    return {"code": int(code), **witness.report}
