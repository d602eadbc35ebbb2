"""Hostile inputs to `privot synthesize`: one line that helps, exit code 2, nothing charged."""

import gzip
import io
import os
import random
import resource
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from support.corrupt_bytes import corrupt_bytes
from support.syscall_watch import hurried, watched

from privot.data import load_dataset
from privot.errors import DataError
from privot.methods.private_set import PrivateSet
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget

QUICK = [
    f"--set={name}=2"
    for name in ("images_per_class", "num_random_nets", "nets_per_round", "net_width", "steps")
] + ["--set=net_train_epochs=1"]
IMAGES = np.random.default_rng(0).integers(0, 256, (20, 8, 8)).astype(np.uint8)
LABELS = (np.arange(20) % 2).astype(np.uint8)
CHARGED = "digits --ledger ledger.jsonl"


# What files are made of: builders write into the current folder and return words of a command


def write(files, words):
    """Write a dict of path to its bytes, or to a function that creates it."""
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        content(path) if callable(content) else path.write_bytes(content)
    return words


def link_to(target, link=os.symlink):
    return lambda path: link(Path(target).absolute(), path)


def make_png(value=100, size=(8, 8), mode="L", form="PNG"):
    buffer = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value,) * 3).save(buffer, form)
    return buffer.getvalue()


def make_chunk(kind, data):
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


PNG = make_png()
LARGE_PNG = make_png(size=(9, 9))
JPEG = make_png(form="JPEG")


def claim_png(side):
    """A PNG whose header claims a square of this side."""
    head = make_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    return PNG[:8] + head + PNG[33:]


def save_photos(files):
    return write({f"photos/{name}": content for name, content in files.items()}, "photos")


def save_pair(content, name="1.png"):
    """A folder of two classes: a sound image, and another."""
    return save_photos({"b/1.png": PNG, f"a/{name}": content})


def save_npz(save=np.savez, **arrays):
    save("x.npz", **arrays)
    return "x.npz"


def save_labels(labels):
    return save_npz(x=IMAGES, y=labels)


def change(values, index, value):
    changed = values.copy()
    changed[index] = value
    return changed


def flip(data, index, mask=255):
    changed = bytearray(data)
    changed[index] ^= mask
    return bytes(changed)


def rewrite(source, edit):
    path = Path(source)
    path.write_bytes(edit(path.read_bytes()))
    return source


def make_npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def make_header(text, version=b"\x01\x00", length="<H"):
    return b"\x93NUMPY" + version + struct.pack(length, len(text)) + text


def make_shape_header(shape, kind=b"|u1"):
    return make_header(b"{'descr':'%s','fortran_order':False,'shape':%s}" % (kind, shape))


def save_zip(*parts, compression=zipfile.ZIP_STORED):
    """An .npz whose member x.npy holds these very bytes."""
    with zipfile.ZipFile("x.npz", "w", compression, compresslevel=1) as archive:
        archive.writestr("y.npy", make_npy(LABELS))
        with archive.open("x.npy", "w") as file:
            for part in parts:
                file.write(part)
    return "x.npz"


def claim_npz_size(data):
    start = data.rindex(b"PK\x01\x02") + 20  # the last entry of the directory is x.npy
    return data[:start] + struct.pack("<II", 2**32 - 2, 2**32 - 2) + data[start + 8 :]


def set_encrypted_flags(data):
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = data.find(mark)
        while start >= 0:
            data = flip(data, start + offset, 1)
            start = data.find(mark, start + 1)
    return data


def break_lzma_stream(data):
    start = data.rindex(b"x.npy", 0, data.index(b"PK\x01\x02")) + 20
    return data[:start] + bytes(range(40)) + data[start + 40 :]


def save_pickle():
    class Bomb:
        def __reduce__(self):
            return os.mkdir, ("executed",)

    return save_npz(x=np.array([Bomb()] * 20, object), y=LABELS)


