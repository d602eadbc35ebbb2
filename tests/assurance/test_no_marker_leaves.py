"""Only the release leaves: no marker is in a byte that a method or verb writes, prints or sends.

40 marks: the pixels of 16 records, 12 names of files, and 12 strings beside the pixels in these
files; for methods also the answers before their noise, the noise, and the states of critics.
What lies on the secret side by design is listed in OWNERS_OWN.
"""

import base64
import contextlib
import logging
import math
import os
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from assurance.capture_outputs import tap_outputs
from assurance.find_markers import Marks
from PIL import Image, PngImagePlugin
from support.tiny_settings import choose_tiny_settings

from privot.cli import main
from privot.cli.app import app
from privot.data import load_dataset
from privot.federated import Client, Server, Terms
from privot.local.privatize import build_image_channel, privatize
from privot.methods import list_methods, make_method
from privot.privacy import secret_side, shard_checkpoint
from privot.privacy.accounting import Neighbours
from privot.privacy.client_partition import client_partition
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget
from privot.runtime import Runtime, Streams
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")

SHAPE = (1, 8, 8)
CLASSES = 2
IMAGES_PER_CLASS = 12
OWNERS = 4
CPU = Runtime("cpu", 16)
OWNERS_OWN = {  # paths that are the owner's own, readable by nobody else, and not searched
    "wards": "the records themselves",
    "others": "records that were not used",
    "home": "ledgers, and the vault beside them while a run lasts",
    "set.attacks": "what attacks on sensitive records found",
    "worlds": "an audit's runs, with a digest of the records",
    "page-internal": "the owner's part of a report: records beside their nearest samples",
    "inverted": "images of records, and how well an attack got them back",
}
# The owner's part of a report while it is written, in a folder that only its owner can read.
UNFINISHED = "internal.html (shut)"
NOT_CALLED = {
    "demo": "has embedded, public records of its own",
    "federate simulate": "needs Flower; its owners, server and transcript are called here instead",
    "federate server": "as above",
    "federate client": "as above",
    "federate keys": "has no records",
}


@pytest.fixture(scope="module")
def records():
    """24 records, 16 of them marked.

    ``files``: {path: (levels [8, 8], comment or None)}; ``marks`` and ``words``: all marks, and
    those of names and strings alone.
    """
    rng = np.random.default_rng(40)
    levels = {}
    words = {}
    files = {}
    for number in range(CLASSES * IMAGES_PER_CLASS):
        pixels = rng.integers(20, 236, SHAPE[1:])
        token = rng.bytes(9).hex()
        name = f"scan-{number}.png"
        comment = None
        if number < 16:
            levels[f"record {number}"] = pixels
        if number < 12:
            name = f"{token}.png"
            words[f"file name {number}"] = token
            words[f"string {number}"] = comment = f"patient {token[::-1]}"
        files[f"{number % CLASSES}/{name}"] = (pixels, comment)
    assert len(levels) + len(words) == 40
    marks = Marks(levels, words=words)
    return types.SimpleNamespace(files=files, marks=marks, words=Marks(words=words))


def write_image(file, pixels, comment=None):
    file.parent.mkdir(parents=True, exist_ok=True)
    text = PngImagePlugin.PngInfo()
    if comment:
        text.add_text("Comment", comment)
    Image.fromarray(pixels.astype(np.uint8)).save(file, pnginfo=text)


@pytest.fixture
def root(tmp_path, monkeypatch, records):
    """A folder with the records in `wards`, others in `others`, and all temporary files inside."""
    rng = np.random.default_rng(41)
    for path, (pixels, comment) in records.files.items():
        write_image(tmp_path / "wards" / path, pixels, comment)
        name = f"{len(path)}{rng.bytes(4).hex()}.png"
        write_image(tmp_path / "others" / path[:2] / name, rng.integers(20, 236, SHAPE[1:]))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def list_public_pieces(tap):
    """The pieces, each once, but for the owner's own paths."""
    return [
        (where, data)
        for where, data in dict.fromkeys(tap.pieces)
        if where.split("/")[0] not in OWNERS_OWN and not where.endswith(UNFINISHED)
    ]


def list_leaks(tap, marks):
    """(where, marks) of every piece that holds some."""
    pieces = [(where, sorted(marks.search(data))) for where, data in list_public_pieces(tap)]
    return [(where, names) for where, names in pieces if names]


def count_bytes(tap):
    return sum(len(data) for _, data in list_public_pieces(tap))


