"""Plant a bug in a function of the package, in a child process, and see which test notices.

A bug is a change of source text: what it replaces must be in the function exactly once, so that a bug whose place has changed is an error
and not a silent survivor. The new code goes into the very function object, so that every name by which it is known has it.
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
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLIPS = (
    "NameError",
    "SyntaxError",
    "AttributeError",
    "TypeError",
    "ImportError",
    "UnboundLocalError",
)  # of a bug's author


class Misplaced(Exception):
    """The text that a bug replaces is not in its function, or not once."""


@dataclass(frozen=True)
class Bug:
    """``old`` becomes ``new`` in ``place`` ("module:function", "module:Class.method" or "module:CONSTANT"); ``killers`` are node ids."""

    group: str
    name: str
    place: str
    old: str
    new: str
    killers: tuple[str, ...]

    def __str__(self):
        return f"{self.group}: {self.name}"


def found(place):
    """(module, the object or None for a constant, its source) of a bug's place."""
    name, path = place.split(":")
    module = importlib.import_module(name)
    thing = functools.reduce(
        lambda owner, part: inspect.getattr_static(owner, part), path.split("."), module
    )
    while not inspect.isfunction(thing) and any(
        hasattr(thing, each) for each in ("__func__", "__wrapped__", "fget")
    ):
        thing = next(
            getattr(thing, each)
            for each in ("__func__", "__wrapped__", "fget")
            if hasattr(thing, each)
        )
    if inspect.isfunction(thing):
        return module, thing, textwrap.dedent(inspect.getsource(thing))
    text = inspect.getsource(module)
    node = next(
        each
        for each in ast.parse(text).body
        if isinstance(each, (ast.Assign, ast.AnnAssign)) and _target(each) == path
    )
    return module, None, ast.get_source_segment(text, node)


def _target(node):
    return ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def changed(bug):
    """The source with the bug in it."""
    source = found(bug.place)[2]
    if source.count(bug.old) != 1:
        raise Misplaced(
            f"{bug}: {bug.old!r} is {source.count(bug.old)} times in {bug.place}: plant it anew"
        )
    return source.replace(bug.old, bug.new)


def plant(bug):
    """Put the bug into this process, for good."""
    module, function, _ = found(bug.place)
    replace(module, function, bug.place.split(":")[1], changed(bug))


def replace(module, function, path, source):
    """Give a function, or a constant that is a dictionary, the value that another source has in its module."""
    space = dict(vars(module)) if function is None else dict(function.__globals__)
    exec(
        compile("from __future__ import annotations\n" + source, f"<planted in {path}>", "exec"),
        space,
    )
    if function is None:
        old = vars(module)[path]
        new = space[path]
        if isinstance(old, dict):
            old.clear()
            old.update(new)
        else:
            setattr(module, path, new)
    else:
        new = space[path.split(".")[-1]]
        while not inspect.isfunction(new):
            new = next(
                getattr(new, each)
                for each in ("__func__", "__wrapped__", "fget")
                if hasattr(new, each)
            )
        function.__code__ = new.__code__
        function.__defaults__ = new.__defaults__
        function.__kwdefaults__ = new.__kwdefaults__
    for each in list(sys.modules.values()):  # what was computed before must not hide it
        if getattr(each, "__name__", "").startswith("privot"):
            for value in list(vars(each).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


class Witness:
    """A plugin that remembers which test failed first, and how."""

    def __init__(self):
        self.killer = ""
        self.kind = ""
        self.why = ""
        self.passed = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed and not self.killer:
            self.killer = item.nodeid
            self.kind = call.excinfo.type.__name__
            self.why = str(call.excinfo.value).split("\n")[0][:200]
        self.passed += report.passed and report.when == "call"
        return report


def trial(tests, prepare=lambda: None, seconds=120):
    """Run tests in a child of this process, after ``prepare()`` there, to the first failure.

    {code: pytest's own, or 70 and 71 if it came to no end; killer, kind, why: of the failure; passed; said; seconds}
    """
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            code = 70
            try:
                for number in (1, 2):
                    os.dup2(said.fileno(), number)
                result = _tried(tests, prepare, seconds)
                told.write(json.dumps(result).encode())
                told.flush()
                code = 0
            except BaseException as error:
                told.write(
                    json.dumps(
                        {
                            "code": 70,
                            "killer": "",
                            "kind": type(error).__name__,
                            "why": str(error),
                            "passed": 0,
                        }
                    ).encode()
                )
                told.flush()
            finally:
                os._exit(code)  # nothing of the parent's is cleaned up twice
        used = os.wait4(child, 0)[2]
        told.seek(0)
        said.seek(0)
        heard = told.read()
        more = {
            "said": said.read()[-2000:].decode(errors="replace"),
            "seconds": used.ru_utime + used.ru_stime,
        }
        return {
            "code": 71,
            "killer": "",
            "kind": "",
            "why": "it died",
            "passed": 0,
            **(json.loads(heard) if heard else {}),
            **more,
        }


def _tried(tests, prepare, seconds):
    import torch

    resource.setrlimit(
        resource.RLIMIT_AS, (8 << 30, 8 << 30)
    )  # a changed number may ask for all there is
    gc.freeze()  # what the parent has is not looked through again
    torch.set_num_threads(1)  # threads do not survive a fork
    for name in [name for name in os.environ if name.startswith("PYTEST_")] + ["PRIVOT_TRUST"]:
        os.environ.pop(name, None)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
    os.chdir(ROOT)
    prepare()
    witness = Witness()
    unused = (
        "xdist",
        "cov",
        "cacheprovider",
        "playwright",
        "doctest",
        "faulthandler",
        "unraisableexception",
        "threadexception",
    )
    words = [
        "-x",
        "-q",
        "--tb=no",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
        "-o",
        "addopts=",
        f"--timeout={seconds}",
    ]
    code = pytest.main(
        [*words, *(word for each in unused for word in ("-p", f"no:{each}")), *tests],
        plugins=[witness],
    )
    sys.stdout.flush()
    sys.stderr.flush()
    return {
        "code": int(code),
        "killer": witness.killer,
        "kind": witness.kind,
        "why": witness.why,
        "passed": witness.passed,
    }
