"""Folders and tables in which a record could be lost, or count twice: refused in one line that names it."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from privot.data import image_folder, load_dataset
from privot.data.client_data import load_client_data
from privot.data.tabular import read_table
from privot.errors import DataError


def picture(path, value=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4), value, np.uint8)).save(path, "PNG")
    return path


@pytest.fixture
def photos(tmp_path):
    """Two classes of two images each."""
    for name in ("a", "b"):
        for number in (1, 2):
            picture(tmp_path / "photos" / name / f"{number}.png", number)
    return tmp_path / "photos"


def refused(folder, *needles):
    """Both readers of folders refuse it, in one line with these words."""
    for read in (load_dataset, lambda path: load_client_data(path, shape=(1, 4, 4), num_classes=2)):
        with pytest.raises(DataError) as error:
            read(folder)
        text = str(error.value)
        assert "\n" not in text
        assert all(each in text for each in needles), text


@pytest.mark.parametrize(
    ("one", "two"),
    [("Cat", "cat"), ("1", "01"), ("7", "007"), ("straße", "STRASSE"), ("caf\u00e9", "cafe\u0301")],
)
def test_class_folders_that_differ_only_in_case_or_zeros_are_refused(tmp_path, one, two):
    for name in (one, two, "other"):
        picture(tmp_path / "photos" / name / "1.png")
    refused(tmp_path / "photos", one, two, "differ only in case or leading zeros")


@pytest.mark.parametrize("name", ["1.PNG", "1.Png"])
def test_files_that_differ_only_in_case_are_refused(photos, name):
    picture(photos / "a" / name)
    refused(photos, "1.png", name, "differ only in case")


def test_names_that_differ_in_more_are_read(photos):
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(photos / "a" / "1.jpg")  # the same stem
    picture(photos / "a" / "01.png")
    picture(photos / "b" / "1 copy.png")
    assert len(load_dataset(photos, public=True)) == 7


def test_links_inside_the_folder_are_refused(photos):
    """One record would count twice, and one person would have two."""
    (photos / "b" / "3.png").symlink_to(photos / "a" / "1.png")
    refused(photos, "3.png", "links are not followed")


def test_links_of_class_folders_are_refused(photos, tmp_path):
    for target in (photos / "a", tmp_path / "elsewhere", tmp_path / "nowhere"):
        picture(tmp_path / "elsewhere" / "1.png")
        (photos / "c").symlink_to(target)
        refused(photos, "photos/c", "links are not followed")
        (photos / "c").unlink()


def test_the_folder_itself_may_be_a_link(photos, tmp_path):
    (tmp_path / "link").symlink_to(photos)
    assert load_dataset(tmp_path / "link").name == str(photos.resolve())


def test_hard_links_inside_the_folder_are_refused(photos, tmp_path):
    os.link(photos / "a" / "1.png", tmp_path / "backup.png")  # a second name outside is no harm
    assert len(load_dataset(photos, public=True)) == 4
    os.link(photos / "a" / "1.png", photos / "b" / "9.png")
    refused(photos, "b/9.png", "a/1.png", "count twice")


def test_a_picture_beside_the_class_folders_is_not_left_out_unsaid(photos):
    picture(photos / "loose.png")
    refused(photos, "loose.png", "beside the class folders")


def test_an_empty_class_is_named(photos):
    (photos / "empty").mkdir()
    refused(photos, "photos/empty", "no PNG or JPEG")


def test_a_file_that_may_not_be_opened_is_named(photos, monkeypatch):
    """Simulated, since tests may run as root, who may open everything."""
    really = open

    def guarded(file, *args, **more):
        if Path(file).name == "2.png":
            raise PermissionError(13, "Permission denied", str(file))
        return really(file, *args, **more)

    monkeypatch.setattr("builtins.open", guarded)
    refused(photos, "a/2.png", "Permission denied", "permissions")


@pytest.mark.parametrize("name", ["photos", "b"])
def test_a_folder_that_may_not_be_listed_is_named(photos, monkeypatch, name):
    really = Path.iterdir

    def guarded(path):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return really(path)

    monkeypatch.setattr(Path, "iterdir", guarded)
    with pytest.raises(
        DataError, match=f"{name}: cannot be listed .Permission denied.. Check its permissions"
    ):
        image_folder.read_folder(photos)


def test_an_npz_with_two_arrays_of_one_name_is_refused(tmp_path):
    import io
    import zipfile

    def saved(array):
        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()

    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", saved(np.zeros((4, 8, 8), np.uint8)))
        archive.writestr("y.npy", saved(np.arange(4) % 2))
        archive.writestr("x", saved(np.ones((4, 8, 8), np.uint8)))
    with pytest.raises(DataError, match="two of its arrays have the same name"):
        load_dataset(tmp_path / "x.npz")


@pytest.mark.parametrize(
    "first", ["18.5,2", "1,0", "1e3, -2", '"1","2"', "nan,1", "18,", "18,NA", "\ufeff18,2"]
)
def test_a_first_line_of_numbers_is_no_line_of_names(tmp_path, first):
    (tmp_path / "people.csv").write_text(f"{first}\n19,1\n20,0\n", encoding="utf-8")
    with pytest.raises(
        DataError, match=r"people\.csv: its first line holds numbers, not names.*--no-header"
    ):
        read_table(tmp_path / "people.csv")


def test_a_table_without_names_is_read_whole_if_that_is_said(tmp_path):
    (tmp_path / "people.csv").write_text("18,2\n19,1\n20,0\n")
    assert read_table(tmp_path / "people.csv", has_header=False).spec.size == 3


@pytest.mark.parametrize("first", ["age,kind", "id,2019", "# age,kind", "\ufeffage,kind"])
def test_a_line_of_names_is_passed_over(tmp_path, first):
    (tmp_path / "people.csv").write_text(f"{first}\n19,1\n20,0\n", encoding="utf-8")
    assert read_table(tmp_path / "people.csv").spec.size == 2


def test_no_line_of_a_table_is_passed_over_as_a_comment(tmp_path):
    (tmp_path / "people.csv").write_text("age,kind\n19,1\n#20,0\n21,1\n")
    with pytest.raises(DataError, match="cannot be read as a table of numbers"):
        read_table(tmp_path / "people.csv")


@pytest.mark.parametrize(
    ("labels", "mend"),
    [
        (np.eye(4, dtype=int), "labels.argmax(1)"),
        (np.eye(4, dtype=np.float32), "labels.argmax(1)"),
        (np.arange(4)[:, None] % 2, "labels[:, 0]"),
        (np.arange(4) / 2, "numpy.unique"),
    ],
)
def test_the_advice_about_labels_leads_somewhere(tmp_path, labels, mend):
    """What is advised, done, gives labels that are read."""
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 8, 8), np.uint8), y=labels)
    with pytest.raises(DataError) as error:
        load_dataset(tmp_path / "x.npz")
    assert mend in str(error.value)
    done = {"labels.argmax(1)": lambda: labels.argmax(1), "labels[:, 0]": lambda: labels[:, 0]}.get(
        mend, lambda: np.unique(labels, return_inverse=True)[1]
    )()
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 8, 8), np.uint8), y=done)
    load_dataset(tmp_path / "x.npz")