def load_wards_for(method):
    """The records with what must be declared for this method, and no more; and its plan."""
    for declared in ({}, {"public_size": True, "public_classes": True}, {"num_clients": OWNERS}):
        dataset = load_dataset("wards", **declared)
        try:
            plan = method.plan(dataset.spec)
        except Exception:
            continue
        needs_sizes = any(stage.operation == "sorted_blocks" for stage in plan.stages)
        if not needs_sizes or dataset.spec.class_sizes:
            return dataset, plan
    raise AssertionError(f"{method.name}: no way to declare the records")


@contextlib.contextmanager
def watch_secret_side():
    """{name: values} of answers before their noise, of the noise, and of states of critics."""
    values = {}
    add_noise = secret_side.add_noise
    write_shard_checkpoint = shard_checkpoint.write_shard_checkpoint

    def add_noise_watched(steps, noise_std, grid, secret):
        answer = add_noise(steps, noise_std, grid, secret)
        number = len(values)
        if number < 60:
            exact = steps * grid
            values[f"answer {number} without noise"] = exact.flatten()[:40].numpy()
            values[f"noise of answer {number}"] = (answer - exact).flatten()[:40].numpy()
        return answer

    def write_watched(file, state):
        for name, value in state.items():
            if value.is_floating_point() and len(values) < 200:
                values[f"state {name} {len(values)}"] = value[0].flatten()[:40].numpy()
        write_shard_checkpoint(file, state)

    with (
        mock.patch.object(secret_side, "add_noise", add_noise_watched),
        mock.patch.object(shard_checkpoint, "write_shard_checkpoint", write_watched),
    ):
        yield values


# Methods


@pytest.mark.parametrize("name", sorted(list_methods()))
def test_methods_let_no_mark_out(name, root, records, trust):
    method = make_method(name, choose_tiny_settings(name))
    dataset, plan = load_wards_for(method)
    is_local = plan.neighbours is Neighbours.LOCAL
    budget = 5.0 if plan.stages else math.inf
    if getattr(method, "noise_multiplier", None) is not None or is_local:
        budget = None
    with tap_outputs(root) as tap, watch_secret_side() as values:
        if is_local:
            whole = load_dataset("wards", public_size=True)
            channel = build_image_channel(whole.spec, "laplace", 40.0, labels_epsilon=5.0)
            dataset = privatize(whole, channel, out=root / "sent.safetensors")
        more = {"runtime": CPU, "progress": lambda *args, **more: None}
        synthesize(dataset, method, budget, out=root / "release", **more)
    # A method without a mechanism may release records: only names and strings are sought.
    is_open = not plan.stages and not is_local
    leaks = list_leaks(tap, records.words if is_open else records.marks)
    assert leaks == [], f"{name} let marks of the secret side out"
    if plan.stages:
        assert values
        assert list_leaks(tap, Marks(values=values)) == [], f"{name} let exact answers out"
    assert tap.sent == tap.elsewhere == []
    assert count_bytes(tap) > 1000
    what = "24 marks (names and strings: records may be released)" if is_open else "40 marks"
    note = f"{name}: {what} in {count_bytes(tap):,} bytes"
    trust("R1", "marks of the secret side found outside", 0, note=note)
    trust("R1", "methods and verbs searched", 1, of=1)


def test_the_wire_of_a_federation(root, records, trust):
    """Owners, server and transcript of `federate simulate`, each owner with its own folder."""
    settings = {**choose_tiny_settings("federated-gs-wgan"), "noise_multiplier": 8.0}
    method = make_method("federated-gs-wgan", settings)
    spec = load_dataset("wards", num_clients=OWNERS).spec
    terms = Terms("ab" * 16, method, spec.shape, spec.num_classes, OWNERS)
    home = root / "home"
    with tap_outputs(root) as tap, watch_secret_side() as values:
        whole = load_dataset("wards", num_clients=OWNERS)
        order_ledger = Ledger(home / "wards.jsonl")
        owners = {}
        for index in range(OWNERS):
            name = f"ward {index}"
            ledger = Ledger(home / f"{name}.jsonl")
            part = client_partition(whole, index, order_ledger)
            owners[name] = Client(part, Budget(100.0), ledger, root / "traces" / name, CPU)
        server = Server(terms, list(owners), Streams(0, CPU), root / "server", root / "wire")
        for name, offer in server.pack_offers().items():
            server.receive_consent(name, owners[name].reply(offer))
        while not server.is_finished:
            for name, request in server.pack_requests().items():
                server.receive(name, owners[name].reply(request))
            server.end_round()
        server.build_release().save(root / "release")
    assert not server.offenses
    assert list_leaks(tap, records.marks) == list_leaks(tap, Marks(values=values)) == []
    size = sum(len(data) for where, data in tap.pieces if where == "wire")
    assert size > 10_000
    note = f"a federation: 40 marks in {size:,} bytes on the wire"
    trust("R1", "marks of the secret side found outside", 0, note=note)


