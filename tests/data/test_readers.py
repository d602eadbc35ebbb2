"""Every reader on small files made here: the same pictures come back whatever they were stored in."""

import gzip
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from privot.data import Public, Sensitive, describe_dataset, load_dataset, readers
from privot.data.catalog import require_existing_path
from privot.data.images import decode_image
from privot.errors import DataError, SettingError

LABELS = np.array([0, 1, 2, 0, 1, 2])
GREY = (
    np.random.default_rng(0).integers(0, 256, (6, 7, 5)).astype(np.uint8)
)  # neither square nor like its own transpose
COLOUR = np.random.default_rng(1).integers(0, 256, (6, 7, 5, 3)).astype(np.uint8)


def opened(path, **more):
    box = load_dataset(path, public=True, **more)
    assert isinstance(box, Public)
    images, labels = box.records()
    return (images * 255).round().byte().numpy(), labels.numpy(), box.spec


def check_grey(path, **more):
    images, labels, spec = opened(path, **more)
    assert np.array_equal(images, GREY[:, None])
    assert np.array_equal(labels, LABELS)
    assert (spec.shape, spec.num_classes, spec.size) == ((1, 7, 5), 3, None)


def encoded(pixels, root, form="PNG"):
    Image.fromarray(pixels).save(root / "one", form)
    return (root / "one").read_bytes()


def idx(array):
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(np.uint8).tobytes()
    )


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx(tmp_path, suffix):
    pack = gzip.compress if suffix else bytes
    (tmp_path / f"train-images-idx3-ubyte{suffix}").write_bytes(pack(idx(GREY)))
    (tmp_path / f"train-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(LABELS)))
    check_grey(tmp_path / f"train-images-idx3-ubyte{suffix}")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("keys", [("x", "y"), ("images", "labels")])
def test_npz_by_either_pair_of_names(tmp_path, keys, save):
    save(
        tmp_path / "a.npz",
        **dict(zip(keys, (GREY, LABELS), strict=True)),
        other=np.array(["words", "are skipped"]),
    )
    check_grey(tmp_path / "a.npz")


def test_npz_prefers_x_and_y(tmp_path):
    np.savez(tmp_path / "a.npz", x=GREY, y=LABELS, images=GREY[:, :2], labels=LABELS)
    check_grey(tmp_path / "a.npz")


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "longdouble", ">f4", ">f8"])
def test_npz_of_every_float(tmp_path, kind):
    """Torch knows neither long nor big-endian floats, and would say so only after the charge."""
    np.savez(tmp_path / "a.npz", x=(GREY / 255).astype(kind), y=LABELS)
    check_grey(tmp_path / "a.npz")


@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", ">i4", "uint64"])
def test_npz_with_every_kind_of_label(tmp_path, kind):
    np.savez(tmp_path / "a.npz", x=GREY, y=LABELS.astype(kind))
    check_grey(tmp_path / "a.npz")


def test_npz_in_the_order_of_fortran(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.asfortranarray(GREY), y=LABELS)
    check_grey(tmp_path / "a.npz")


def test_npz_with_channels_first_or_last(tmp_path):
    np.savez(tmp_path / "last.npz", x=COLOUR, y=LABELS)
    np.savez(tmp_path / "first.npz", x=COLOUR.transpose(0, 3, 1, 2), y=LABELS)
    np.savez(tmp_path / "one.npz", x=GREY[..., None], y=LABELS)
    for name in ("last", "first"):
        images, _, spec = opened(tmp_path / f"{name}.npz")
        assert np.array_equal(images, COLOUR.transpose(0, 3, 1, 2))
        assert spec.shape == (3, 7, 5)
    check_grey(tmp_path / "one.npz")


def test_three_rows_of_pixels_are_taken_for_channels_and_a_declared_shape_says_no(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((6, 3, 5, 3), np.uint8), y=LABELS)
    assert load_dataset(tmp_path / "a.npz").spec.shape == (3, 5, 3)
    with pytest.raises(DataError, match="declared"):
        load_dataset(tmp_path / "a.npz", shape=(3, 3, 5))


@pytest.mark.parametrize("ending", ["png", "PNG"])
def test_folder_of_class_folders(tmp_path, ending):
    names = ("ant", "bee", "cat")
    for place, (pixels, label) in enumerate(zip(GREY, LABELS, strict=True)):
        (tmp_path / "photos" / names[label]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / names[label] / f"{place}.{ending}").write_bytes(
            encoded(pixels, tmp_path)
        )
    (tmp_path / "photos" / "ant" / "readme.txt").write_text("not a picture, and no harm")
    (tmp_path / "photos" / ".git").mkdir()
    images, labels, spec = opened(tmp_path / "photos")
    order = np.argsort(LABELS, kind="stable")
    assert np.array_equal(images, GREY[order][:, None])
    assert np.array_equal(labels, LABELS[order])
    assert spec.class_names == names


