"""Every reader on small files made here: the same images come back whatever they were stored in."""

import gzip
import struct
import sys
import zipfile
import zlib

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from privot.data import Public, Sensitive, load_dataset, readers
from privot.data.catalog import require_existing_path
from privot.data.images import decode_image, to_channels_first
from privot.errors import DataError, SettingError

LABELS = np.array([0, 1, 2, 0, 1, 2])
# neither square nor like its own transpose
GREY = np.random.default_rng(0).integers(0, 256, (6, 7, 5)).astype(np.uint8)
COLOR = np.random.default_rng(1).integers(0, 256, (6, 7, 5, 3)).astype(np.uint8)


def read(path, **options):
    dataset = load_dataset(path, public=True, **options)
    assert isinstance(dataset, Public)
    images, labels = dataset.records()
    return (images * 255).round().byte().numpy(), labels.numpy(), dataset.spec


def check_grey(path):
    images, labels, spec = read(path)
    assert np.array_equal(images, GREY[:, None])
    assert np.array_equal(labels, LABELS)
    assert (spec.shape, spec.num_classes, spec.size) == ((1, 7, 5), 3, None)


def encode(pixels, root, form="PNG"):
    Image.fromarray(pixels).save(root / "one", form)
    return (root / "one").read_bytes()


def save_image(path, value=0, dtype=np.uint8, form=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((5, 5), value, dtype)).save(path, form)


def make_folder(path, *names):
    """A class folder for every name, with one image as bright as its rank in the alphabet."""
    for value, name in enumerate(sorted(names)):
        save_image(path / name / "1.png", value)
    return path


def write_parquet(path, **columns):
    parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx(tmp_path, suffix):
    pack = gzip.compress if suffix else bytes
    for name, array in (("images-idx3", GREY), ("labels-idx1", LABELS.astype(np.uint8))):
        head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        (tmp_path / f"train-{name}-ubyte{suffix}").write_bytes(pack(head + array.tobytes()))
    check_grey(tmp_path / f"train-images-idx3-ubyte{suffix}")


# Torch reads neither long nor big-endian floats, and would say so only after the charge.
FLOATS = ("float16", "float32", "float64", "longdouble", ">f4", ">f8")
NPZ = {
    "x and y": {"x": GREY, "y": LABELS, "other": np.array(["words", "are skipped"])},
    "images and labels": {"images": GREY, "labels": LABELS},
    "both pairs": {"x": GREY, "y": LABELS, "images": GREY[:, :2], "labels": LABELS},
    "Fortran order": {"x": np.asfortranarray(GREY), "y": LABELS},
    "channels last": {"x": GREY[..., None], "y": LABELS},
    **{kind: {"x": (GREY / 255).astype(kind), "y": LABELS} for kind in FLOATS},
    **{
        kind: {"x": GREY, "y": LABELS.astype(kind)}
        for kind in ("int8", "uint16", "int32", ">i4", "uint64")
    },
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("name", NPZ)
def test_npz(tmp_path, name, save):
    save(tmp_path / "a.npz", **NPZ[name])
    check_grey(tmp_path / "a.npz")


def test_arrays_of_the_second_version_of_numpy_are_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "two.npz", "w") as archive:
        for name, array in (("x", GREY), ("y", LABELS)):
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array, version=(2, 0))
    check_grey(tmp_path / "two.npz")


@pytest.mark.parametrize("images", [COLOR, COLOR.transpose(0, 3, 1, 2)])
def test_npz_with_channels_first_or_last(tmp_path, images):
    np.savez(tmp_path / "a.npz", x=images, y=LABELS)
    found, _, spec = read(tmp_path / "a.npz")
    assert np.array_equal(found, COLOR.transpose(0, 3, 1, 2))
    assert spec.shape == (3, 7, 5)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 5, 4), (2, 1, 5, 4)),
        ((2, 5, 4, 3), (2, 3, 5, 4)),
        ((2, 5, 4, 1), (2, 1, 5, 4)),
        ((2, 3, 5, 4), (2, 3, 5, 4)),
        ((2, 1, 5, 3), (2, 1, 5, 3)),
        ((2, 5, 4, 2), (2, 5, 4, 2)),
        ((2, 5), None),
        ((1, 2, 3, 4, 5), None),
    ],
)
def test_where_the_channels_are(shape, expected):
    if expected:
        assert to_channels_first(np.zeros(shape), "x").shape == expected
    else:
        with pytest.raises(DataError, match="of shape"):
            to_channels_first(np.zeros(shape), "x")


def test_three_rows_of_pixels_are_taken_for_channels_and_a_declared_shape_says_no(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((6, 3, 5, 3), np.uint8), y=LABELS)
    assert load_dataset(tmp_path / "a.npz").spec.shape == (3, 5, 3)
    with pytest.raises(DataError, match="declared"):
        load_dataset(tmp_path / "a.npz", shape=(3, 3, 5))


# Folders


