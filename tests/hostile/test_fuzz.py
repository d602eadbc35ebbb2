"""Random settings and command lines: taken, or refused in one line, without side effects."""

import dataclasses
import json
import math
import pickle
import resource
import string
import time

import numpy as np
import pytest
import typer.main
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.syscall_watch import Hangs, hurried, watched
from support.tiny_settings import choose_tiny_settings

from privot.cli import app
from privot.cli.parsing import parse_settings
from privot.data.spec import Spec
from privot.errors import PrivotError
from privot.methods import list_methods, make_method
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")
ANY = {"suppress_health_check": list(HealthCheck)}
SPEC = Spec((1, 8, 8), 3, 60, (20, 20, 20))
GIB = 1 << 20  # in the system's units of 1,024 bytes


@pytest.mark.parametrize("code", ["pickle", "process", "write"])
def test_the_watch_sees_what_is_forbidden(code, tmp_path):
    """The control: a watch that sees nothing would find nothing."""

    class Bomb:
        def __reduce__(self):
            return math.sqrt, (2.0,)

    deeds = {
        "pickle": lambda: pickle.loads(pickle.dumps(Bomb())),
        "process": lambda: __import__("subprocess").run(["true"], check=False),
        "write": lambda: (tmp_path / "elsewhere").write_text(""),
    }
    (tmp_path / "target").mkdir()
    with watched(tmp_path / "target") as seen:
        (tmp_path / "target" / "x").write_text("")
        assert seen == []
        deeds[code]()
    assert seen


def test_a_hang_is_a_failure():
    with pytest.raises(Hangs), hurried(0.2):
        time.sleep(20)


@pytest.fixture
def bounded_memory():
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory <= GIB


# Settings