def folder_of(place, *names):
    """A class folder for each name, with one image as bright as its place in the alphabet."""
    for bright, name in enumerate(sorted(names)):
        (place / name).mkdir(parents=True)
        Image.fromarray(np.full((5, 5), bright, np.uint8)).save(place / name / "1.png")
    return place


def test_folders_that_are_numbers_are_those_numbers(tmp_path):
    _, labels, spec = opened(folder_of(tmp_path / "ten", *map(str, range(11))))
    images, _, _ = opened(tmp_path / "ten")
    assert (labels.tolist(), spec.class_names) == (list(range(11)), None)
    assert images[:, 0, 0, 0].tolist() == [
        0,
        1,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        2,
    ]  # "10" comes third in the alphabet
    assert opened(folder_of(tmp_path / "some", "3", "7", "10"))[2].class_names == ("3", "7", "10")


@pytest.mark.parametrize(
    ("known", "folders", "labels"),
    [
        (("1", "2", "3"), ("1", "2", "3"), [0, 1, 2]),
        (("1", "2", "3"), ("0", "1", "2"), None),
        (("0", "2", "5"), ("0", "1", "2"), None),
        ((), ("0", "1", "2"), [0, 1, 2]),
        ((), ("00", "01", "02"), [0, 1, 2]),
        ((), ("1", "2", "3"), None),
        ((), ("a", "b", "c"), [0, 1, 2]),
        (("2", "0", "1"), ("0", "1", "2"), [1, 2, 0]),
        (("a", "b", "c"), ("0", "1", "2"), [0, 1, 2]),
        (("a", "b", "c"), ("1", "2", "3"), None),
    ],
)
def test_numbers_are_names_too_where_classes_are_known(tmp_path, known, folders, labels):
    folder_of(tmp_path / "it", *folders)
    if labels is None:
        with pytest.raises(DataError, match="is not one of the known classes"):
            load_dataset(tmp_path / "it", class_names=known, num_classes=3)
    else:
        assert opened(tmp_path / "it", class_names=known, num_classes=3)[1].tolist() == labels


def test_pictures_that_are_not_read_are_not_left_out_unsaid(tmp_path):
    folder = folder_of(tmp_path / "photos", "a", "b") / "a"
    (folder / "Thumbs.db").touch()
    (folder / ".hidden.tiff").touch()
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(folder / "3.jfif", "JPEG")
    assert len(opened(tmp_path / "photos")[1]) == 3
    for name in ("2.TIFF", "2.dcm", "2.avif"):
        (folder / name).touch()
        with pytest.raises(
            DataError,
            match=f"{name}: a class folder holds PNG and JPEG images only, and nothing is left out silently",
        ):
            load_dataset(tmp_path / "photos")
        (folder / name).unlink()
    (folder / "patient").mkdir()
    with pytest.raises(DataError, match="patient: a class folder holds"):
        load_dataset(tmp_path / "photos")


@pytest.mark.parametrize("peak", [4095, 4096])
def test_twelve_bits_in_sixteen_would_be_black(tmp_path, peak):
    for name, value in (("a", 100), ("b", peak)):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((5, 5), value, np.uint16)).save(tmp_path / name / "1.png")
    if peak > 4095:
        assert opened(tmp_path)[0].max() == 16
        return
    with pytest.raises(DataError, match="16 bits whose values all lie below 4096"):
        load_dataset(tmp_path)
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(
        tmp_path / "a" / "2.png"
    )  # one of eight bits: then they are not all of such a scanner
    load_dataset(tmp_path)