def save_climbing_names():
    with zipfile.ZipFile("x.npz", "w") as archive:
        for name in ("../x.npy", "/x.npy", "../../y.npy", "a/../y.npy", "x.npy/", "..\\y.npy"):
            archive.writestr(name, make_npy(IMAGES))
    return "x.npz"


def make_idx(array, kind=8):
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, kind, array.ndim]) + sizes + array.tobytes()


def claim_idx(*sizes):
    return b"\0\0\x08\x03" + struct.pack(">3I", *sizes)


IDX = make_idx(IMAGES)
IDX_LABELS = make_idx(LABELS)
GZ = gzip.compress(IDX)


def save_idx(images, labels=IDX_LABELS, suffix=""):
    files = {f"t-labels-idx1-ubyte{suffix}": labels} if labels else {}
    name = f"t-images-idx3-ubyte{suffix}"
    return write({**files, name: images}, name)


def save_gz(images):
    return save_idx(images, gzip.compress(IDX_LABELS), ".gz")


def save_table(images, labels=LABELS, column="image"):
    parquet.write_table(pa.table({column: images, "label": labels}), "x.parquet")
    return "x.parquet"


def save_config(content):
    return write({"c.toml": content}, "digits --config c.toml")


FILES = {  # what the line must say, beside the name of the file: what writes such files
    "whole": [
        lambda: rewrite(save_labels(LABELS), lambda data: data[:-100]),
        lambda: save_zip(make_header(b"{'descr': (((("), bytes(64)),
        lambda: save_zip(make_header(b"{'shape':(" + b"1," * 500_000 + b")}", b"\x02\x00", "<I")),
        lambda: save_zip(make_header(b"__import__('os').mkdir('executed')"), bytes(64)),
        lambda: rewrite(save_labels(LABELS), set_encrypted_flags),
        lambda: rewrite(save_labels(LABELS), lambda data: flip(data, 300, 1)),
        lambda: rewrite(
            save_zip(make_npy(IMAGES), compression=zipfile.ZIP_LZMA), break_lzma_stream
        ),
        lambda: write({"x.npz": b""}, "x.npz"),
        lambda: save_gz(GZ[:-40]),
        lambda: save_gz(flip(GZ, -6)),
        lambda: save_idx(IDX, suffix=".gz"),
        lambda: save_idx(IDX[:7]),
        lambda: rewrite(save_table([PNG] * 20), lambda data: data[:-30]),
        lambda: write({"x.parquet": b"PAR1" + bytes(range(256)) * 4 + b"PAR1"}, "x.parquet"),
        lambda: write({"x.parquet": b""}, "x.parquet"),
    ],
    "labels": [
        lambda: save_labels(np.arange(20) % 2 - 1),
        lambda: save_labels(LABELS[:19]),
        lambda: save_npz(x=IMAGES[:0], y=LABELS[:0]),
        lambda: save_idx(IDX, make_idx(LABELS[:19])),
        lambda: save_idx(IDX, IDX),
    ],
    "1.png & whole": [
        lambda: save_pair(make_png(size=(64, 64))[:-60]),
        lambda: save_pair(b""),
        lambda: save_pair(claim_png(60_000)),
        lambda: save_pair(
            PNG[:33] + make_chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(10**8), 1)) + PNG[33:]
        ),
        lambda: save_pair(flip(PNG, 29)),
    ],
    "plain numbers": [
        lambda: save_npz(x=np.full((20, 8, 8), "a"), y=LABELS),
        lambda: save_npz(x=np.zeros((20, 8, 8), "B,B"), y=LABELS),
        lambda: save_npz(x=IMAGES * 1j, y=LABELS),
        lambda: save_zip(make_shape_header(b"(20L,8L,8L)", b"|O"), bytes(64)),
    ],
    "one integer per image is needed": [
        lambda: save_labels(LABELS + 0.5),
        lambda: save_table([PNG] * 20, ["cat", "dog"] * 10),
        lambda: save_table([PNG] * 20, [None, 0, 1, 0] * 5),
    ],
    "x and y": [
        lambda: save_npz(x=IMAGES),
        save_climbing_names,
        lambda: save_npz(data=IMAGES, target=LABELS),
    ],
    "class folders": [
        lambda: write({"photos": os.mkdir}, "photos"),
        lambda: save_photos({"1.png": PNG}),
        lambda: write({"x.npz": os.mkdir}, "x.npz"),
    ],
    "1.png & plain file": [
        lambda: save_pair(os.mkdir),
        lambda: save_pair(os.mkfifo),
        lambda: save_pair(link_to("photos/a/1.png")),
    ],
    "c.toml & TOML": [
        lambda: save_config(b"steps = = 3"),
        lambda: save_config(b"steps = \xff\xfe"),
        lambda: save_config(os.mkdir),
    ],
    "out & already exists": [
        lambda: write({"out": os.mkdir}, "digits"),
        lambda: write({"out": b"mine"}, "digits"),
        lambda: write({"out": link_to("none")}, "digits"),
    ],
    "different shapes & resize": [
        lambda: save_pair(LARGE_PNG),
        lambda: save_table([PNG, LARGE_PNG] * 10),
    ],
    "1.png & PNG or JPEG": [
        lambda: save_pair(b"no image"),
        lambda: save_pair(make_png(form="GIF")),
    ],
    "1.png & links": [
        lambda: save_photos({"../other.png": PNG, "b/1.png": PNG, "a/1.png": link_to("other.png")}),
        lambda: save_pair(link_to("photos/b/1.png")),
    ],
    "photos/a & links": [
        lambda: save_photos({"../other/1.png": PNG, "b/1.png": PNG, "a": link_to("other")}),
        lambda: save_photos({"b/1.png": PNG, "c/1.png": PNG, "a": link_to("photos/b")}),
    ],
    "x.npy & more than the file can hold": [
        lambda: save_zip(
            make_shape_header(b"(20,4096,3500)"),
            *[bytes(1 << 20)] * 280,
            compression=zipfile.ZIP_DEFLATED,
        ),
        lambda: rewrite(save_zip(make_npy(IMAGES)), claim_npz_size),
    ],
    "shorter or longer": [
        lambda: save_zip(make_shape_header(b"(99999999999,99999,99999)"), bytes(64)),
        lambda: save_zip(make_npy(IMAGES), b"more"),
    ],
    "more than the file can hold": [
        lambda: save_gz(gzip.compress(claim_idx(*[2**32 - 1] * 3))),
        lambda: save_idx(claim_idx(2**32 - 1, 28, 28) + bytes(99)),
    ],
    "not an IDX file": [lambda: save_idx(b"\x89PNG" + IDX), lambda: save_idx(b"")],
    "record 3 & repair": [lambda: save_npz(x=change(IMAGES / 255, (3, 0, 0), np.nan), y=LABELS)],
    "record 19 & repair": [
        lambda: save_npz(x=change((IMAGES / 255).astype("f"), 19, -np.inf), y=LABELS)
    ],
    "0 to 1 & Divide them by 255": [lambda: save_npz(x=IMAGES * 1.0, y=LABELS)],
    "x.npz & --repair & another scale & Divide them by 255": [
        lambda: save_npz(x=IMAGES * 1.0, y=LABELS) + " --repair"
    ],
    "int16 & uint8": [lambda: save_npz(x=IMAGES.astype(np.int16), y=LABELS)],
    "x.npz & labels & 0 to 1": [lambda: save_labels(np.arange(20) % 3) + " --classes 2"],
    "classes": [lambda: save_labels(np.full(20, -1))],
    "labels & labels.argmax(1)": [lambda: save_labels(np.eye(20, dtype=int))],
    "classes=9223372036854775808": [
        lambda: save_labels(change(np.zeros(20, np.uint64), 7, 2**63 - 1))
    ],
    "class 1 has no records": [lambda: save_labels(LABELS * 2)],
    "x.npz & 8 & 9 & declared": [lambda: save_labels(LABELS) + " --shape 1x9x9"],
    "shape [20, 64]": [lambda: save_npz(x=IMAGES.reshape(20, 64), y=LABELS)],
    "channels": [lambda: save_npz(x=np.zeros((20, 5, 8, 8), "B"), y=LABELS)],
    "4096": [lambda: save_npz(x=np.zeros((2, 5000, 1), "B"), y=LABELS[:2])],
    "x.npz & classes=0": [lambda: save_labels(LABELS) + " --classes 0"],
    "different shapes": [lambda: save_pair(make_png(mode="RGB"))],
    "photos/a & no PNG or JPEG": [lambda: save_pair(b"later", "read.txt")],
    "1.jpg & whole": [lambda: save_pair(JPEG[:300], "1.jpg")],
    "1.png & 10000x10000 & 4096": [lambda: save_pair(claim_png(10_000))],  # Pillow only warns of it
    "1.jpg & PNG or JPEG": [lambda: save_pair(make_png(form="TIFF"), "1.jpg")],
    "2.png & 1.png & hard link": [lambda: save_pair(link_to("photos/b/1.png", os.link), "2.png")],
    "photos/Cat & cat & differ only in case": [
        lambda: save_photos({"Cat/1.png": PNG, "cat/1.png": PNG})
    ],
    "photos/01 & 1 & leading zeros": [lambda: save_photos({"1/1.png": PNG, "01/1.png": PNG})],
    "photos/a/1.PNG & 1.png & differ only in case": [
        lambda: save_photos({"a/1.PNG": PNG, "a/1.png": PNG, "b/1.png": PNG})
    ],
    "2.png & beside the class folders": [
        lambda: save_photos({"a/1.png": PNG, "b/1.png": PNG, "2.png": PNG})
    ],
    "object & plain numbers": [save_pickle],
    "x.npy": [lambda: save_zip(make_shape_header(b"(-20,8,8)"), bytes(1280))],
    "no such file": [lambda: write({"x.npz": os.mkfifo}, "x.npz")],
    "not an IDX file of bytes": [lambda: save_idx(make_idx(IMAGES.astype(">f4"), 13))],
    "longer": [lambda: save_idx(IDX + b"!")],
    "t-labels-idx1-ubyte & beside": [lambda: save_idx(IDX, None)],
    "no column 'image' & photo": [lambda: save_table([PNG] * 20, column="photo")],
    "x.parquet & no column 'colour' & label": [lambda: save_table([PNG] * 20) + " --label colour"],
    "row 19 & NoneType": [lambda: save_table([PNG] * 19 + [None])],
    "row 2 & PNG or JPEG": [lambda: save_table([PNG] * 2 + [b"\x89PNG" + b"?" * 50] + [PNG] * 17)],
    "row 0 & str & bytes": [lambda: write({"secret.png": PNG}, save_table(["secret.png"] * 20))],
    "no images": [lambda: save_table(pa.array([], pa.binary()), LABELS[:0])],
    "unknown format & .npz": [lambda: write({"data.csv": b"1,2,3\n"}, "data.csv")],
    "aaaa & no such file": [lambda: "a" * 5000],
    "delta=0.5 & 0.001 & --allow-large-delta": [
        lambda: save_labels(LABELS) + " --epsilon 1 --delta 0.5"
    ],
    "delta=0.2 & 1/20 & --allow-large-delta": [
        lambda: save_labels(LABELS) + " --epsilon 1 --delta 0.2 --public-size"
    ],
    "'stepz' & did you mean 'steps'": [lambda: save_config(b"stepz = 3")],
    "private-set.budget_shares & tuple": [lambda: save_config(b"budget_shares = [[1], {}]")],
    "resize=0 & 4096": [lambda: save_pair(PNG) + " --resize 0"],
    "resize=1000000 & 4096": [lambda: save_pair(PNG) + " --resize 1000000"],
    "resize=16 & x.npz": [lambda: save_labels(LABELS) + " --resize 16"],
    "--shape '8x8' & 1x28x28": [lambda: save_labels(LABELS) + " --shape 8x8"],
    "classes=1000000 & 100000": [lambda: save_labels(LABELS) + " --classes 1000000"],
    "file": [lambda: write({"file": b"mine"}, "digits --out file/out")],
    "out.run & --resume": [lambda: write({"out.run/run.json": b"{}"}, "digits")],
    "out.run & other settings": [
        lambda: write({"out.run/run.json": b'{"method": "merf"}'}, "digits --resume")
    ],
    "run.json & Remove": [lambda: write({"out.run/run.json": b"\0{"}, "digits --resume")],
    "ledger.jsonl": [lambda: write({"ledger.jsonl": os.mkdir}, CHARGED)],
    "file & --ledger": [lambda: write({"file": b"mine"}, "digits --ledger file/ledger.jsonl")],
    "ledger.jsonl & line 1 & backup": [lambda: write({"ledger.jsonl": b"hello\n"}, CHARGED)],
    "epsilon 0.5 & ledger": [
        lambda: write({"ledger.jsonl": lambda path: Ledger(path).set_limit(Budget(0.5))}, CHARGED)
    ],
}
WORDS = {  # words: what the line must say
    "nothing.npz": "nothing.npz & no such file & built-in",
    "mnsit": "mnsit & did you mean 'mnist'",
    "svhn": "svhn & put & PRIVOT_DATA",
    "digits --epsilon 0": "epsilon=0 & above 0",
    "digits --epsilon -1": "epsilon=-1 & above 0",
    "digits --epsilon nan": "epsilon=nan & above 0",
    "digits --epsilon much": "--epsilon & is not a valid",
    "digits --epsilon 1 --delta 0": "delta=0 & 1e-5",
    "digits --epsilon 1 --delta 1": "delta=1 & 1e-5",
    "digits --epsilon 1 --delta 2": "delta=2 & 1e-5",
    "digits --epsilon 1 --delta nan": "delta=nan & 1e-5",
    "digits --max-tpr 0.05": "max-tpr '0.05' & 0.05@0.01",
    "digits --max-tpr a@b": "max-tpr 'a@b' & 0.05@0.01",
    "digits --max-tpr 0.01@0.05": "max-tpr & <",
    "digits --max-tpr 0.05@0.01 --epsilon 1": "--epsilon & --max-tpr & not both",
    "digits --delta 1e-6": "--epsilon & --max-tpr",
    "digits --epsilon 1 --set noise_multiplier=3": "budget & noise & not both",
    "digits --epsilon 1e-300 --delta 1e-300": "epsilon",
    "digits --method murf": "'murf' & did you mean 'merf'",
    "digits --set learning_rates=10": "'learning_rates' & did you mean 'learning_rate'",
    "digits --set steps=many": "private-set.steps='many' & int",
    "digits --set steps=0": "private-set.steps=0 & Choose a value of at least 1",
    "digits --set steps": "--set & key=value",
    "digits --config c.toml": "c.toml & TOML",
    "digits --shape 1x28x28": "digits & 1x8x8 & 10 classes",
    "digits --sett steps=3": "--sett & --help",
    "digits --seed -1": "--seed & --help",
    "digits --device cuda:77": "device='cuda:77' & cpu",
    "digits --device abacus": "device='abacus' & cpu",
}
CASES = {words: (words, needles) for words, needles in WORDS.items()} | {
    f"{needles} {number}": (make, needles)
    for needles, makers in FILES.items()
    for number, make in enumerate(makers)
}


