"""Only the release leaves: 40 marks on the secret side are in no byte that any method or verb writes, prints, logs or sends.

Marks are the pixels of 16 records, 12 names of files, and 12 strings that lie beside the pixels in these files; for methods besides the
answers before their noise, the noise, and what critics have learned. What lies on the secret side by design is listed in OWNERS_OWN.
"""

import base64
import logging
import math
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from assurance.capture_outputs import tapped
from assurance.find_markers import Marks
from PIL import Image, PngImagePlugin
from support.tiny_settings import choose_tiny_settings

from privot.cli import main
from privot.cli.app import app
from privot.data import load_dataset
from privot.federated import Client, Server, Terms
from privot.local.privatize import build_image_channel, privatize
from privot.methods import list_methods, make_method
from privot.privacy import secret_side as secret_side_module
from privot.privacy import shard_checkpoint
from privot.privacy.accounting import Neighbours
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget
from privot.runtime import Runtime, Streams
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")

SHAPE = (1, 8, 8)
CLASSES = 2
EACH = 12
OWNERS = 4
CPU = Runtime("cpu", 16)
OWNERS_OWN = {  # places that are the owner's own, readable by nobody else, and not searched
    "wards": "the records themselves",
    "others": "records that were not used",
    "home": "ledgers, and the vault beside them while a run lasts",
    "set.attacks": "what attacks on sensitive records found",
    "worlds": "an audit's runs, with a digest of the records",
    "page-internal": "the owner's face of a report, which shows records beside their nearest samples",
    "inverted": "pictures of records, and how well an attack got them back",
}
MADE_READY = "internal.html (shut)"  # the same face while it is written, in a folder that only its owner can read
NO_NEED = {  # verbs that are not called here
    "demo": "has embedded, public records of its own",
    "federate simulate": "needs Flower; its owners, server and wire record are called in this process instead",
    "federate server": "as above",
    "federate client": "as above",
    "federate keys": "has no records",
}


@pytest.fixture(scope="module")
def marked():
    """24 records, 16 of them marked: {path: (levels [8, 8], string or none)}, and the marks."""
    rng = np.random.default_rng(40)
    levels = {}
    words = {}
    files = {}
    for number in range(CLASSES * EACH):
        pixels = rng.integers(20, 236, SHAPE[1:])
        token = rng.bytes(9).hex()
        name = f"scan-{number}.png"
        beside = None
        if number < 16:
            levels[f"record {number}"] = pixels
        if number < 12:
            words[f"file name {number}"] = name = f"{token}.png"
            words[f"string {number}"] = beside = f"patient {token[::-1]}"
        files[f"{number % CLASSES}/{name}"] = (pixels, beside)
    words = {name: text.removesuffix(".png") for name, text in words.items()}
    assert len(levels) + len(words) == 40
    return files, Marks(levels, words=words), Marks(words=words)