def test_twelve_bits_in_sixteen_of_a_colour_image_too(tmp_path):
    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    for name, value in (("a", 100), ("b", 4000)):
        rows = b"".join(b"\0" + struct.pack(">12H", *[value] * 12) for _ in range(4))
        head = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
        (tmp_path / name).mkdir()
        parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
        (tmp_path / name / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    with pytest.raises(DataError, match="16 bits whose values all lie below 4096"):
        load_dataset(tmp_path)


def test_known_class_names_number_the_folders(tmp_path):
    known = ("wolf", "cat", "dog")
    images, labels, spec = opened(folder_of(tmp_path / "all", *known), class_names=known)
    assert (images[:, 0, 0, 0].tolist(), labels.tolist(), spec.class_names) == (
        [0, 1, 2],
        [1, 2, 0],
        known,
    )
    with pytest.raises(
        DataError, match="class 'cow' is not one of the known classes: wolf, cat, dog"
    ):
        load_dataset(folder_of(tmp_path / "more", *known, "cow"), class_names=known)
    with pytest.raises(DataError, match="class 'wolf' has no records"):
        load_dataset(folder_of(tmp_path / "few", "cat", "dog"), class_names=known, num_classes=3)
    assert opened(folder_of(tmp_path / "numbers", "0", "1", "2"), class_names=known)[
        1
    ].tolist() == [0, 1, 2]


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: {"bytes": data, "path": None}])
def test_parquet_of_bytes_or_of_structures(tmp_path, wrap):
    rows = [wrap(encoded(pixels, tmp_path)) for pixels in GREY]
    parquet.write_table(
        pa.table({"image": rows, "label": LABELS, "kind": 2 - LABELS}), tmp_path / "a.parquet"
    )
    check_grey(tmp_path / "a.parquet")
    assert np.array_equal(opened(tmp_path / "a.parquet", label_column="kind")[1], 2 - LABELS)


def test_where_keeps_the_rows_with_a_value(tmp_path):
    split = np.array([0, 0, 0, 1, 1, 1])
    np.savez(tmp_path / "a.npz", x=GREY, y=LABELS, split=split)
    found = readers.read_npz(tmp_path / "a.npz", ("split", 1))
    assert np.array_equal(found.images, GREY[3:, None])
    assert np.array_equal(found.labels, LABELS[3:])
    words = ["train" if each else "test" for each in split]
    rows = [encoded(pixels, tmp_path) for pixels in GREY]
    parquet.write_table(
        pa.table({"image": rows, "label": LABELS, "split": words}), tmp_path / "a.parquet"
    )
    found = readers.read_parquet(tmp_path / "a.parquet", row_filter=("split", "train"))
    assert np.array_equal(found.images, GREY[3:, None])
    with pytest.raises(DataError, match="no images"):
        readers.read_parquet(tmp_path / "a.parquet", row_filter=("split", "other"))
    with pytest.raises(DataError, match="KeyError"):
        readers.read_npz(tmp_path / "a.npz", ("part", 1))


def test_resize_brings_mixed_sizes_together(tmp_path):
    rows = [encoded(pixels, tmp_path) for pixels in (GREY[0], GREY[1, :4, :4], GREY[2, :, :3])]
    parquet.write_table(pa.table({"image": rows, "label": [0, 1, 2]}), tmp_path / "a.parquet")
    for label, row in enumerate(rows):
        (tmp_path / "photos" / str(label)).mkdir(parents=True)
        (tmp_path / "photos" / str(label) / "1.png").write_bytes(row)
    by_row = opened(tmp_path / "a.parquet", resize=6)
    by_file = opened(tmp_path / "photos", resize=6)
    assert by_row[2].shape == (1, 6, 6)
    assert np.array_equal(by_row[0], by_file[0])
    with pytest.raises(DataError, match="resize"):
        load_dataset(tmp_path / "photos")


def test_pictures_of_every_mode(tmp_path):
    """One bit, alpha, palettes and 16 bits are brought to 8 bits of grey or colour; 16 bits are scaled, not cut off."""
    deep = (GREY[0].astype(np.uint16) << 8) + 77
    grey = {"1": 1, "LA": 1, "P": 3, "RGBA": 3}
    for mode, channels in grey.items():
        Image.fromarray(GREY[0]).convert(mode).save(tmp_path / f"{mode}.png")
        assert decode_image(tmp_path / f"{mode}.png", mode).shape == (channels, 7, 5)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert np.array_equal(decode_image(tmp_path / "deep.png", "deep"), GREY[:1])
    assert decode_image(encoded(COLOUR[0], tmp_path, "JPEG"), "jpeg").shape == (3, 7, 5)


def test_declared_facts_are_kept_and_held(tmp_path):
    np.savez(tmp_path / "a.npz", x=GREY, y=LABELS)
    spec = load_dataset(tmp_path / "a.npz", shape=(1, 7, 5), num_classes=3, public_size=True).spec
    assert (spec.shape, spec.num_classes, spec.size) == ((1, 7, 5), 3, 6)
    with pytest.raises(DataError, match="class 3 has no records"):
        load_dataset(tmp_path / "a.npz", num_classes=4)
    with pytest.raises(DataError, match="labels go outside"):
        load_dataset(tmp_path / "a.npz", num_classes=2)


