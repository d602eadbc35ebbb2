"""Random settings and random command lines: each is taken or refused in one line; none crashes, hangs, runs code or writes elsewhere."""

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
def test_the_watch_sees(code, tmp_path):
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


# Settings

KEYS = sorted({field for name in list_methods() for field in choose_tiny_settings(name)})
numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from(
        [0, -1, 2**63, -(2**63) - 1, 10**30, 10**400, 5e-324, 1e308, math.nan, math.inf, -0.0]
    ),
)
ODD = [
    "",
    "none",
    "True",
    "1e9999",
    "0x10",
    "1_000",
    "۱۲",
    "NaN",
    "__import__('os')",
    "../../etc",
    "\x00",
    "a" * 5000,
    "1,2,3",
    ",,",
]
texts = st.one_of(st.text(max_size=30), st.sampled_from(ODD))
values = st.recursive(
    st.one_of(numbers, texts, st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
tables = st.dictionaries(st.one_of(st.sampled_from(KEYS), texts), values, max_size=4)


def toml(value):
    """A value as TOML has it, or nearly: JSON is close enough to be refused at interesting places."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return (
            "nan"
            if math.isnan(value)
            else "inf"
            if value == math.inf
            else "-inf"
            if value == -math.inf
            else repr(value)
        )
    return json.dumps(value)


DEEP = [
    b"a=" + b"[" * 5000,
    b"a=" + b"{a=" * 5000,
    b"a." * 3000 + b"a=1",
    b"\xff\xfe",
    b"a=1\na=2",
    b"steps=9" * 3000,
    b"[[a]]\n" * 2000,
]


def written(table):
    return "\n".join(f"{json.dumps(key)} = {toml(each)}" for key, each in table.items()).encode(
        "utf-8", "replace"
    )


files = st.one_of(
    st.binary(max_size=200),
    st.text(alphabet=string.printable, max_size=200).map(str.encode),
    tables.map(written),
    st.sampled_from(DEEP),
)


@st.composite
def asked(draw):
    """A method, a file of settings or none, and words: of its own settings for the most part, so that values are looked at too."""
    name = draw(st.sampled_from(sorted(list_methods())))
    own = st.sampled_from([field.name for field in dataclasses.fields(list_methods()[name])])
    words = []
    for _ in range(draw(st.integers(0, 2))):
        plain = draw(st.integers(0, 3))  # three of four are of a kind that many settings have
        value = draw(st.integers(1, 999)) if plain else draw(st.one_of(numbers, texts))
        words.append(f"{draw(own)}={value / 1000 if plain == 1 else value}")
    data = (
        draw(st.one_of(st.dictionaries(own, values, max_size=2).map(written), files))
        if draw(st.integers(0, 3)) == 0
        else None
    )
    return (
        name,
        data,
        words
        + (draw(st.lists(texts, min_size=1, max_size=2)) if draw(st.integers(0, 9)) == 0 else []),
    )


@pytest.mark.parametrize("count", [300, pytest.param(14_700, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_any_settings_are_taken_or_refused(count, tmp_path, trust):
    """From a TOML file or from words, of any method, and then planned: no record is near, nothing is written."""
    tried = []
    taken = []
    config = tmp_path / "config.toml"

    @settings(max_examples=count, **ANY)
    @given(asked())
    def holds(one):
        name, data, words = one
        config.write_bytes(data or b"")
        with watched(tmp_path / "nowhere") as seen, hurried():
            try:
                method = make_method(name, parse_settings(config if data else None, words))
                taken.append(method.plan(SPEC))
            except PrivotError:  # anything else would be a traceback
                pass
        assert seen == []
        tried.append(1)

    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    holds()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory <= GIB
    assert len(taken) > count // 50, "some must be taken, or the fuzzer tries too little"
    trust("D2", "random settings taken or refused in one line", len(tried), of=len(tried))


# Command lines

QUIET = {  # where long work begins; by then all that was said has been read, and most files too
    "privot.synthesis.synthesize",
    "privot.synthesis.resize",
    "privot.cli.demo.run_demo",
    "privot.local.privatize.privatize",
    "privot.attacks.membership.runner.run_attack",
    "privot.attacks.membership.method_shadows.shadows_for_release",
    "privot.attacks.membership.method_shadows.shadows_for_method",
    "privot.cli.measure_outputs.measure_sources",
    "privot.cli.measure._measure_private_accuracy",
    "privot.attacks.inversion.experiment.InversionExperiment.run",
    "privot.audit.runner.EpsilonAudit.run",
    "privot.cli.invert_transcript.attack_transcript",
}


def verbs(command, said=()):
    """(words of the verb, its parameters); of `federate` no verb, since those listen and call."""
    for name, each in command.commands.items():
        if hasattr(each, "commands"):
            continue
        yield (*said, name), each.params


VERBS = list(verbs(typer.main.get_command(app)))


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A folder with sound and unsound things to name."""
    root = tmp_path_factory.mktemp("stage")
    np.savez(root / "sound.npz", x=np.zeros((20, 8, 8), np.uint8), y=np.arange(20) % 2)
    (root / "broken.npz").write_bytes((root / "sound.npz").read_bytes()[:-90])
    synthesize(
        "digits",
        "merf",
        5.0,
        settings={"num_features": 20, "steps": 2, "hidden_dim": 4},
        out=root / "release",
        ledger=root / "book.jsonl",
    )
    (root / "config.toml").write_text("num_features = 30\n")
    (root / "rubbish.json").write_text("[[")
    return root


@pytest.fixture
def no_work(monkeypatch):
    """Long work is refused when it begins."""

    def refused(*_, **__):
        raise PrivotError("the work would begin")

    for place in QUIET:
        monkeypatch.setattr(place, refused)


THINGS = [
    "sound.npz",
    "broken.npz",
    "release",
    "release/manifest.json",
    "book.jsonl",
    "config.toml",
    "rubbish.json",
    "nothing",
    ".",
    "",
    "new/out",
    "digits",
    "mnsit",
    "-",
    "/dev/null",
    "/",
    "~",
    "a" * 300,
    "{x}",
    "[red]",
    "--",
    "\udcff",
    "merf",
    "private-set",
    "lira",
    "0",
    "-1",
    "1",
    "1e-5",
    "nan",
    "inf",
    "1e400",
    "0.05@0.01",
    "1x8x8",
    "8x",
    "x",
    "num_features=20",
    "steps",
    "=",
    "cpu",
    "cuda:99",
]
WORDS = st.one_of(st.sampled_from(THINGS), st.integers().map(str), st.floats().map(str), texts)
LIKELY = {  # so that more than the first option is looked at
    "float": st.sampled_from(["1", "0.5", "1e-5", "8", "0.95", "inf"]),
    "integer": st.sampled_from(["1", "2", "8", "64"]),
    "integer range": st.sampled_from(["1", "2", "8", "64"]),
    "path": st.sampled_from(THINGS[:11]),
    "text": st.sampled_from(THINGS[:12]),
}


@st.composite
def lines(draw):
    """`privot VERB ...` with options that it has, and now and then one that it has not."""
    (verb, params) = draw(st.sampled_from(VERBS))
    said = [*verb]
    for each in params:
        if each.param_type_name == "argument" or each.required or draw(st.integers(0, 4)) == 0:
            said += [] if each.param_type_name == "argument" else [each.opts[0]]
            said += (
                []
                if each.type.name == "boolean"
                else [draw(LIKELY.get(each.type.name, WORDS) if draw(st.integers(0, 5)) else WORDS)]
            )
    if draw(st.integers(0, 5)) == 0:
        said.insert(
            draw(st.integers(0, len(said))),
            draw(st.one_of(WORDS, st.sampled_from(["--help", "--", "-x", "--jsno", "--set"]))),
        )
    return [each.replace("\0", "") for each in said]  # no system hands one over


@pytest.mark.parametrize("count", [100, pytest.param(6_900, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1200)
def test_any_command_line_is_obeyed_or_refused_in_one_line(
    count, privot, stage, no_work, tmp_path, monkeypatch, trust
):
    monkeypatch.setenv("PRIVOT_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nowhere"))
    for each in stage.iterdir():
        (tmp_path / each.name).symlink_to(each)
    ends = []

    @settings(max_examples=count, **ANY)
    @given(lines())
    @example(["methods"])  # obeyed; of random lines one in twelve is
    def holds(said):
        with (
            watched(tmp_path.parent) as seen,
            hurried(),
        ):  # in it lie what was named, and where that leads
            code, _, err = privot(*said)
        assert code in (0, 2, 3), (code, err)
        assert "Traceback" not in err
        if code == 2:
            [line] = [each for each in err.splitlines() if each.startswith("privot: ")]
            assert err.endswith(line + "\n"), err
            assert line.isprintable()
        assert seen == []
        ends.append(code)

    before = {path: path.read_bytes() for path in stage.rglob("*") if path.is_file()}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    holds()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory <= GIB
    changed = [
        path.name
        for path, data in before.items()
        if path.read_bytes() != data and path.suffix not in (".lock", ".head", ".jsonl")
    ]
    assert changed == [], "what was only named was changed"
    assert ends.count(0) > count // 200, "some must be obeyed, or the fuzzer tries too little"
    assert 2 in ends
    trust("D2", "random command lines obeyed or refused in one line", len(ends), of=len(ends))