@pytest.fixture
def root(tmp_path, monkeypatch, marked):
    """A folder with the records in `wards`, others in `others`, and all temporary files inside."""
    rng = np.random.default_rng(41)
    for path, (pixels, beside) in marked[0].items():
        for folder, shown in (("wards", pixels), ("others", rng.integers(20, 236, SHAPE[1:]))):
            file = (
                tmp_path / folder / path
                if folder == "wards"
                else tmp_path / folder / path[:2] / f"{len(path)}{rng.bytes(4).hex()}.png"
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            text = PngImagePlugin.PngInfo()
            if beside and folder == "wards":
                text.add_text("Comment", beside)
            Image.fromarray(shown.astype(np.uint8)).save(file, pnginfo=text)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def public(tap):
    """The pieces, each once, but for the owner's own places."""
    return [
        each
        for each in dict.fromkeys(tap.pieces)
        if each[0].split("/")[0] not in OWNERS_OWN and not each[0].endswith(MADE_READY)
    ]


def leaked(tap, marks):
    """(where, marks) of every piece that holds some."""
    found = [(where, sorted(marks.found(data))) for where, data in public(tap)]
    return [each for each in found if each[1]]


def written(tap):
    return sum(len(data) for _, data in public(tap))


def box_for(method, folder="wards"):
    """The records with what must be declared for this method, and no more."""
    for declared in ({}, {"public_size": True, "public_classes": True}, {"num_clients": OWNERS}):
        box = load_dataset(folder, **declared)
        try:
            plan = method.plan(box.spec)
        except Exception:
            continue
        if (
            not any(stage.operation == "sorted_blocks" for stage in plan.stages)
            or box.spec.class_sizes
        ):
            return box, plan
    raise AssertionError(f"{method.name}: no way to declare the records")


class Inner:
    """What exists on the secret side alone, while a method runs: answers before their noise, the noise, states that critics come to."""

    def __init__(self):
        self.values = {}

    def __enter__(self):
        noisy = secret_side_module.add_noise
        write = shard_checkpoint.write_shard_checkpoint

        def heard(steps, noise_std, grid, secret):
            value = noisy(steps, noise_std, grid, secret)
            number = len(self.values)
            if number < 60:
                self.values[f"answer {number} without noise"] = (
                    (steps * grid).flatten()[:40].numpy()
                )
                self.values[f"noise of answer {number}"] = (
                    (value - steps * grid).flatten()[:40].numpy()
                )
            return value

        def stored(file, state):
            for name, value in state.items():
                if value.is_floating_point() and len(self.values) < 200:
                    self.values[f"state {name} {len(self.values)}"] = (
                        value[0].flatten()[:40].numpy()
                    )
            write(file, state)

        self._patches = [
            mock.patch.object(secret_side_module, "add_noise", heard),
            mock.patch.object(shard_checkpoint, "write_shard_checkpoint", stored),
        ]
        for patch in self._patches:
            patch.__enter__()
        return self

    def __exit__(self, *given):
        for patch in self._patches:
            patch.__exit__(*given)

    def marks(self):
        return Marks(values=self.values)


# Methods


@pytest.mark.parametrize("name", sorted(list_methods()))
def test_methods_let_no_mark_out(name, root, marked, trust):
    _, marks, words = marked
    method = make_method(name, choose_tiny_settings(name))
    box, plan = box_for(method)
    local = plan.neighbours is Neighbours.LOCAL
    with tapped(root) as tap, Inner() as inner:
        given = box
        budget = (
            None
            if getattr(method, "noise_multiplier", None) is not None or local
            else 5.0
            if plan.stages
            else math.inf
        )
        if local:
            whole = load_dataset("wards", public_size=True)
            given = privatize(
                whole,
                build_image_channel(whole.spec, "laplace", 40.0, labels_epsilon=5.0),
                out=root / "sent.safetensors",
            )
        synthesize(
            given,
            method,
            budget,
            out=root / "release",
            runtime=CPU,
            progress=lambda *given, **more: None,
        )
    # A method without a mechanism opens the gate, and what it releases may be made of records: of these only names and strings are sought.
    opened = not plan.stages and not local
    found = leaked(tap, words if opened else marks)
    assert found == [], f"{name} let marks of the secret side out"
    if plan.stages:
        assert inner.values
        assert leaked(tap, inner.marks()) == [], f"{name} let out what stands behind its answers"
    assert tap.sent == tap.elsewhere == []
    assert written(tap) > 1000
    what = f"{24 if opened else 40} marks{' (names and strings: its gate is open, records may be released)' if opened else ''}"
    trust(
        "R1",
        "marks of the secret side found outside",
        0,
        note=f"{name}: {what} in {written(tap):,} bytes",
    )
    trust("R1", "methods and verbs searched", 1, of=1)


def test_the_wire_of_a_federation(root, marked, trust):
    """Owners, server and record as of `federate simulate`, in one process; each owner's folder is its own."""
    _, marks, _ = marked
    settings = make_method(
        "federated-gs-wgan", {**choose_tiny_settings("federated-gs-wgan"), "noise_multiplier": 8.0}
    )
    spec = load_dataset("wards", num_clients=OWNERS).spec
    terms = Terms("ab" * 16, settings, spec.shape, spec.num_classes, OWNERS)
    from privot.privacy.client_partition import client_partition

    with tapped(root) as tap, Inner() as inner:
        whole = load_dataset("wards", num_clients=OWNERS)
        book = Ledger(root / "home" / "wards.jsonl")
        boxes = {f"ward {place}": client_partition(whole, place, book) for place in range(OWNERS)}
        owners = {
            name: Client(
                box,
                Budget(100.0),
                Ledger(root / "home" / f"{name}.jsonl"),
                root / "traces" / name,
                CPU,
            )
            for name, box in boxes.items()
        }
        server = Server(terms, list(owners), Streams(0, CPU), root / "server", root / "wire")
        for name, offer in server.pack_offers().items():
            server.receive_consent(name, owners[name].reply(offer))
        while not server.is_finished:
            for name, request in server.pack_requests().items():
                server.receive(name, owners[name].reply(request))
            server.end_round()
        server.build_release().save(root / "release")
    assert not server.offenses
    assert leaked(tap, marks) == leaked(tap, inner.marks()) == [], (
        "a mark went over the wire, or lies on the server"
    )
    size = sum(len(data) for where, data in tap.pieces if where == "wire")
    assert size > 10_000
    trust(
        "R1",
        "marks of the secret side found outside",
        0,
        note=f"a federation: 40 marks in {size:,} bytes on the wire",
    )


# Verbs


def call(*words):
    """`privot WORDS` in this process: its exit code."""
    with mock.patch.object(sys, "argv", ["privot", *map(str, words)]):
        try:
            main()
        except SystemExit as stop:
            return stop.code or 0
    return 0


def sets(name, **more):
    settings = {**choose_tiny_settings(name), **more}
    settings.pop("noise_multiplier", None)
    return tuple(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))