@pytest.mark.parametrize("suffix", ["png", "PNG"])
def test_folder_of_class_folders(tmp_path, suffix):
    names = ("ant", "bee", "cat")
    for index, (pixels, label) in enumerate(zip(GREY, LABELS, strict=True)):
        path = tmp_path / "photos" / names[label] / f"{index}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(pixels, tmp_path))
    (tmp_path / "photos" / "ant" / "readme.txt").write_text("not an image, and no harm")
    (tmp_path / "photos" / ".git").mkdir()
    images, labels, spec = read(tmp_path / "photos")
    order = np.argsort(LABELS, kind="stable")
    assert np.array_equal(images, GREY[order][:, None])
    assert np.array_equal(labels, LABELS[order])
    assert spec.class_names == names


def test_folders_that_are_numbers_are_those_numbers(tmp_path):
    images, labels, spec = read(make_folder(tmp_path / "ten", *map(str, range(11))))
    assert (labels.tolist(), spec.class_names) == (list(range(11)), None)
    # "10" comes third in the alphabet
    assert images[:, 0, 0, 0].tolist() == [0, 1, *range(3, 11), 2]
    assert read(make_folder(tmp_path / "some", "3", "7", "10"))[2].class_names == ("3", "7", "10")


@pytest.mark.parametrize(
    ("class_names", "folders", "labels"),
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
        (("wolf", "cat", "dog"), ("wolf", "cat", "dog"), [1, 2, 0]),
        (("wolf", "cat", "dog"), ("wolf", "cat", "dog", "cow"), None),
    ],
)
def test_declared_class_names_number_the_folders(tmp_path, class_names, folders, labels):
    make_folder(tmp_path / "it", *folders)
    options = {"class_names": class_names, "num_classes": 3}
    if labels is None:
        with pytest.raises(DataError, match="is not one of the known classes"):
            load_dataset(tmp_path / "it", **options)
        return
    images, found, spec = read(tmp_path / "it", **options)
    assert (images[:, 0, 0, 0].tolist(), found.tolist()) == ([0, 1, 2], labels)
    if class_names == folders and "wolf" in class_names:
        assert spec.class_names == class_names


def test_a_class_without_images_is_missed(tmp_path):
    class_names = ("wolf", "cat", "dog")
    few = make_folder(tmp_path / "few", "cat", "dog")
    with pytest.raises(DataError, match="class 'wolf' has no records"):
        load_dataset(few, class_names=class_names, num_classes=3)
    (few / "owls").mkdir()  # even if it is the last
    with pytest.raises(DataError, match=r"class 2|owls"):
        load_dataset(few, public=True)


def test_images_that_are_not_read_are_named(tmp_path):
    folder = make_folder(tmp_path / "photos", "a", "b") / "a"
    (folder / "Thumbs.db").touch()
    (folder / ".hidden.tiff").touch()
    save_image(folder / "3.jfif", form="JPEG")
    assert len(read(tmp_path / "photos")[1]) == 3
    message = "a class folder holds PNG and JPEG images only, and nothing is left out silently"
    for name in ("2.TIFF", "2.dcm", "2.avif"):
        (folder / name).touch()
        with pytest.raises(DataError, match=f"{name}: {message}"):
            load_dataset(tmp_path / "photos")
        (folder / name).unlink()
    (folder / "patient").mkdir()
    with pytest.raises(DataError, match="patient: a class folder holds"):
        load_dataset(tmp_path / "photos")


def test_twelve_bits_in_sixteen_would_be_black(tmp_path):
    save_image(tmp_path / "a" / "1.png", 100, np.uint16)
    save_image(tmp_path / "b" / "1.png", 4096, np.uint16)
    assert read(tmp_path)[0].max() == 16
    save_image(tmp_path / "b" / "1.png", 4095, np.uint16)
    with pytest.raises(DataError, match="16 bits whose values all lie below 4096"):
        load_dataset(tmp_path)
    save_image(tmp_path / "a" / "2.png")  # of 8 bits: then they are not all of such a scanner
    load_dataset(tmp_path)


def test_twelve_bits_in_sixteen_of_a_color_image_too(tmp_path):
    def make_chunk(kind, data):
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    for name, value in (("a", 100), ("b", 4000)):
        rows = b"".join(b"\0" + struct.pack(">12H", *[value] * 12) for _ in range(4))
        chunks = [
            make_chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)),
            make_chunk(b"IDAT", zlib.compress(rows)),
            make_chunk(b"IEND", b""),
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    with pytest.raises(DataError, match="16 bits whose values all lie below 4096"):
        load_dataset(tmp_path)


def test_images_of_every_mode(tmp_path):
    """One bit, alpha, palettes and 16 bits are brought to 8 bits of grey or color; 16 bits are scaled, not cut off."""
    path = tmp_path / "one.png"
    for mode, channels in {"1": 1, "LA": 1, "P": 3, "RGBA": 3}.items():
        Image.fromarray(GREY[0]).convert(mode).save(path)
        assert decode_image(path, mode).shape == (channels, 7, 5)
    deep = np.array([[0, 255], [256, 65535]], np.uint16)
    for pixels, expected in (
        ((GREY[0].astype(np.uint16) << 8) + 77, GREY[0]),
        (deep, [[0, 0], [1, 255]]),
    ):
        Image.fromarray(pixels).save(path)
        assert np.array_equal(decode_image(path, "deep"), [expected])
    assert decode_image(encode(COLOR[0], tmp_path, "JPEG"), "jpeg").shape == (3, 7, 5)


