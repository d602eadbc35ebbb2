"""Hostile and wrong inputs through the real command line: one line that helps, exit code 2, nothing written, nothing charged."""

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

QUICK = tuple(
    word
    for each in (
        "images_per_class=2",
        "num_random_nets=2",
        "nets_per_round=2",
        "net_width=4",
        "steps=2",
        "net_train_epochs=1",
    )
    for word in ("--set", each)
)
CASES = {}


def case(*needles):
    """Register a builder: it writes its files into ``root`` and returns the words after `privot`; the needles must be in the line."""

    def register(build):
        CASES[build.__name__] = (build, needles)
        return build

    return register


def tree(root):
    """Every file, link and folder with its content; locks hold nothing and may come and go."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.suffix != ".lock" and "home" not in path.relative_to(root).parts:
            plain = path.is_file() and not path.is_symlink()
            found[str(path.relative_to(root))] = path.read_bytes() if plain else path.is_dir()
    charged = [
        path for path in (root / "home").rglob("*") if path.is_file() and path.suffix != ".lock"
    ]
    return found, {str(path): path.read_bytes() for path in charged}


# What files are made of


def png(value=100, size=(8, 8), mode="L", form="PNG"):
    buffer = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value,) * 3).save(buffer, form)
    return buffer.getvalue()


def images(count=20):
    return np.random.default_rng(0).integers(0, 256, (count, 8, 8)).astype(np.uint8)


def npz(root, compress=False, **arrays):
    path = root / "x.npz"
    (np.savez_compressed if compress else np.savez)(path, **arrays)
    return path


def with_labels(root, labels):
    return npz(root, x=images(), y=labels)


def npy_header(text, version=b"\x01\x00"):
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text


def zipped(root, x, method=zipfile.ZIP_STORED):
    """An .npz whose member x.npy holds these very bytes."""
    path = root / "x.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("y.npy", saved(LABELS))
        archive.writestr("x.npy", x)
    return path


def saved(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def folder(root, **classes):
    """root/photos with a folder a class; a value is a dict of file name to bytes."""
    for name, files in classes.items():
        place = root / "photos" / name
        place.mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            (place / file).write_bytes(data)
    return root / "photos"


def idx(array, kind=8):
    return (
        bytes([0, 0, kind, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def idx_pair(root, pictures, labels, suffix=""):
    for name, data in (("t-images-idx3-ubyte", pictures), ("t-labels-idx1-ubyte", labels)):
        if data is not None:
            (root / f"{name}{suffix}").write_bytes(data)
    return root / f"t-images-idx3-ubyte{suffix}"


LABELS = (np.arange(20) % 2).astype(np.uint8)


def table(root, **columns):
    parquet.write_table(pa.table(columns), root / "x.parquet")
    return root / "x.parquet"


# Records


@case("x.npz", "record 3", "repair")
def nan_record(root):
    x = images() / 255
    x[3, 0, 0] = np.nan
    return npz(root, x=x, y=LABELS)


@case("x.npz", "record 19", "repair")
def infinite_record(root):
    x = (images() / 255).astype(np.float32)
    x[19] = -np.inf
    return npz(root, x=x, y=LABELS)


@case("x.npz", "0 to 1", "Divide them by 255")
def values_of_bytes_as_floats(root):
    return npz(root, x=images().astype(float), y=LABELS)


@case("x.npz", "--repair", "another scale", "Divide them by 255")
def repair_of_values_of_bytes(root):
    return npz(root, x=images().astype(float), y=LABELS), "--repair"


@case("x.npz", "int16", "uint8")
def wide_integers(root):
    return npz(root, x=images().astype(np.int16), y=LABELS)


@case("x.npz", "labels", "0 to 1")
def label_out_of_range(root):
    return with_labels(root, np.arange(20) % 3), "--classes", 2


@case("x.npz", "labels")
def label_negative(root):
    return with_labels(root, np.arange(20) % 2 - 1)


@case("x.npz", "classes")
def labels_all_negative(root):
    return with_labels(root, np.full(20, -1))


@case("x.npz", "one integer per image is needed")
def labels_of_floats(root):
    return with_labels(root, np.arange(20) % 2 + 0.5)


@case("x.npz", "x and y")
def labels_missing(root):
    return npz(root, x=images())


@case("x.npz", "labels")
def labels_too_few(root):
    return with_labels(root, np.arange(19) % 2)


@case("x.npz", "labels", "labels.argmax(1)")
def labels_one_hot(root):
    return with_labels(root, np.eye(20, dtype=int))


@case("x.npz", "classes=9223372036854775808")
def label_enormous(root):
    return with_labels(root, np.where(np.arange(20) == 7, 2**63 - 1, 0).astype(np.uint64))


@case("x.npz", "class 1 has no records")
def empty_class(root):
    return with_labels(root, np.arange(20) % 2 * 2)


@case("x.npz", "8", "9", "declared")
def other_shape_than_declared(root):
    return with_labels(root, LABELS), "--shape", "1x9x9"


@case("x.npz", "labels")
def no_records(root):
    return npz(root, x=images(0), y=LABELS[:0])


@case("x.npz", "shape [20, 64]")
def flat_records(root):
    return npz(root, x=images().reshape(20, 64), y=LABELS)


@case("x.npz", "channels")
def five_channels(root):
    return npz(root, x=np.zeros((20, 5, 8, 8), np.uint8), y=LABELS)


@case("x.npz", "4096")
def sides_too_long(root):
    return npz(root, x=np.zeros((2, 5000, 1), np.uint8), y=LABELS[:2])


@case("x.npz", "classes=0")
def no_classes_declared(root):
    return with_labels(root, LABELS), "--classes", 0


# Folders of images


@case("photos", "different shapes", "resize")
def mixed_sizes(root):
    return folder(root, a={"1.png": png()}, b={"1.png": png(size=(9, 9))})


@case("photos", "different shapes")
def grey_and_colour(root):
    return folder(root, a={"1.png": png()}, b={"1.png": png(mode="RGB")})


@case("photos", "class folders")
def empty_folder(root):
    (root / "photos").mkdir()
    return root / "photos"


@case("photos", "class folders")
def folder_without_classes(root):
    (root / "photos").mkdir()
    (root / "photos" / "1.png").write_bytes(png())
    return root / "photos"


@case("photos/b", "no PNG or JPEG")
def class_folder_without_images(root):
    return folder(root, a={"1.png": png()}, b={"readme.txt": b"later"})


@case("1.png", "plain file")
def folder_named_png(root):
    (folder(root, a={}, b={"1.png": png()}) / "a" / "1.png").mkdir()
    return root / "photos"


@case("1.png", "PNG or JPEG")
def text_named_png(root):
    return folder(root, a={"1.png": b"not a picture"}, b={"1.png": png()})


@case("1.png", "whole")
def truncated_png(root):
    whole = png(size=(64, 64))
    return folder(root, a={"1.png": whole[: len(whole) // 2]}, b={"1.png": png()})


@case("1.jpg", "whole")
def truncated_jpeg(root):
    return folder(root, a={"1.jpg": png(form="JPEG")[:300]}, b={"1.jpg": png(form="JPEG")})


@case("1.png", "whole")
def zero_byte_png(root):
    return folder(root, a={"1.png": b""}, b={"1.png": png()})


def claiming(side):
    """A PNG whose header claims a square of this side."""
    head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + head
        + struct.pack(">I", zlib.crc32(head))
        + png()[33:]
    )


@case("1.png", "whole")
def png_bomb(root):
    return folder(root, a={"1.png": claiming(60_000)}, b={"1.png": png()})


@case("1.png", "10000x10000", "4096")
def png_bomb_of_the_size_that_pillow_only_warns_of(root):
    return folder(root, a={"1.png": claiming(10_000)}, b={"1.png": png()})


@case("1.png", "whole")
def png_with_text_bomb(root):
    chunk = b"zTXtkey\0\0" + zlib.compress(b"\0" * 100_000_000, 9)
    bomb = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return folder(root, a={"1.png": png()[:33] + bomb + png()[33:]}, b={"1.png": png()})


@case("1.png", "whole")
def png_with_a_wrong_sum(root):
    data = bytearray(png())
    data[29] ^= 255
    return folder(root, a={"1.png": bytes(data)}, b={"1.png": png()})


@case("1.png", "PNG or JPEG")
def gif_named_png(root):
    return folder(root, a={"1.png": png(form="GIF")}, b={"1.png": png()})


@case("1.jpg", "PNG or JPEG")
def tiff_named_jpg(root):
    return folder(root, a={"1.jpg": png(form="TIFF")}, b={"1.png": png()})


@case("1.png", "links")
def link_that_leaves(root):
    (root / "elsewhere.png").write_bytes(png())
    (folder(root, a={}, b={"1.png": png()}) / "a" / "1.png").symlink_to(root / "elsewhere.png")
    return root / "photos"


@case("photos/a", "links")
def class_folder_that_is_a_link_elsewhere(root):
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "1.png").write_bytes(png())
    (folder(root, b={"1.png": png()}) / "a").symlink_to(root / "elsewhere")
    return root / "photos"


@case("1.png", "plain file")
def link_loop(root):
    place = folder(root, a={}, b={"1.png": png()}) / "a"
    (place / "1.png").symlink_to(place / "2.png")
    (place / "2.png").symlink_to(place / "1.png")
    return root / "photos"


@case("1.png", "plain file")
def pipe_named_png(root):
    os.mkfifo(
        folder(root, a={}, b={"1.png": png()}) / "a" / "1.png"
    )  # opening it would wait for ever
    return root / "photos"


@case("1.png", "links")
def link_inside(root):
    (folder(root, a={}, b={"1.png": png()}) / "a" / "1.png").symlink_to(
        root / "photos" / "b" / "1.png"
    )
    return root / "photos"


@case("photos/a", "links")
def class_folder_that_is_a_link_to_another_class(root):
    (folder(root, b={"1.png": png()}, c={"1.png": png()}) / "a").symlink_to(root / "photos" / "b")
    return root / "photos"


@case("2.png", "1.png", "hard link")
def hard_link_inside(root):
    place = folder(root, a={"1.png": png()}, b={"1.png": png()})
    os.link(place / "a" / "1.png", place / "b" / "2.png")
    return place


@case("photos/Cat", "cat", "differ only in case")
def class_folders_in_another_case(root):
    return folder(root, Cat={"1.png": png()}, cat={"1.png": png()})


@case("photos/01", "1", "leading zeros")
def class_folders_with_leading_zeros(root):
    return folder(root, **{"1": {"1.png": png()}, "01": {"1.png": png()}})


@case("photos/a/1.PNG", "1.png", "differ only in case")
def files_in_another_case(root):
    return folder(root, a={"1.PNG": png(), "1.png": png()}, b={"1.png": png()})


@case("2.png", "beside the class folders")
def picture_beside_the_class_folders(root):
    (folder(root, a={"1.png": png()}, b={"1.png": png()}) / "2.png").write_bytes(png())
    return root / "photos"


# npz


@case("x.npz", "whole")
def truncated_npz(root):
    path = with_labels(root, LABELS)
    path.write_bytes(path.read_bytes()[:-100])
    return path


@case("x.npz", "object", "plain numbers")
def pickled_npz(root):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(root / "executed"),)

    return npz(root, x=np.array([Bomb()] * 20, object), y=LABELS)


@case("x.npz", "plain numbers")
def npz_of_strings(root):
    return npz(root, x=np.full((20, 8, 8), "a"), y=LABELS)


@case("x.npz", "plain numbers")
def npz_of_structures(root):
    return npz(root, x=np.zeros((20, 8, 8), [("a", "u1"), ("b", "u1")]), y=LABELS)


@case("x.npz", "plain numbers")
def npz_of_complex_numbers(root):
    return npz(root, x=np.zeros((20, 8, 8), complex), y=LABELS)


@case("x.npz", "x.npy", "more than the file can hold")
def npz_bomb(root):
    path = root / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("y.npy", saved(LABELS))
        with archive.open("x.npy", "w") as file:
            file.write(
                npy_header(
                    b"{'descr':'|u1','fortran_order':False,'shape':(20,4096,3500)}".ljust(118)
                )
            )
            for _ in range(280):
                file.write(b"\0" * (1 << 20))
    return path


@case("x.npz", "x.npy", "more than the file can hold")
def npz_that_lies_of_its_size(root):
    path = zipped(root, saved(images()))
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02")  # the last entry of the directory is x.npy
    data[at + 20 : at + 28] = struct.pack("<II", 2**32 - 2, 2**32 - 2)
    path.write_bytes(bytes(data))
    return path


@case("x.npz", "x and y")
def npz_with_names_that_climb(root):
    path = root / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("../x.npy", "/x.npy", "../../y.npy", "a/../y.npy", "x.npy/", "..\\y.npy"):
            archive.writestr(name, saved(images()))
    return path


@case("x.npz", "x and y")
def npz_of_other_arrays(root):
    return npz(root, data=images(), target=LABELS)


@case("x.npz", "shorter or longer")
def npz_with_an_absurd_shape(root):
    return zipped(
        root,
        npy_header(b"{'descr':'|u1','fortran_order':False,'shape':(99999999999,99999,99999)}")
        + b"\0" * 64,
    )


@case("x.npz")
def npz_with_a_negative_shape(root):
    return zipped(
        root, npy_header(b"{'descr':'|u1','fortran_order':False,'shape':(-20,8,8)}") + b"\0" * 1280
    )


@case("x.npz", "shorter or longer")
def npz_with_trailing_bytes(root):
    return zipped(root, saved(images()) + b"more")


@case("x.npz", "whole")
def npz_header_that_ends_in_the_middle(root):
    return zipped(root, npy_header(b"{'descr': ((((") + b"\0" * 64)


@case("x.npz", "whole")
def npz_header_of_a_megabyte(root):
    text = b"{'descr':'|u1','fortran_order':False,'shape':(" + b"1," * 500_000 + b")}"
    return zipped(root, b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text)


@case("x.npz", "plain numbers")
def npz_header_that_numpy_warns_of(root):
    return zipped(
        root, npy_header(b"{'descr':'|O','fortran_order':False,'shape':(20L,8L,8L)}") + b"\0" * 64
    )


@case("x.npz", "whole")
def npz_header_of_code(root):
    return zipped(root, npy_header(b"__import__('os').mkdir('executed')") + b"\0" * 64)


@case("x.npz", "whole")
def encrypted_npz(root):
    path = with_labels(root, LABELS)
    data = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = -1
        while (at := data.find(mark, at + 1)) >= 0:
            data[at + place] |= 1
    path.write_bytes(bytes(data))
    return path


@case("x.npz", "whole")
def npz_with_a_wrong_sum(root):
    path = with_labels(root, LABELS)
    data = bytearray(path.read_bytes())
    data[300] ^= 1  # among the pixels of the first member
    path.write_bytes(bytes(data))
    return path


@case("x.npz", "whole")
def npz_with_a_broken_lzma_stream(root):
    path = zipped(root, saved(images()), method=zipfile.ZIP_LZMA)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"x.npy", 0, data.index(b"PK\x01\x02")) + 20
    data[at : at + 40] = bytes(range(40))
    path.write_bytes(bytes(data))
    return path


@case("x.npz", "whole")
def zero_byte_npz(root):
    (root / "x.npz").touch()
    return root / "x.npz"


# IDX


@case("t-images", "whole")
def truncated_gz(root):
    return idx_pair(root, gzip.compress(idx(images()))[:-40], gzip.compress(idx(LABELS)), ".gz")


@case("t-images", "whole")
def gz_with_a_wrong_sum(root):
    data = bytearray(gzip.compress(idx(images())))
    data[-6] ^= 255
    return idx_pair(root, bytes(data), gzip.compress(idx(LABELS)), ".gz")


@case("t-images", "whole")
def gz_that_is_none(root):
    return idx_pair(root, idx(images()), idx(LABELS), ".gz")


@case("t-images", "not an IDX file")
def idx_wrong_magic(root):
    return idx_pair(root, b"\x89PNG" + idx(images()), idx(LABELS))


@case("t-images", "not an IDX file of bytes")
def idx_of_floats(root):
    return idx_pair(root, idx(images().astype(">f4"), kind=13), idx(LABELS))


@case("t-images", "more than the file can hold")
def idx_that_claims_everything(root):
    return idx_pair(
        root, b"\0\0\x08\x03" + struct.pack(">3I", 2**32 - 1, 28, 28) + b"\0" * 99, idx(LABELS)
    )


@case("t-images", "more than the file can hold")
def gz_that_claims_everything(root):
    claim = b"\0\0\x08\x03" + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1)
    return idx_pair(root, gzip.compress(claim), gzip.compress(idx(LABELS)), ".gz")


@case("t-images", "longer")
def idx_with_trailing_bytes(root):
    return idx_pair(root, idx(images()) + b"!", idx(LABELS))


@case("t-images", "whole")
def idx_header_cut_short(root):
    return idx_pair(root, idx(images())[:7], idx(LABELS))


@case("t-images", "not an IDX file")
def zero_byte_idx(root):
    return idx_pair(root, b"", idx(LABELS))


@case("t-labels-idx1-ubyte", "beside")
def idx_without_labels(root):
    return idx_pair(root, idx(images()), None)


@case("t-images", "labels")
def idx_with_too_few_labels(root):
    return idx_pair(root, idx(images()), idx(LABELS[:19]))


@case("t-images", "labels")
def idx_with_pictures_for_labels(root):
    return idx_pair(root, idx(images()), idx(images()))


# parquet


@case("x.parquet", "whole")
def truncated_parquet(root):
    path = table(root, image=[png()] * 20, label=LABELS)
    path.write_bytes(path.read_bytes()[:-30])
    return path


@case("x.parquet", "whole")
def garbage_parquet(root):
    (root / "x.parquet").write_bytes(b"PAR1" + bytes(range(256)) * 4 + b"PAR1")
    return root / "x.parquet"


@case("x.parquet", "whole")
def zero_byte_parquet(root):
    (root / "x.parquet").touch()
    return root / "x.parquet"


@case("x.parquet", "no column 'image'", "picture")
def parquet_without_images(root):
    return table(root, picture=[png()] * 20, label=LABELS)


@case("x.parquet", "no column 'colour'", "label")
def parquet_without_that_label(root):
    return table(root, image=[png()] * 20, label=LABELS), "--label", "colour"


@case("x.parquet row 19", "NoneType")
def parquet_with_a_null_image(root):
    return table(root, image=[png()] * 19 + [None], label=LABELS)


@case("x.parquet row 2", "PNG or JPEG")
def parquet_with_garbage_for_an_image(root):
    return table(root, image=[png()] * 2 + [b"\x89PNG" + b"?" * 50] + [png()] * 17, label=LABELS)


@case("x.parquet row 0", "str", "bytes")
def parquet_that_names_a_file_outside(root):
    (root / "secret.png").write_bytes(png())
    return table(root, image=[str(root / "secret.png")] * 20, label=LABELS)


@case("x.parquet", "one integer per image is needed")
def parquet_with_words_for_labels(root):
    return table(root, image=[png()] * 20, label=["cat", "dog"] * 10)


@case("x.parquet", "one integer per image is needed")
def parquet_with_a_null_label(root):
    return table(root, image=[png()] * 20, label=[None, 0, 1, 0] * 5)


@case("x.parquet", "no images")
def parquet_without_rows(root):
    return table(root, image=pa.array([], pa.binary()), label=pa.array([], pa.int64()))


@case("x.parquet", "different shapes", "resize")
def parquet_of_mixed_sizes(root):
    return table(root, image=[png(), png(size=(9, 9))] * 10, label=LABELS)


# Paths


@case("data.csv", "unknown format", ".npz")
def unknown_ending(root):
    (root / "data.csv").write_text("1,2,3\n")
    return root / "data.csv"


@case("nothing.npz", "no such file", "built-in")
def missing_file(root):
    return root / "nothing.npz"


@case("mnsit", "did you mean 'mnist'")
def nearly_a_built_in(root):
    return "mnsit"


@case("x.npz", "class folders")
def folder_named_npz(root):
    (root / "x.npz").mkdir()
    return root / "x.npz"


@case("x.npz", "no such file")
def pipe_named_npz(root):
    os.mkfifo(root / "x.npz")
    return root / "x.npz"


@case("aaaa", "no such file")
def name_that_no_file_can_have(root):
    return "a" * 5000


@case("svhn", "put", "PRIVOT_DATA")
def built_in_that_is_not_there(root):
    return "svhn"


# Budgets


@case("epsilon=0", "above 0")
def epsilon_zero(root):
    return "digits", "--epsilon", 0


@case("epsilon=-1", "above 0")
def epsilon_negative(root):
    return "digits", "--epsilon", -1


@case("epsilon=nan", "above 0")
def epsilon_nan(root):
    return "digits", "--epsilon", "nan"


@case("--epsilon", "is not a valid")
def epsilon_in_words(root):
    return "digits", "--epsilon", "much"


@case("delta=0", "1e-5")
def delta_zero(root):
    return "digits", "--epsilon", 1, "--delta", 0


@case("delta=1", "1e-5")
def delta_one(root):
    return "digits", "--epsilon", 1, "--delta", 1


@case("delta=2", "1e-5")
def delta_above_one(root):
    return "digits", "--epsilon", 1, "--delta", 2


@case("delta=0.5", "0.001", "--allow-large-delta")
def delta_large_and_the_size_a_secret(root):
    return with_labels(root, LABELS), "--epsilon", 1, "--delta", 0.5


@case("delta=0.2", "1/20", "--allow-large-delta")
def delta_large_for_a_declared_size(root):
    return with_labels(root, LABELS), "--epsilon", 1, "--delta", 0.2, "--public-size"


@case("delta=nan", "1e-5")
def delta_nan(root):
    return "digits", "--epsilon", 1, "--delta", "nan"


@case("max-tpr '0.05'", "0.05@0.01")
def max_tpr_without_a_rate(root):
    return "digits", "--max-tpr", "0.05"


@case("max-tpr 'a@b'", "0.05@0.01")
def max_tpr_in_words(root):
    return "digits", "--max-tpr", "a@b"


@case("max-tpr", "<")
def max_tpr_below_chance(root):
    return "digits", "--max-tpr", "0.01@0.05"


@case("--epsilon", "--max-tpr", "not both")
def both_budgets(root):
    return "digits", "--max-tpr", "0.05@0.01", "--epsilon", 1


@case("--epsilon", "--max-tpr")
def no_budget(root):
    return "digits", "--delta", 1e-6


@case("budget", "noise", "not both")
def budget_and_noise(root):
    return "digits", "--epsilon", 1, "--set", "noise_multiplier=3"


@case("epsilon")
def budget_too_small_for_any_noise(root):
    return "digits", "--epsilon", 1e-300, "--delta", 1e-300


# Settings


@case("'murf'", "did you mean 'merf'")
def unknown_method(root):
    return "digits", "--method", "murf"


@case("'learning_rates'", "did you mean 'learning_rate'")
def unknown_setting(root):
    return "digits", "--set", "learning_rates=10"


@case("private-set.steps='many'", "int")
def setting_of_a_wrong_type(root):
    return "digits", "--set", "steps=many"


@case("private-set.steps=0", "Choose a value of at least 1")
def setting_out_of_range(root):
    return "digits", "--set", "steps=0"


@case("--set", "key=value")
def setting_without_a_value(root):
    return "digits", "--set", "steps"


@case("c.toml", "TOML")
def bad_toml(root):
    (root / "c.toml").write_text("steps = = 3")
    return "digits", "--config", root / "c.toml"


@case("c.toml", "TOML")
def toml_in_another_encoding(root):
    (root / "c.toml").write_bytes(b"steps = \xff\xfe")
    return "digits", "--config", root / "c.toml"


@case("'stepz'", "did you mean 'steps'")
def toml_with_an_unknown_key(root):
    (root / "c.toml").write_text("stepz = 3")
    return "digits", "--config", root / "c.toml"


@case("private-set.budget_shares", "tuple")
def toml_with_a_wrong_type(root):
    (root / "c.toml").write_text("budget_shares = [[1], {}]")
    return "digits", "--config", root / "c.toml"


@case("c.toml", "TOML")
def config_missing(root):
    return "digits", "--config", root / "c.toml"


@case("folder", "TOML")
def config_is_a_folder(root):
    (root / "folder").mkdir()
    return "digits", "--config", root / "folder"


@case("resize=0", "4096")
def resize_to_nothing(root):
    return folder(root, a={"1.png": png()}, b={"1.png": png()}), "--resize", 0


@case("resize=1000000", "4096")
def resize_to_a_bomb(root):
    return folder(root, a={"1.png": png()}, b={"1.png": png()}), "--resize", 1_000_000


@case("resize=16", "x.npz")
def resize_where_there_is_nothing_to_resize(root):
    return with_labels(root, LABELS), "--resize", 16


@case("--shape '8x8'", "1x28x28")
def shape_malformed(root):
    return with_labels(root, LABELS), "--shape", "8x8"


@case("digits", "1x8x8", "10 classes")
def other_shape_than_the_built_in_has(root):
    return "digits", "--shape", "1x28x28"


@case("classes=1000000", "100000")
def too_many_classes(root):
    return with_labels(root, LABELS), "--classes", 1_000_000


@case("--sett", "--help")
def unknown_option(root):
    return "digits", "--sett", "steps=3"


@case("--seed", "--help")
def seed_out_of_range(root):
    return "digits", "--seed", -1


@case("device='cuda:77'", "cpu")
def device_that_is_not_there(root):
    return "digits", "--device", "cuda:77"


@case("device='abacus'", "cpu")
def device_that_does_not_exist(root):
    return "digits", "--device", "abacus"


# Places


@case("out", "already exists")
def out_is_there(root):
    (root / "out").mkdir()
    return "digits"


@case("out", "already exists")
def out_is_a_file(root):
    (root / "out").write_text("mine")
    return "digits"


@case("out", "already exists")
def out_is_a_dangling_link(root):
    (root / "out").symlink_to(root / "nowhere")
    return "digits"


@case("file")
def out_under_a_file(root):
    (root / "file").write_text("mine")
    return "digits", "--out", root / "file" / "out"


@case("out.run", "--resume")
def unfinished_run(root):
    (root / "out.run").mkdir()
    (root / "out.run" / "run.json").write_text("{}")
    return "digits"


@case("out.run", "other settings")
def resume_with_other_settings(root):
    (root / "out.run").mkdir()
    (root / "out.run" / "run.json").write_text('{"method": "merf"}')
    return "digits", "--resume"


@case("run.json", "Remove")
def unfinished_run_of_garbage(root):
    (root / "out.run").mkdir()
    (root / "out.run" / "run.json").write_bytes(b"\0{")
    return "digits", "--resume"


@case("book.jsonl")
def ledger_is_a_folder(root):
    (root / "book.jsonl").mkdir()
    return "digits", "--ledger", root / "book.jsonl"


@case("file", "--ledger")
def ledger_folder_is_a_file(root):
    (root / "file").write_text("mine")
    return "digits", "--ledger", root / "file" / "book.jsonl"


@case("book.jsonl", "line 1", "backup")
def ledger_of_garbage(root):
    (root / "book.jsonl").write_text("hello\n")
    return "digits", "--ledger", root / "book.jsonl"


@case("epsilon 0.5", "ledger")
def budget_that_the_owner_no_longer_allows(root):
    Ledger(root / "book.jsonl").set_limit(Budget(0.5))
    return "digits", "--ledger", root / "book.jsonl"


def words(build, root):
    """The whole command of a case; a budget, a quick run and --out are added where the case does not speak of them."""
    made = build(root)
    said = [str(each) for each in (made if isinstance(made, tuple) else (made,))]
    if not any(each in ("--epsilon", "--max-tpr", "--delta") for each in said):
        said += ["--epsilon", "1"]
    if "--set" not in said:
        said += QUICK  # where a case is not refused, it fails quickly
    return ["synthesize", *said, *([] if "--out" in said else ["--out", str(root / "out")])]


def check_refused(code, out, err, needles):
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("privot: "), err
    for needle in needles:
        assert needle in err, err


# Refused as it should be, but OUT.run is made before the ledger is opened, and stays.
@pytest.mark.parametrize("name", CASES)
def test_wrong_input_is_refused_in_one_line(name, privot, tmp_path, monkeypatch, trust):
    monkeypatch.setenv("PRIVOT_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nowhere"))
    build, needles = CASES[name]
    said = words(build, tmp_path)
    before = tree(tmp_path)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with watched(tmp_path) as seen, hurried():
        code, out, err = privot(*said)
    assert time.process_time() - start <= 5  # of this process alone: others may be busy
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory <= 1 << 20  # KiB, so 1 GiB
    check_refused(code, out, err, needles)
    assert (
        tree(tmp_path) == before
    )  # no release, no rest of one, no file extracted or executed, no line in a ledger
    assert seen == [], "code was run, or something written elsewhere"
    is_file = any(
        (tmp_path / each).exists()
        for each in said
        if each and len(each) < 200 and not each.startswith("--")
    )
    trust(
        "D1",
        "crafted files refused in one line" if is_file else "wrong words refused in one line",
        1,
        of=1,
    )


def test_there_are_sixty_crafted_files(tmp_path):
    made = 0
    for name, (build, _) in CASES.items():
        (root := tmp_path / name).mkdir()
        build(root)
        made += any(root.iterdir())
    assert made >= 60


SOUND = {
    "npz": lambda root: with_labels(root, LABELS),
    "packed npz": lambda root: npz(root, compress=True, x=images(), y=LABELS),
    "idx": lambda root: idx_pair(root, idx(images()), idx(LABELS)),
    "gz": lambda root: idx_pair(
        root, gzip.compress(idx(images())), gzip.compress(idx(LABELS)), ".gz"
    ),
    "parquet": lambda root: table(root, image=[png(), png(7)] * 10, label=LABELS),
    "png": lambda root: folder(root, a={"1.png": png()}, b={"1.png": png(9)}),
    "jpeg": lambda root: folder(
        root, a={"1.jpg": png(form="JPEG")}, b={"1.jpg": png(9, form="JPEG")}
    ),
}


@pytest.mark.parametrize("count", [60, pytest.param(3940, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SOUND)
@pytest.mark.filterwarnings("ignore")
def test_a_mutated_file_is_read_or_refused(name, count, tmp_path, trust):
    """Mutations of a sound file of each format: a box or a DataError, nothing else, no code, no other file."""
    generator = random.Random(f"{name} {count}")
    source = SOUND[name](tmp_path)
    assert load_dataset(source).spec.num_classes == 2
    [file] = [source] if source.is_file() else sorted((source / "a").iterdir())
    whole = file.read_bytes()
    refused = 0
    for _ in range(count):
        file.write_bytes(corrupt_bytes(whole, generator))
        with watched(tmp_path / "nowhere") as seen, hurried():
            try:
                load_dataset(source)
            except DataError:
                refused += 1
        assert seen == []
    assert refused > count // 10
    trust("D2", "mutated data files read or refused in one line", count, of=count)


@pytest.mark.parametrize(
    "name", ["png_bomb_of_the_size_that_pillow_only_warns_of", "epsilon_in_words"]
)
def test_refusals_hold_in_a_process_of_their_own(name, tmp_path):
    build, needles = CASES[name]
    command = [sys.executable, "-c", "from privot.cli import main; main()", *words(build, tmp_path)]
    before = tree(tmp_path)
    environment = {**os.environ, "PRIVOT_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    check_refused(done.returncode, done.stdout, done.stderr, needles)
    assert tree(tmp_path) == before


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
    place = tmp_path / name
    place.mkdir()
    with_labels(place, np.arange(20) % 2 - 1)
    code, out, err = privot(
        "synthesize", place / "x.npz", "--epsilon", 1, "--out", tmp_path / "out"
    )
    check_refused(code, out, err, ["labels"])
    assert err[:-1].isprintable()
    assert "".join(each if each.isprintable() else repr(each)[1:-1] for each in name) in err


@pytest.mark.parametrize("name", NAMES[2::3])
def test_the_name_of_the_data_neither_breaks_nor_styles_a_table(name, privot, tmp_path):
    code, out, err = privot(
        "plan", place := tmp_path / name, "--epsilon", 1, "--shape", "1x8x8", "--classes", 2
    )
    assert (code, err.count("\n")) == (2, 1)
    place.mkdir()
    code, out, err = privot("plan", place, "--epsilon", 1, "--shape", "1x8x8", "--classes", 2)
    assert code == 0
    assert all(line.isprintable() for line in out.splitlines())


def test_a_delta_that_is_too_large_is_a_caution_and_the_run_goes_on(privot, tmp_path):
    code, _, err = privot(
        "synthesize", "digits", "--epsilon", 5, "--delta", 1e-3, *QUICK, "--out", tmp_path / "out"
    )
    assert code == 0
    [caution] = [line for line in err.splitlines() if "delta" in line]
    assert caution.startswith("warning: delta 0.001")
    assert (tmp_path / "out" / "manifest.json").exists()


def test_an_interrupted_run_is_charged_once_and_goes_on_only_as_itself(
    privot, tmp_path, monkeypatch
):
    run = (
        "synthesize",
        "digits",
        "--epsilon",
        5,
        *QUICK,
        "--out",
        tmp_path / "out",
        "--ledger",
        tmp_path / "book.jsonl",
    )
    with monkeypatch.context() as broken:
        broken.setattr(
            PrivateSet, "_compute_soft_labels", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        code, out, err = privot(*run)
    assert code == 130
    assert "charged" in err.splitlines()[-1]
    assert "--resume" in err.splitlines()[-1]
    before = tree(tmp_path)
    refused = [
        run,
        (*run, "--resume", "--seed", 1),
        (*run, "--resume", "--set", "net_width=8"),
        (*run, "--resume", "--delta", 1e-6),
    ]
    for again in refused:
        code, out, err = privot(*again)
        check_refused(code, out, err.splitlines(keepends=True)[-1], ["out.run"])
        assert tree(tmp_path) == before
    assert privot(*run, "--resume")[0] == 0
    assert [each["kind"] for each in Ledger(tmp_path / "book.jsonl").entries()].count(
        "reserve"
    ) == 1


def test_the_budget_of_the_data_set_is_a_wall_over_runs(privot, tmp_path):
    book = ("--ledger", tmp_path / "book.jsonl")
    assert privot("ledger", "digits", "--limit", 1.2, *book)[0] == 0
    assert (
        privot("synthesize", "digits", "--epsilon", 1, *QUICK, "--out", tmp_path / "one", *book)[0]
        == 0
    )
    before = tree(tmp_path)
    code, out, err = privot(
        "synthesize", "digits", "--epsilon", 1, *QUICK, "--out", tmp_path / "two", *book
    )
    check_refused(code, out, err.splitlines(keepends=True)[-1], ["1.2", "ledger"])
    assert tree(tmp_path) == before


def test_an_unreadable_file_is_named(privot, tmp_path, monkeypatch):
    """For root no file is unreadable, so the system's answer is planted."""
    path = folder(tmp_path, a={"1.png": png()}, b={"1.png": png()})

    def closed(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", closed)
    code, out, err = privot("synthesize", path, "--epsilon", 1, "--out", tmp_path / "out")
    check_refused(code, out, err, ["photos", "Permission denied"])