SYNTHESIZE = ("--epsilon", 5, "--device", "cpu")
VERBS = [  # in an order in which each finds what it needs
    ("methods",),
    ("attacks",),
    ("cite", "merf"),
    ("plan", "wards", "--shape", "1x8x8", "--classes", 2, "--epsilon", 5),
    (
        "synthesize",
        "wards",
        "--out",
        "set",
        "--method",
        "private-set",
        *sets("private-set"),
        *SYNTHESIZE,
    ),
    ("synthesize", "wards", "--out", "net", "--method", "merf", *sets("merf"), *SYNTHESIZE),
    ("verify", "set"),
    ("resize", "set", "--images-per-class", 3, "--out", "larger"),
    ("sample", "net", "--count", 20, "--out", "samples.npz"),
    ("sample", "set", "--count", 4, "--out", "samples.png"),
    (
        "measure",
        "set",
        "--test",
        "wards",
        "--only",
        "sliced",
        "--count",
        8,
        "--out",
        "home/readings.json",
    ),
    (
        "compare",
        "set",
        "larger",
        "--test",
        "wards",
        "--only",
        "sliced",
        "--count",
        8,
        "--out",
        "comparison",
    ),
    ("attack", "nearest-pixels", "set", "--members", "wards", "--nonmembers", "others"),
    (
        "audit",
        "merf",
        "--data",
        "wards",
        "--folder",
        "worlds",
        "--runs",
        4,
        "--epsilon",
        5,
        *sets("merf"),
    ),
    ("report", "set", "--out", "page"),
    (
        "report",
        "set",
        "--out",
        "page",
        "--internal",
        "--data",
        "wards",
        "--results",
        "home/readings.json",
    ),
    (
        "invert",
        "--data",
        "wards",
        "--images",
        2,
        "--checked",
        0,
        "--steps",
        2,
        "--resize",
        32,
        "--out",
        "inverted",
    ),
    ("privatize", "wards", "--out", "sent.safetensors", "--epsilon", 40, "--labels-epsilon", 5),
    ("verify", "sent.safetensors"),
    (
        "synthesize",
        "sent.safetensors",
        "--out",
        "local",
        "--method",
        "entropic-gan",
        *sets("entropic-gan"),
        "--device",
        "cpu",
    ),
    ("ledger", "wards"),
]


def names_of(typer, before=""):
    """Every verb that the command line has."""
    for each in typer.registered_commands:
        yield before + (each.name or each.callback.__name__)
    for group in typer.registered_groups:
        yield from names_of(group.typer_instance, f"{before}{group.name} ")


def test_every_verb_is_called():
    assert set(names_of(app)) == {each[0] for each in VERBS} | set(NO_NEED), (
        "a verb is neither called here nor said to need no call"
    )


def test_verbs_let_no_mark_out(root, marked, trust):
    _, marks, _ = marked
    size = 0
    ended = {}
    before = set()
    for words in VERBS:
        for more in ((), ("--json",)) if words[0] in ("plan", "verify", "ledger") else ((),):
            with tapped(root) as tap:
                ended[words] = call(*words, *more)
            tap.pieces = [
                each for each in tap.pieces if each not in before
            ]  # files of earlier verbs were searched then
            before |= set(tap.pieces)
            assert leaked(tap, marks) == [], f"privot {' '.join(map(str, words[:2]))} let marks out"
            assert not tap.sent, f"privot {words[0]} spoke to the net"
            assert not [
                each for each in tap.elsewhere if not each.startswith(str(Path.home() / ".cache"))
            ], words
            size += written(tap)
    assert [(words[:2], code) for words, code in ended.items() if code] == [], (
        "a verb failed, so it was not looked at"
    )
    assert size > 100_000
    trust(
        "R1",
        "marks of the secret side found outside",
        0,
        note=f"{len(VERBS)} calls of verbs: 40 marks in {size:,} bytes",
    )
    called = len({each[0] for each in VERBS})
    trust("R1", "methods and verbs searched", called, of=called)