# Parquet


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: {"bytes": data, "path": None}])
def test_parquet_of_bytes_or_of_structures(tmp_path, wrap):
    rows = [wrap(encode(pixels, tmp_path)) for pixels in GREY]
    path = write_parquet(tmp_path / "a.parquet", image=rows, label=LABELS, kind=2 - LABELS)
    check_grey(path)
    assert np.array_equal(read(path, label_column="kind")[1], 2 - LABELS)


def test_parquet_needs_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match=r"privot\[parquet\]"):
        load_dataset(tmp_path / "a.parquet")


def test_a_missing_column_of_labels_says_how_to_name_it(tmp_path):
    image = [encode(GREY[0], tmp_path)]
    path = write_parquet(tmp_path / "a.parquet", **{"image": image, "class": [0]})
    with pytest.raises(DataError, match="--label"):
        load_dataset(path, public=True)
    with pytest.raises(DataError, match="no column 'image'") as error:
        load_dataset(write_parquet(path, label=[0]), public=True)
    assert "--label" not in str(error.value)


def test_a_row_filter_keeps_the_rows_with_a_value(tmp_path):
    split = np.array([0, 0, 0, 1, 1, 1])
    np.savez(tmp_path / "a.npz", x=GREY, y=LABELS, split=split)
    rows = [encode(pixels, tmp_path) for pixels in GREY]
    words = ["train" if number else "test" for number in split]
    path = write_parquet(tmp_path / "a.parquet", image=rows, label=LABELS, split=words)
    for arrays in (
        readers.read_npz(tmp_path / "a.npz", ("split", 1)),
        readers.read_parquet(path, row_filter=("split", "train")),
    ):
        assert np.array_equal(arrays.images, GREY[3:, None])
        assert np.array_equal(arrays.labels, LABELS[3:])
    with pytest.raises(DataError, match="no images"):
        readers.read_parquet(path, row_filter=("split", "other"))
    with pytest.raises(DataError, match="KeyError"):
        readers.read_npz(tmp_path / "a.npz", ("part", 1))


# Any source


def test_resize_brings_mixed_sizes_together(tmp_path):
    rows = [encode(pixels, tmp_path) for pixels in (GREY[0], GREY[1, :4, :4], GREY[2, :, :3])]
    path = write_parquet(tmp_path / "a.parquet", image=rows, label=[0, 1, 2])
    for label, row in enumerate(rows):
        (tmp_path / "photos" / str(label)).mkdir(parents=True)
        (tmp_path / "photos" / str(label) / "1.png").write_bytes(row)
    by_row, by_file = (read(source, resize=6) for source in (path, tmp_path / "photos"))
    assert by_row[2].shape == (1, 6, 6)
    assert np.array_equal(by_row[0], by_file[0])
    with pytest.raises(DataError, match="resize"):
        load_dataset(tmp_path / "photos")
    for resize in (0, -3, 4097):
        with pytest.raises(SettingError, match="4096"):
            load_dataset(tmp_path, resize=resize)


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
    labels = load_dataset("digits", public=True).records().labels
    assert spec.class_sizes == tuple(labels.bincount().tolist())


def test_a_path_is_identified_by_its_target(tmp_path, monkeypatch):
    """The ledger is looked up by the name, so every way of writing the path must give the same one."""
    np.savez(tmp_path / "a.npz", x=GREY, y=LABELS)
    (tmp_path / "link.npz").symlink_to(tmp_path / "a.npz")
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in (
        "a.npz",
        "./a.npz",
        tmp_path / "a.npz",
        tmp_path / "x" / ".." / "a.npz",
        "link.npz",
    ):
        dataset = load_dataset(path)
        assert dataset.name == str((tmp_path / "a.npz").resolve())
        assert isinstance(dataset, Sensitive)


def test_a_missing_path_suggests_a_name(tmp_path):
    assert require_existing_path(str(tmp_path)) == tmp_path
    with pytest.raises(DataError, match="did you mean 'digits'"):
        require_existing_path("digit")
    with pytest.raises(DataError, match="built-in data set"):
        require_existing_path("a\0b")


@pytest.mark.parametrize(
    ("strays", "value", "is_refused"),
    [(3, 1.5, False), (3, -0.5, False), (0, 0.5, False), (4, 1.5, True), (4, -0.1, True)],
)
def test_a_repair_is_for_few_that_stray(tmp_path, strays, value, is_refused):
    images = np.full((6, 3, 4, 4), 0.5, np.float32)
    images[:, :, 0, :2] = (0.0, 1.0)  # at the ends, and not beyond
    images[:strays, 0] = value
    np.savez(tmp_path / "a.npz", x=images, y=LABELS)
    if is_refused:
        with pytest.raises(DataError, match="of another scale"):
            load_dataset(tmp_path / "a.npz", public=True, repair=True)
    else:
        assert len(load_dataset(tmp_path / "a.npz", public=True, repair=True)) == 6