def list_files(root):
    """Every file, link and folder with its content, but for locks and folders of ledgers."""
    files = {}
    for path in root.rglob("*"):
        is_file = path.is_file() and not path.is_symlink()
        is_home = "home" in path.relative_to(root).parts
        if path.suffix != ".lock" and (is_file or not is_home):
            files[str(path)] = path.read_bytes() if is_file else path.is_dir()
    return files


def prepare_case(name):
    """The whole command, with a budget, a quick run and --out, and what it must answer."""
    make, needles = CASES[name]
    words = (make() if callable(make) else make).split()
    needles = needles.split(" & ")
    if len(words) == 1 and os.path.exists(words[0]):
        needles.append(words[0])
    if not {"--epsilon", "--max-tpr", "--delta"} & {*words}:
        words += ["--epsilon", "1"]
    if "--set" not in words:
        words += QUICK  # where a case is not refused, it fails quickly
    if "--out" not in words:
        words += ["--out", "out"]
    return ["synthesize", *words], needles


def check_refused(code, out, err, needles):
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1, err
    assert err.startswith("privot: "), err
    assert [needle for needle in needles if needle not in err] == [], err


def check_caution_and_refusal(result, needles):
    """Cautions may come before the last line."""
    code, out, err = result
    check_refused(code, out, err.splitlines(keepends=True)[-1], needles)