KEYS = sorted({field for name in list_methods() for field in choose_tiny_settings(name)})
NUMBERS = [0, -1, 2**63, -(2**63) - 1, 10**30, 10**400, 5e-324, 1e308, math.nan, math.inf, -0.0]
numbers = st.one_of(st.integers(), st.floats(), st.sampled_from(NUMBERS))
ODD = """|none|True|1e9999|0x10|1_000|۱۲|NaN|__import__('os')|../../etc|\x00|1,2,3|,,"""
texts = st.one_of(st.text(max_size=30), st.sampled_from([*ODD.split("|"), "a" * 5000]))
values = st.recursive(
    st.one_of(numbers, texts, st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
tables = st.dictionaries(st.one_of(st.sampled_from(KEYS), texts), values, max_size=4)
DEEP = [
    b"a=" + b"[" * 5000,
    b"a=" + b"{a=" * 5000,
    b"a." * 3000 + b"a=1",
    b"\xff\xfe",
    b"a=1\na=2",
    b"steps=9" * 3000,
    b"[[a]]\n" * 2000,
]


def format_toml(value):
    """A value as TOML has it, or nearly: JSON is close enough to fail at interesting points."""
    if isinstance(value, dict):
        rows = (f"{json.dumps(key)} = {format_toml(inner)}" for key, inner in value.items())
        return "{" + ", ".join(rows) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(format_toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def encode_table(table):
    rows = (f"{json.dumps(key)} = {format_toml(value)}" for key, value in table.items())
    return "\n".join(rows).encode("utf-8", "replace")


files = st.one_of(
    st.binary(max_size=200),
    st.text(alphabet=string.printable, max_size=200).map(str.encode),
    tables.map(encode_table),
    st.sampled_from(DEEP),
)


@st.composite
def settings_cases(draw):
    """A method, a file or none, and words: mostly own settings, so that values are looked at."""
    name = draw(st.sampled_from(sorted(list_methods())))
    own = st.sampled_from([field.name for field in dataclasses.fields(list_methods()[name])])
    words = []
    for _ in range(draw(st.integers(0, 2))):
        plain = draw(st.integers(0, 3))  # three of four are of a kind that many settings have
        value = draw(st.integers(1, 999)) if plain else draw(st.one_of(numbers, texts))
        words.append(f"{draw(own)}={value / 1000 if plain == 1 else value}")
    data = None
    if draw(st.integers(0, 3)) == 0:
        tables = st.dictionaries(own, values, max_size=2).map(encode_table)
        data = draw(st.one_of(tables, files))
    if draw(st.integers(0, 9)) == 0:
        words += draw(st.lists(texts, min_size=1, max_size=2))
    return name, data, words


@pytest.mark.parametrize("count", [150, pytest.param(14_850, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_any_settings_are_taken_or_refused(count, tmp_path, bounded_memory, trust):
    """From a file or from words, of any method, and then planned: nothing is written."""
    tried = []
    taken = []
    config = tmp_path / "config.toml"

    @settings(max_examples=count, **ANY)
    @given(settings_cases())
    def check(case):
        name, data, words = case
        config.write_bytes(data or b"")
        with watched(tmp_path / "nowhere") as seen, hurried():
            try:
                method = make_method(name, parse_settings(config if data else None, words))
                taken.append(method.plan(SPEC))
            except PrivotError:  # anything else would be a traceback
                pass
        assert seen == []
        tried.append(1)

    check()
    assert len(taken) > count // 50, "some must be taken, or the fuzzer tries too little"
    trust("D2", "random settings taken or refused in one line", len(tried), of=len(tried))


# Command lines

LONG_WORK = """
privot.synthesis.synthesize privot.synthesis.resize privot.cli.demo.run_demo
privot.local.privatize.privatize privot.attacks.membership.runner.run_attack
privot.attacks.membership.method_shadows.shadows_for_release
privot.attacks.membership.method_shadows.shadows_for_method
privot.cli.measure_outputs.measure_sources privot.cli.measure._measure_private_accuracy
privot.attacks.inversion.experiment.InversionExperiment.run privot.audit.runner.EpsilonAudit.run
privot.cli.invert_transcript.attack_transcript
"""  # by then all words have been read, and most files too
VERBS = [  # name and parameters; no verb of `federate`, since those listen and call
    (name, command.params)
    for name, command in typer.main.get_command(app).commands.items()
    if not hasattr(command, "commands")
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A folder with sound and unsound things to name."""
    root = tmp_path_factory.mktemp("stage")
    np.savez(root / "sound.npz", x=np.zeros((20, 8, 8), np.uint8), y=np.arange(20) % 2)
    (root / "broken.npz").write_bytes((root / "sound.npz").read_bytes()[:-90])
    few = {"num_features": 20, "steps": 2, "hidden_dim": 4}
    paths = {"out": root / "release", "ledger": root / "ledger.jsonl"}
    synthesize("digits", "merf", 5.0, settings=few, **paths)
    (root / "config.toml").write_text("num_features = 30\n")
    (root / "rubbish.json").write_text("[[")
    return root


@pytest.fixture
def no_work(monkeypatch):
    """Long work is refused when it begins."""

    def refuse(*_, **__):
        raise PrivotError("the work would begin")

    for path in LONG_WORK.split():
        monkeypatch.setattr(path, refuse)


PATHS = """sound.npz broken.npz release release/manifest.json ledger.jsonl config.toml rubbish.json
nothing . new/out digits"""
ODD_WORDS = """mnsit - /dev/null / ~ {x} [red] -- \udcff merf private-set lira 0 -1 1 1e-5 nan inf
1e400 0.05@0.01 1x8x8 8x x num_features=20 steps = cpu cuda:99"""
NAMED = [*PATHS.split(), ""]
THINGS = [*NAMED, *ODD_WORDS.split(), "a" * 300]
WORDS = st.one_of(st.sampled_from(THINGS), st.integers().map(str), st.floats().map(str), texts)
LIKELY = {  # so that more than the first option is looked at
    "float": st.sampled_from(["1", "0.5", "1e-5", "8", "0.95", "inf"]),
    "integer": st.sampled_from(["1", "2", "8", "64"]),
    "integer range": st.sampled_from(["1", "2", "8", "64"]),
    "path": st.sampled_from(NAMED),
    "text": st.sampled_from(NAMED),
}


@st.composite
def command_lines(draw):
    """`privot VERB ...` with options that it has, and now and then one that it has not."""
    (verb, params) = draw(st.sampled_from(VERBS))
    words = [verb]
    for param in params:
        is_argument = param.param_type_name == "argument"
        if is_argument or param.required or draw(st.integers(0, 4)) == 0:
            words += [] if is_argument else [param.opts[0]]
            if param.type.name != "boolean":
                likely = LIKELY.get(param.type.name, WORDS)
                words.append(draw(likely if draw(st.integers(0, 5)) else WORDS))
    if draw(st.integers(0, 5)) == 0:
        wrong = st.one_of(WORDS, st.sampled_from(["--help", "--", "-x", "--jsno", "--set"]))
        words.insert(draw(st.integers(0, len(words))), draw(wrong))
    return [word.replace("\0", "") for word in words]  # no system hands one over


@pytest.mark.parametrize("count", [60, pytest.param(6_940, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("no_work", "bounded_memory")
def test_any_command_line_is_obeyed_or_refused_in_one_line(
    count, privot, stage, tmp_path, monkeypatch, trust
):
    monkeypatch.setenv("PRIVOT_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nowhere"))
    for path in stage.iterdir():
        (tmp_path / path.name).symlink_to(path)
    codes = []

    @settings(max_examples=count, **ANY)
    @given(command_lines())
    @example(["methods"])  # obeyed; of random lines one in twelve is
    def check(words):
        with watched(tmp_path.parent) as seen, hurried():  # in it is all that can be named
            code, _, err = privot(*words)
        assert code in (0, 2, 3), (code, err)
        assert "Traceback" not in err
        if code == 2:
            [line] = [line for line in err.splitlines() if line.startswith("privot: ")]
            assert err.endswith(line + "\n"), err
            assert line.isprintable()
        assert seen == []
        codes.append(code)

    before = {path: path.read_bytes() for path in stage.rglob("*") if path.is_file()}
    check()
    for path, data in before.items():
        if path.suffix not in (".lock", ".head", ".jsonl"):
            assert path.read_bytes() == data, "what was only named was changed"
    assert codes.count(0) > count // 200, "some must be obeyed, or the fuzzer tries too little"
    assert 2 in codes
    trust("D2", "random command lines obeyed or refused in one line", len(codes), of=len(codes))