def test_an_error_names_no_record(root, marked, trust):
    """Files that cannot be read, records out of range, a full ledger: refused in a line that says nothing of what lies in them."""
    _, marks, _ = marked
    damaged = sorted(Path("wards/0").iterdir())[0]
    tries = [
        ("plan", "wards"),
        ("synthesize", "wards", "--epsilon", 5, "--shape", "1x9x9"),
        ("synthesize", "wards", "--method", "merv"),
    ]
    with tapped(root) as tap:
        codes = [call(*each) for each in tries]
    assert set(codes) == {2}
    assert leaked(tap, marks) == []
    damaged.write_bytes(damaged.read_bytes()[:60])
    with tapped(root) as tap:
        assert call("synthesize", "wards", "--epsilon", 5) == 2
    named = {mark for _, some in leaked(tap, marks) for mark in some}
    assert not {each for each in named if not each.startswith("file name")}, (
        "pixels or strings of records are in an error"
    )
    assert {where for where, _ in leaked(tap, marks)} <= {"printed"}, (
        "a name of a file is told to its owner's terminal alone"
    )
    trust(
        "R1",
        "marks of the secret side found outside",
        0,
        note="errors: 28 marks, pixels and strings, in four refusals",
    )


# The control: what leaks is found


def first(box):
    return box._read_records(slice(0, 1)).images


WAYS = {
    "print of values": lambda image, root: print(image.flatten()[:8].tolist()),
    "print of a tensor": lambda image, root: print(image),
    "print of bytes in hex": lambda image, root: print(
        (image * 255).round().byte().numpy().tobytes().hex()
    ),
    "base64 on the error stream": lambda image, root: print(
        base64.b64encode(image.numpy().tobytes()).decode(), file=sys.stderr
    ),
    "below Python's streams": lambda image, root: os.write(2, image.numpy().tobytes()),
    "a debug line": lambda image, root: logging.getLogger("canary").debug(
        "pixels %s", image.flatten()[:9].tolist()
    ),
    "a warning": lambda image, root: warnings.warn(
        f"odd pixels {image.flatten()[:9].double().tolist()}", stacklevel=1
    ),
    "float64 in a file": lambda image, root: (root / "cache").write_bytes(
        image.double().numpy().tobytes()
    ),
    "the middle of it in [-1, 1]": lambda image, root: (root / "cache").write_bytes(
        (2 * image - 1).flatten()[20:31].numpy().tobytes()
    ),
    "an archive": lambda image, root: np.savez_compressed(root / "cache.npz", x=image.numpy()),
    "a picture": lambda image, root: Image.fromarray(
        (image[0, 0] * 255).round().byte().numpy()
    ).save(root / "shown.png"),
    "a page with a picture": lambda image, root: _page(image, root),
    "a file that is gone again": lambda image, root: _passing(image, root),
    "a file that was overwritten": lambda image, root: _overwritten(image, root),
}


def _page(image, root):
    WAYS["a picture"](image, root)
    coded = base64.b64encode((root / "shown.png").read_bytes()).decode()
    (root / "shown.png").write_bytes(b"")
    (root / "page.html").write_text(f'<img src="data:image/png;base64,{coded}">')


def _passing(image, root):
    (root / "tmp" / "part").write_bytes(image.numpy().tobytes())
    (root / "tmp" / "part").unlink()


def _overwritten(image, root):
    (root / "tmp" / "part").write_bytes(image.numpy().tobytes())
    (root / "tmp" / "part").write_bytes(b"nothing")


@pytest.mark.parametrize("way", WAYS)
def test_a_planted_leak_is_found(way, root, marked, trust):
    _, marks, _ = marked
    image = first(load_dataset("wards"))
    with tapped(root) as tap:
        WAYS[way](image, root)
    assert any(mark.startswith("record") for _, some in leaked(tap, marks) for mark in some), (
        f"{way}: the search is blind to it"
    )
    trust("R1", "planted leaks found", 1, of=1)


@pytest.mark.parametrize("kind", ["file name", "string"])
def test_a_planted_word_is_found(kind, root, marked):
    files, marks, _ = marked
    path, (_, beside) = next(iter(files.items()))
    word = Path(path).stem if kind == "file name" else beside
    for put in (
        lambda: print(f"reading {word} now"),
        lambda: (root / f"{word}.txt").write_text("1"),
        lambda: print(word.encode().hex()),
    ):
        with tapped(root) as tap:
            put()
        assert leaked(tap, marks), f"a {kind} is told and nobody hears"
        for each in root.glob("*.txt"):
            each.unlink()


def test_what_stands_behind_an_answer_is_found(root):
    """Also when it is written in float32."""
    method = make_method("merf", choose_tiny_settings("merf"))
    with tapped(root) as tap, Inner() as inner:
        synthesize(box_for(method)[0], method, None, out=root / "release", runtime=CPU)
        name = next(each for each in inner.values if each.startswith("answer"))
        (root / "dump").write_bytes(inner.values[name].astype(np.float32).tobytes())
    assert ("dump", [name]) in [(where, some) for where, some in leaked(tap, inner.marks())]