@pytest.fixture
def no_data(monkeypatch, tmp_path):
    monkeypatch.setenv("PRIVOT_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nowhere"))


# Refused as it should be, but OUT.run is made before the ledger is opened, and stays.
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("name", CASES)
def test_wrong_input_is_refused_in_one_line(name, privot, tmp_path, trust):
    words, needles = prepare_case(name)
    before = list_files(tmp_path)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with watched(tmp_path) as seen, hurried():
        result = privot(*words)
    assert time.process_time() - start <= 5  # of this process alone: others may be busy
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory <= 1 << 20  # KiB, so 1 GiB
    check_refused(*result, needles)
    assert list_files(tmp_path) == before, "a release, a rest, a file executed, or a ledger line"
    assert seen == [], "code was run, or something written elsewhere"
    kind = "crafted files" if before else "wrong words"
    trust("D1", f"{kind} refused in one line", 1, of=1)


def test_there_are_sixty_crafted_files():
    assert sum(callable(make) for make, _ in CASES.values()) >= 60


SOUND = {
    "npz": lambda: save_labels(LABELS),
    "packed npz": lambda: save_npz(np.savez_compressed, x=IMAGES, y=LABELS),
    "idx": lambda: save_idx(IDX),
    "gz": lambda: save_gz(GZ),
    "parquet": lambda: save_table([PNG, make_png(7)] * 10),
    "png": lambda: save_pair(PNG),
    "jpeg": lambda: save_pair(JPEG, "1.jpg"),
}