# Verbs


def call(words):
    """`privot WORDS` in this process: its exit code."""
    with mock.patch.object(sys, "argv", ["privot", *words.split()]):
        try:
            main()
        except SystemExit as stop:
            return stop.code or 0
    return 0


def choose_method(name):
    """Words of the command line: a method, and its tiny settings without the noise."""
    settings = choose_tiny_settings(name)
    settings.pop("noise_multiplier", None)
    return " ".join(f"--set {key}={value}" for key, value in settings.items())


SAMPLED = "--test wards --only sliced --count 8"
VERBS = [  # in an order in which each has the files it needs
    "methods",
    "attacks",
    "cite merf",
    "plan wards --shape 1x8x8 --classes 2 --epsilon 5",
    "plan wards --shape 1x8x8 --classes 2 --epsilon 5 --json",
    f"synthesize wards --out set --method private-set {choose_method('private-set')} --epsilon 5 --device cpu",
    f"synthesize wards --out net --method merf {choose_method('merf')} --epsilon 5 --device cpu",
    "verify set",
    "verify set --json",
    "resize set --images-per-class 3 --out larger",
    "sample net --count 20 --out samples.npz",
    "sample set --count 4 --out samples.png",
    f"measure set {SAMPLED} --out home/readings.json",
    f"compare set larger {SAMPLED} --out comparison",
    "attack nearest-pixels set --members wards --nonmembers others",
    f"audit merf --data wards --folder worlds --runs 4 --epsilon 5 {choose_method('merf')}",
    "report set --out page",
    "report set --out page --internal --data wards --results home/readings.json",
    "invert --data wards --images 2 --checked 0 --steps 2 --resize 32 --out inverted",
    "privatize wards --out sent.safetensors --epsilon 40 --labels-epsilon 5",
    "verify sent.safetensors",
    "verify sent.safetensors --json",
    f"synthesize sent.safetensors --out local --method entropic-gan {choose_method('entropic-gan')} --device cpu",
    "ledger wards",
    "ledger wards --json",
]


def list_verbs(typer, before=""):
    """Every verb that the command line has."""
    for command in typer.registered_commands:
        yield before + (command.name or command.callback.__name__)
    for group in typer.registered_groups:
        yield from list_verbs(group.typer_instance, f"{before}{group.name} ")


def test_every_verb_is_called():
    called = {words.split()[0] for words in VERBS}
    assert set(list_verbs(app)) == called | set(NOT_CALLED)


def test_verbs_let_no_mark_out(root, records, trust):
    size = 0
    codes = {}
    before = set()
    for words in VERBS:
        with tap_outputs(root) as tap:
            codes[words] = call(words)
        # Files of earlier verbs were searched then.
        tap.pieces = [piece for piece in tap.pieces if piece not in before]
        before |= set(tap.pieces)
        assert list_leaks(tap, records.marks) == [], f"privot {words[:30]} let marks out"
        assert not tap.sent, f"privot {words[:30]} used the network"
        cache = str(Path.home() / ".cache")
        assert not [path for path in tap.elsewhere if not path.startswith(cache)], words
        size += count_bytes(tap)
    assert [words for words, code in codes.items() if code] == [], "a verb failed"
    assert size > 100_000
    note = f"{len(VERBS)} calls of verbs: 40 marks in {size:,} bytes"
    trust("R1", "marks of the secret side found outside", 0, note=note)
    called = len({words.split()[0] for words in VERBS})
    trust("R1", "methods and verbs searched", called, of=called)