def test_class_sizes_are_secret_unless_declared():
    assert load_dataset("digits").spec.class_sizes is None
    spec = load_dataset("digits", public_classes=True).spec
    assert sum(spec.class_sizes) == spec.size == load_dataset("digits").spec.size
    assert spec.class_sizes == tuple(
        load_dataset("digits", public=True).records().labels.bincount().tolist()
    )


def test_a_path_is_known_by_where_it_lies(tmp_path, monkeypatch):
    """The ledger is found by the name, so every way of writing the path must give the same one."""
    np.savez(tmp_path / "a.npz", x=GREY, y=LABELS)
    (tmp_path / "link.npz").symlink_to(tmp_path / "a.npz")
    monkeypatch.chdir(tmp_path)
    names = {
        load_dataset(path).name
        for path in (
            "a.npz",
            "./a.npz",
            tmp_path / "a.npz",
            tmp_path / "x" / ".." / "a.npz",
            "link.npz",
        )
        if Path(path).exists()
    }
    assert names == {str((tmp_path / "a.npz").resolve())}
    assert isinstance(load_dataset("a.npz"), Sensitive)


@pytest.mark.parametrize("resize", [0, -3, 4097])
def test_resize_out_of_range(tmp_path, resize):
    with pytest.raises(SettingError, match="4096"):
        load_dataset(tmp_path, resize=resize)


def test_existing_suggests(tmp_path):
    assert require_existing_path(str(tmp_path)) == tmp_path
    with pytest.raises(DataError, match="did you mean 'digits'"):
        require_existing_path("digit")
    with pytest.raises(DataError, match="built-in data set"):
        require_existing_path("a\0b")


def test_parquet_needs_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match=r"privot\[parquet\]"):
        load_dataset(tmp_path / "a.parquet")


def test_a_description_takes_declared_class_sizes(tmp_path):
    (mine := tmp_path / "mine.npz").touch()  # nothing of it is read
    found = describe_dataset(str(mine), shape=(1, 4, 4), class_sizes=(5, 7))
    assert (found.size, found.num_classes, found.class_sizes) == (12, 2, (5, 7))
    assert (
        describe_dataset(str(mine), shape=(1, 4, 4), class_sizes=(5, 7), size=12, num_classes=2)
        == found
    )


def floats(tmp_path, images, name="floats.npz"):
    np.savez(tmp_path / name, x=images.astype(np.float32), y=np.arange(len(images)) % 2)
    return tmp_path / name


def test_a_repair_is_for_few_that_stray(tmp_path):
    images = np.full((6, 3, 4, 4), 0.5)
    # at the ends, and not beyond
    images[:, :, 0, 0] = 0.0
    images[:, :, 0, 1] = 1.0
    for strays, value in ((3, 1.5), (3, -0.5), (0, 0.5)):
        some = images.copy()
        some[:strays] = value
        assert (
            len(
                load_dataset(
                    floats(tmp_path, some, f"{strays}{value}.npz"), public=True, repair=True
                )
                .records()
                .labels
            )
            == 6
        )
    images[:4] = 1.5
    with pytest.raises(DataError, match="of another scale"):
        load_dataset(floats(tmp_path, images), public=True, repair=True)
    images[:4, 1:] = 0.5
    images[:4, 0] = -0.1
    with pytest.raises(DataError, match="of another scale"):
        load_dataset(floats(tmp_path, images, "below.npz"), public=True, repair=True)


def test_a_class_folder_without_images_is_missed_even_if_it_is_the_last(tmp_path):
    for name in ("cats", "dogs", "owls"):
        (tmp_path / name).mkdir()
    for name in ("cats", "dogs"):
        Image.fromarray(GREY[0]).save(tmp_path / name / "one.png")
    with pytest.raises(DataError, match=r"class 2|owls"):
        load_dataset(tmp_path, public=True)


def test_arrays_of_numpy_s_second_version_are_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "two.npz", "w") as archive:
        for name, array in (("x", GREY), ("y", LABELS)):
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array, version=(2, 0))
    check_grey(tmp_path / "two.npz")


def test_a_missing_column_of_labels_says_how_to_name_it(tmp_path):
    table = {"image": [encoded(GREY[0], tmp_path)], "class": [0]}
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="--label"):
        load_dataset(tmp_path / "a.parquet", public=True)
    parquet.write_table(pa.table({"label": [0]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="no column 'image'") as refused:
        load_dataset(tmp_path / "b.parquet", public=True)
    assert "--label" not in str(refused.value)