@pytest.mark.parametrize("count", [60, pytest.param(3940, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SOUND)
@pytest.mark.filterwarnings("ignore")
def test_a_mutated_file_is_read_or_refused(name, count, tmp_path, monkeypatch, trust):
    """A dataset or a DataError, nothing else, no code, no other file."""
    monkeypatch.chdir(tmp_path)
    generator = random.Random(f"{name} {count}")
    source = Path(SOUND[name]())
    assert load_dataset(source).spec.num_classes == 2
    [file] = [source] if source.is_file() else (source / "a").iterdir()
    sound = file.read_bytes()
    refused = 0
    for _ in range(count):
        file.write_bytes(corrupt_bytes(sound, generator))
        with watched(tmp_path / "nowhere") as seen, hurried():
            try:
                load_dataset(source)
            except DataError:
                refused += 1
        assert seen == []
    assert refused > count // 10
    trust("D2", "mutated data files read or refused in one line", count, of=count)


BOMB = "1.png & 10000x10000 & 4096 0"


@pytest.mark.parametrize(
    "name", ["digits --epsilon much", pytest.param(BOMB, marks=pytest.mark.slow)]
)
def test_refusals_hold_in_a_separate_process(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "home"))
    words, needles = prepare_case(name)
    command = [sys.executable, "-c", "from privot.cli import main; main()", *words]
    before = list_files(tmp_path)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    check_refused(ended.returncode, ended.stdout, ended.stderr, needles)
    assert list_files(tmp_path) == before


NAMES = [
    "with space",
    "ünïcödé-数据",
    "[red]x[bold]",
    "[link=file:]x",
    ":smile:",
    "two\nlines",
    "a\rprivot: done",
    "\x1b[31mred\x1b[0m",
    "tab\there",
    "\u202egnp",
    "%s{0}{name}",
    "-dash",
    "\udcff",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_file_neither_breaks_nor_styles_the_line(name, privot, tmp_path):
    (tmp_path / name).mkdir()
    source = Path(save_labels(np.arange(20) % 2 - 1)).rename(tmp_path / name / "x.npz")
    code, out, err = privot("synthesize", source, "--epsilon", 1, "--out", "out")
    check_refused(code, out, err, ["labels"])
    assert err[:-1].isprintable()
    assert "".join(char if char.isprintable() else repr(char)[1:-1] for char in name) in err


@pytest.mark.parametrize("name", NAMES[2::3])
def test_the_name_of_the_data_neither_breaks_nor_styles_a_table(name, privot, tmp_path):
    words = ("plan", tmp_path / name, "--epsilon", 1, "--shape", "1x8x8", "--classes", 2)
    code, out, err = privot(*words)
    assert (code, err.count("\n")) == (2, 1)
    (tmp_path / name).mkdir()
    code, out, err = privot(*words)
    assert code == 0
    assert all(line.isprintable() for line in out.splitlines())


def test_a_delta_that_is_too_large_is_a_caution_and_the_run_goes_on(privot, tmp_path):
    words = ("synthesize", "digits", "--epsilon", 5, "--delta", 1e-3)
    code, _, err = privot(*words, *QUICK, "--out", "out")
    assert code == 0
    [caution] = [line for line in err.splitlines() if "delta" in line]
    assert caution.startswith("warning: delta 0.001")
    assert (tmp_path / "out" / "manifest.json").exists()


def test_an_interrupted_run_is_charged_once_and_resumes_only_as_itself(
    privot, tmp_path, monkeypatch
):
    words = ("synthesize", *CHARGED.split(), "--epsilon", 5, *QUICK, "--out", "out")

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PrivateSet, "_compute_soft_labels", interrupt)
        code, _, err = privot(*words)
    assert code == 130
    assert "charged" in err.splitlines()[-1]
    assert "--resume" in err.splitlines()[-1]
    before = list_files(tmp_path)
    changes = ([], ["--resume", "--seed", 1], ["--resume", "--set", "net_width=8"])
    for wrong in (*changes, ["--resume", "--delta", 1e-6]):
        check_caution_and_refusal(privot(*words, *wrong), ["out.run"])
        assert list_files(tmp_path) == before
    assert privot(*words, "--resume")[0] == 0
    kinds = [entry["kind"] for entry in Ledger(tmp_path / "ledger.jsonl").entries()]
    assert kinds.count("reserve") == 1


def test_the_limit_of_a_dataset_holds_over_runs(privot, tmp_path):
    words = ("synthesize", *CHARGED.split(), "--epsilon", 1, *QUICK, "--out")
    assert privot("ledger", *CHARGED.split(), "--limit", 1.2)[0] == 0
    assert privot(*words, "one")[0] == 0
    before = list_files(tmp_path)
    check_caution_and_refusal(privot(*words, "two"), ["1.2", "ledger"])
    assert list_files(tmp_path) == before


def test_an_unreadable_file_is_named(privot, monkeypatch):
    """For root no file is unreadable, so the system's answer is planted."""

    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    words = ("synthesize", save_pair(PNG), "--epsilon", 1, "--out", "out")
    monkeypatch.setattr(Path, "iterdir", deny)
    check_refused(*privot(*words), ["photos", "Permission denied"])