def test_an_error_names_no_record(root, records, trust):
    """Unreadable files and bad requests: refused in a line that says nothing of the records."""
    first = sorted(Path("wards/0").iterdir())[0]
    calls = ["plan wards", "synthesize wards --epsilon 5 --shape 1x9x9"]
    calls.append("synthesize wards --method merv")
    with tap_outputs(root) as tap:
        assert set(map(call, calls)) == {2}
    assert list_leaks(tap, records.marks) == []
    first.write_bytes(first.read_bytes()[:60])
    with tap_outputs(root) as tap:
        assert call("synthesize wards --epsilon 5") == 2
    for where, marks in list_leaks(tap, records.marks):
        assert where == "printed", "the owner's terminal alone may have the name of a file"
        assert all(mark.startswith("file name") for mark in marks)
    note = "errors: 28 marks, pixels and strings, in four refusals"
    trust("R1", "marks of the secret side found outside", 0, note=note)


# The control: what leaks is found


def encode_base64(data):
    return base64.b64encode(data).decode()


def make_levels(image):
    return (image * 255).round().byte().numpy()


def save_image(image, root):
    Image.fromarray(make_levels(image)[0, 0]).save(root / "shown.png")


def write_page(image, root):
    save_image(image, root)
    encoded = encode_base64((root / "shown.png").read_bytes())
    (root / "shown.png").write_bytes(b"")
    (root / "page.html").write_text(f'<img src="data:image/png;base64,{encoded}">')


def write_and_delete(image, root):
    (root / "tmp" / "part").write_bytes(image.numpy().tobytes())
    (root / "tmp" / "part").unlink()


def write_and_overwrite(image, root):
    (root / "tmp" / "part").write_bytes(image.numpy().tobytes())
    (root / "tmp" / "part").write_bytes(b"nothing")


def log_pixels(image, root):
    logging.getLogger("canary").debug("pixels %s", image.flatten()[:9].tolist())


def warn_of_pixels(image, root):
    warnings.warn(f"odd pixels {image.flatten()[:9].double().tolist()}", stacklevel=1)


def write_middle(image, root):
    (root / "cache").write_bytes((2 * image - 1).flatten()[20:31].numpy().tobytes())


LEAKS = {
    "print of values": lambda image, root: print(image.flatten()[:8].tolist()),
    "print of a tensor": lambda image, root: print(image),
    "print of bytes in hex": lambda image, root: print(make_levels(image).tobytes().hex()),
    "base64 on the error stream": lambda image, root: print(
        encode_base64(image.numpy().tobytes()), file=sys.stderr
    ),
    "below Python's streams": lambda image, root: os.write(2, image.numpy().tobytes()),
    "a debug line": log_pixels,
    "a warning": warn_of_pixels,
    "float64 in a file": lambda image, root: (root / "cache").write_bytes(
        image.double().numpy().tobytes()
    ),
    "the middle of it in [-1, 1]": write_middle,
    "an archive": lambda image, root: np.savez_compressed(root / "cache.npz", x=image.numpy()),
    "an image file": save_image,
    "a page with an image": write_page,
    "a file that is gone again": write_and_delete,
    "a file that was overwritten": write_and_overwrite,
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_found(leak, root, records, trust):
    image = load_dataset("wards")._read_records(slice(0, 1)).images
    with tap_outputs(root) as tap:
        LEAKS[leak](image, root)
    marks = {mark for _, marks in list_leaks(tap, records.marks) for mark in marks}
    assert any(mark.startswith("record") for mark in marks), f"{leak}: the search is blind to it"
    trust("R1", "planted leaks found", 1, of=1)


@pytest.mark.parametrize("kind", ["file name", "string"])
def test_a_planted_word_is_found(kind, root, records):
    path, (_, comment) = next(iter(records.files.items()))
    word = Path(path).stem if kind == "file name" else comment
    for leak in (
        lambda: print(f"reading {word} now"),
        lambda: (root / f"{word}.txt").write_text("1"),
        lambda: print(word.encode().hex()),
    ):
        with tap_outputs(root) as tap:
            leak()
        assert list_leaks(tap, records.marks), f"a {kind} goes out unnoticed"
        for file in root.glob("*.txt"):
            file.unlink()


def test_an_answer_without_its_noise_is_found(root):
    """Also when it is written in float32."""
    method = make_method("merf", choose_tiny_settings("merf"))
    with tap_outputs(root) as tap, watch_secret_side() as values:
        synthesize(load_wards_for(method)[0], method, None, out=root / "release", runtime=CPU)
        name = next(name for name in values if name.startswith("answer"))
        (root / "dump").write_bytes(values[name].astype(np.float32).tobytes())
    assert ("dump", [name]) in list_leaks(tap, Marks(values=values))
