"""Folders and tables in which a record could be lost, or count twice: refused in one line that names it."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from privot.data import image_folder, load_dataset
from privot.data.client_data import load_client_data
from privot.data.tabular import SensitiveTable, read_table
from privot.errors import DataError
from privot.local.channels import Laplace, Projection
from privot.local.dataset import PrivatizedDataset
from privot.local.privatize import privatize


def save_image(path, value=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4), value, np.uint8)).save(path, "PNG")


@pytest.fixture
def photos(tmp_path):
    """Two classes of two images each."""
    for name in ("a", "b"):
        for number in (1, 2):
            save_image(tmp_path / "photos" / name / f"{number}.png", number)
    return tmp_path / "photos"


def check_refusal(folder, *words):
    """Both readers of folders refuse it, in one line with these words."""
    for read in (load_dataset, lambda path: load_client_data(path, shape=(1, 4, 4), num_classes=2)):
        with pytest.raises(DataError) as error:
            read(folder)
        assert "\n" not in str(error.value)
        assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("one", "two"),
    [("Cat", "cat"), ("1", "01"), ("7", "007"), ("straße", "STRASSE"), ("caf\u00e9", "cafe\u0301")],
)
def test_class_folders_that_differ_only_in_case_or_zeros_are_refused(tmp_path, one, two):
    for name in (one, two, "other"):
        save_image(tmp_path / "photos" / name / "1.png")
    check_refusal(tmp_path / "photos", one, two, "differ only in case or leading zeros")


def test_files_that_differ_only_in_case_are_refused_and_others_read(photos):
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(photos / "a" / "1.jpg")  # the same stem
    save_image(photos / "a" / "01.png")
    save_image(photos / "b" / "1 copy.png")
    assert len(load_dataset(photos, public=True)) == 7
    save_image(photos / "a" / "1.Png")
    check_refusal(photos, "1.png", "1.Png", "differ only in case")


def test_links_inside_the_folder_are_refused(photos, tmp_path):
    """One record would count twice, and one person would have two."""
    (tmp_path / "link").symlink_to(photos)
    assert load_dataset(tmp_path / "link").name == str(photos.resolve())  # itself may be a link
    save_image(tmp_path / "elsewhere" / "1.png")
    for target in (photos / "a", tmp_path / "elsewhere", tmp_path / "nowhere"):
        (photos / "c").symlink_to(target)
        check_refusal(photos, "photos/c", "links are not followed")
        (photos / "c").unlink()
    (photos / "b" / "3.png").symlink_to(photos / "a" / "1.png")
    check_refusal(photos, "3.png", "links are not followed")


def test_hard_links_inside_the_folder_are_refused(photos, tmp_path):
    os.link(photos / "a" / "1.png", tmp_path / "backup.png")  # a second name outside is no harm
    assert len(load_dataset(photos, public=True)) == 4
    os.link(photos / "a" / "1.png", photos / "b" / "9.png")
    check_refusal(photos, "b/9.png", "a/1.png", "count twice")


def test_what_would_be_left_out_is_named(photos):
    save_image(photos / "loose.png")
    check_refusal(photos, "loose.png", "beside the class folders")
    (photos / "loose.png").unlink()
    (photos / "empty").mkdir()
    check_refusal(photos, "photos/empty", "no PNG or JPEG")


def test_a_file_that_may_not_be_opened_is_named(photos, monkeypatch):
    """Simulated, since tests may run as root, who may open everything."""
    real_open = open

    def open_guarded(file, *arguments, **options):
        if Path(file).name == "2.png":
            raise PermissionError(13, "Permission denied", str(file))
        return real_open(file, *arguments, **options)

    monkeypatch.setattr("builtins.open", open_guarded)
    check_refusal(photos, "a/2.png", "Permission denied", "permissions")


@pytest.mark.parametrize("name", ["photos", "b"])
def test_a_folder_that_may_not_be_listed_is_named(photos, monkeypatch, name):
    real_iterdir = Path.iterdir

    def list_guarded(path):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return real_iterdir(path)

    monkeypatch.setattr(Path, "iterdir", list_guarded)
    message = f"{name}: cannot be listed .Permission denied.. Check its permissions"
    with pytest.raises(DataError, match=message):
        image_folder.read_folder(photos)


def test_an_npz_with_two_arrays_of_one_name_is_refused(tmp_path):
    images = np.zeros((4, 8, 8), np.uint8)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for name, array in (("x.npy", images), ("y.npy", np.arange(4) % 2), ("x", images + 1)):
            np.save(buffer := io.BytesIO(), array)
            archive.writestr(name, buffer.getvalue())
    with pytest.raises(DataError, match="two of its arrays have the same name"):
        load_dataset(tmp_path / "x.npz")


@pytest.mark.parametrize("lost", [1, 7, 16])
def test_a_truncated_header_is_named(tmp_path, lost):
    channel = Laplace.calibrate(1.0, projection=Projection(shape=(1, 1, 2)))
    dataset = privatize(SensitiveTable(np.zeros((3, 2))), channel, ledger=tmp_path / "l.jsonl")
    raw = dataset.save(tmp_path / "sent.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(raw[: 8 + int.from_bytes(raw[:8], "little") - lost])
    with pytest.raises(DataError, match="is truncated"):
        PrivatizedDataset.load(tmp_path / "cut.safetensors")


# Tables


@pytest.mark.parametrize(
    "first", ["18.5,2", "1,0", "1e3, -2", '"1","2"', "nan,1", "18,", "18,NA", "\ufeff18,2"]
)
def test_a_first_line_of_numbers_is_no_line_of_names(tmp_path, first):
    (tmp_path / "people.csv").write_text(f"{first}\n19,1\n20,0\n", encoding="utf-8")
    message = r"people\.csv: its first line holds numbers, not names.*--no-header"
    with pytest.raises(DataError, match=message):
        read_table(tmp_path / "people.csv")


@pytest.mark.parametrize(
    ("first", "options", "size"),
    [
        ("18,2", {"has_header": False}, 3),
        ("age,kind", {}, 2),
        ("id,2019", {}, 2),
        ("# age,kind", {}, 2),
        ("\ufeffage,kind", {}, 2),
    ],
)
def test_a_line_of_names_is_skipped(tmp_path, first, options, size):
    (tmp_path / "people.csv").write_text(f"{first}\n19,1\n20,0\n", encoding="utf-8")
    assert read_table(tmp_path / "people.csv", **options).spec.size == size


def test_no_line_of_a_table_is_skipped_as_a_comment(tmp_path):
    (tmp_path / "people.csv").write_text("age,kind\n19,1\n#20,0\n21,1\n")
    with pytest.raises(DataError, match="cannot be read as a table of numbers"):
        read_table(tmp_path / "people.csv")


@pytest.mark.parametrize(
    ("labels", "advice", "follow"),
    [
        (np.eye(4, dtype=int), "labels.argmax(1)", lambda y: y.argmax(1)),
        (np.eye(4, dtype=np.float32), "labels.argmax(1)", lambda y: y.argmax(1)),
        (np.arange(4)[:, None] % 2, "labels[:, 0]", lambda y: y[:, 0]),
        (np.arange(4) / 2, "numpy.unique", lambda y: np.unique(y, return_inverse=True)[1]),
    ],
)
def test_the_advice_about_labels_gives_labels_that_are_read(tmp_path, labels, advice, follow):
    images = np.zeros((4, 8, 8), np.uint8)
    np.savez(tmp_path / "x.npz", x=images, y=labels)
    with pytest.raises(DataError) as error:
        load_dataset(tmp_path / "x.npz")
    assert advice in str(error.value)
    np.savez(tmp_path / "x.npz", x=images, y=follow(labels))
    load_dataset(tmp_path / "x.npz")
