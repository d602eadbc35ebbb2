"""Samples beside their nearest records: copies are seen by either distance, and stay internal."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.factories import GAUSSIAN, internal_folder, make_release, read_json, read_visible_text
from support.report_pages import list_image_sources, write_toy_report

from privot.attacks.membership import control_data
from privot.data.dataset import Public, Records, Sensitive
from privot.data.spec import Spec
from privot.errors import ReleaseError
from privot.measures import image_similarity
from privot.measures.networks.lpips import Lpips
from privot.nets.generators.conv import initialize_weights
from privot.privacy.guarantee import Guarantee
from privot.release import Release
from privot.release.artifact import Artifact
from privot.report import OwnerInputs, nearest_records
from privot.report.images import encode_data_uri

pytestmark = pytest.mark.usefixtures("one_thread")
SPEC = Spec((1, 8, 8), 10)
PLANTED = 5  # classes whose released image is a record


@pytest.fixture
def random_lpips(monkeypatch):
    """A network of LPIPS with drawn weights, so that nothing depends on a file."""
    net = initialize_weights(Lpips(), torch.Generator().manual_seed(0)).requires_grad_(False)
    for head in net.heads:
        head.fill_(1.0)
    monkeypatch.setattr(
        image_similarity, "find_lpips_weights", lambda: (Path("features"), Path("heads"))
    )
    monkeypatch.setattr(
        image_similarity, "_load_lpips_files", lambda features, heads, device: net.to(device)
    )


@pytest.fixture(scope="module")
def planted():
    """(release, data, positions): 150 digits, a set of one image per class; five are records."""
    other, _, (images, labels) = control_data.load_digit_splits(0)
    records = Records(images[:150], labels[:150])
    copies = [int((records.labels == label).nonzero()[0]) for label in range(PLANTED)]
    fresh = [int((other.labels == label).nonzero()[0]) for label in range(PLANTED, 10)]
    images = torch.cat([records.images[copies], other.images[fresh]])
    artifact = Artifact.from_images(images, torch.arange(10))
    metadata = {"plan": GAUSSIAN.to_json(), "event": str(GAUSSIAN.event())}
    release = Release(artifact, Guarantee.from_plan(GAUSSIAN, 1e-5), SPEC, metadata)
    data = Sensitive(records.images.numpy(), records.labels.numpy(), SPEC, name="digits")
    return release, data, copies


# The search


def test_the_nearest_records_are_the_same_in_chunks_of_any_size(monkeypatch):
    monkeypatch.setitem(nearest_records.RECORDS_PER_CHUNK, "pixels", 7)
    images = np.random.default_rng(0).random((40, 1, 4, 4), np.float32)
    images[12] = images[33]
    data = Public(images, np.arange(40) % 2, Spec((1, 4, 4), 2))
    queries = torch.rand(9, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    queries[4] = torch.from_numpy(images[30])
    apart = (queries[:, None] - torch.from_numpy(images)).flatten(2).norm(dim=2).double()
    nearest = nearest_records.find_nearest_records(queries, data, 3)
    distances, order = apart.sort(stable=True)
    assert torch.equal(nearest.indices, order[:, :3])
    torch.testing.assert_close(nearest.distances, distances[:, :3], rtol=1e-5, atol=1e-6)
    assert (nearest.distances[4, 0], nearest.indices[4, 0]) == (0, 30)
    among = torch.tensor([3, 8, 20, 21])
    nearest = nearest_records.find_nearest_records(queries, data, 9, candidate_indices=among)
    assert torch.equal(nearest.indices, among[apart[:, among].argsort()])
    # a record is not its own neighbour, but its twin is
    itself = torch.tensor([33, 12, 5])
    nearest = nearest_records.find_nearest_records(
        torch.from_numpy(images[itself]), data, 39, excluded_indices=itself
    )
    assert nearest.indices[:2, 0].tolist() == [12, 33]
    assert (nearest.distances[:2, 0] == 0).all()
    assert (nearest.distances[2] > 0).all()
    assert (nearest.indices != itself[:, None]).all()
    assert all(len(set(indices.tolist())) == 39 for indices in nearest.indices)


def test_a_copy_is_nearer_than_near_copies():
    # 1e-3 apart on 4,096 bright pixels: below the rounding of the products that rank.
    images = torch.full((6, 1, 64, 64), 0.999)
    for number in range(5):
        images[number, 0, number, 0] -= 1e-3
    data = Public(images.numpy(), np.zeros(6, int), Spec((1, 64, 64), 1))
    nearest = nearest_records.find_nearest_records(images[5:], data)
    assert (nearest.indices.item(), nearest.distances.item()) == (5, 0)


# The study


def test_copies_are_nearest_by_both_distances(planted, random_lpips):
    release, data, copies = planted
    study, images = nearest_records.compare_nearest_records(release, data, "cpu")
    assert len(images) == len(study["shown"]) == 20
    real = data._read_records(slice(None)).images
    for turn, (facts, shown) in enumerate(zip(study["shown"], images, strict=True)):
        captions = [record["caption"] for record in facts["real"]]
        assert captions == ["nearest by L2", "second", "nearest by LPIPS"]
        first, second, perceived = facts["real"]
        repeated = perceived["record"] in (first["record"], second["record"])
        assert first["l2"] <= second["l2"] <= perceived["l2"] or repeated
        assert perceived["lpips"] <= min(first["lpips"], second["lpips"])
        uris = [encode_data_uri(real[record["record"]]) for record in facts["real"]]
        assert [record["image"] for record in shown["real"]] == uris
        label = turn % 10
        if label < PLANTED:
            assert first["record"] == perceived["record"] == copies[label]
            assert first["l2"] == first["lpips"] == perceived["l2"] == perceived["lpips"] == 0
            assert shown["sample"] == uris[0]
        else:
            assert min(first["l2"], perceived["l2"], perceived["lpips"]) > 0
    assert study["copies"] == 100  # half of 200 samples
    assert study["sample to real"][0] == 0 < study["real to real"][0]
    assert study["lpips"] == {"searched": 150, "nearest_in_pixels": 0}


def test_lpips_is_searched_among_the_nearest_in_pixels_when_records_are_many(
    planted, random_lpips, monkeypatch
):
    release, whole, _ = planted
    count = 60
    records = whole._read_records(slice(0, count))
    data = Public(records.images.numpy(), records.labels.numpy(), SPEC)
    monkeypatch.setitem(nearest_records.RECORDS_PER_CHUNK, "lpips", 25)
    monkeypatch.setattr(nearest_records, "LPIPS_SHORTLIST_SIZE", 3)
    images = release.sample(10, torch.arange(10))[0]
    near = (images[:, None] - records.images).flatten(2).norm(dim=2).argsort()[:, :3].unique()
    fresh = range(PLANTED, 10)
    rows = [
        image_similarity.lpips(images[label].expand(count, -1, -1, -1), records.images)
        for label in fresh
    ]
    apart = torch.stack(rows)
    for limit, among, listed in ((count, torch.arange(count), 0), (count - 1, near, 3)):
        monkeypatch.setattr(nearest_records, "MAX_FULL_LPIPS_RECORDS", limit)
        study = nearest_records.compare_nearest_records(release, data, "cpu")[0]
        nearest = [study["shown"][label]["real"][2]["record"] for label in fresh]
        assert nearest == among[apart[:, among].argmin(1)].tolist()
        assert study["lpips"] == {"searched": len(among), "nearest_in_pixels": listed}


def test_a_near_copy_is_not_called_a_copy(random_lpips):
    release = make_release()
    images = release.artifact.tensors["images"].clone()
    images[:, 0, 0, 0] = (images[:, 0, 0, 0] - 3e-6).clamp(min=0)
    data = Public(images.numpy(), release.artifact.tensors["labels"].numpy(), Spec((1, 8, 8), 3))
    study = nearest_records.compare_nearest_records(release, data, "cpu")[0]
    assert study["copies"] == 0
    assert all(0 < facts["real"][0]["l2"] < 1e-5 for facts in study["shown"])


def test_a_copy_in_another_layout_of_memory_is_one(random_lpips):
    release = make_release(shape=(3, 32, 32))
    tensors = release.artifact.tensors
    channels_last = tensors["images"].permute(0, 2, 3, 1).contiguous()
    images = channels_last.permute(0, 3, 1, 2).numpy()
    data = Public(images, tensors["labels"].numpy(), Spec((3, 32, 32), 3))
    assert not data._read_records(slice(None)).images.is_contiguous()
    for facts in nearest_records.compare_nearest_records(release, data, "cpu")[0]["shown"]:
        first, _, perceived = facts["real"]
        assert (first["l2"], first["lpips"], perceived["lpips"]) == (0, 0, 0)


def test_one_record_has_no_second_and_no_neighbour(random_lpips):
    data = Public(np.zeros((1, 1, 8, 8), np.uint8), np.array([0]), Spec((1, 8, 8), 1))
    study = nearest_records.compare_nearest_records(make_release(), data)[0]
    assert study["real to real"] == []
    captions = [record["caption"] for record in study["shown"][0]["real"]]
    assert captions == ["nearest by L2", "nearest by LPIPS"]


def test_records_of_another_shape_are_refused(planted):
    with pytest.raises(ReleaseError, match=r"real records are \[1, 8, 8\]"):
        nearest_records.compare_nearest_records(make_release(shape=(1, 4, 4)), planted[1])


# The page


def test_the_figure_stands_on_the_internal_face_alone(planted, random_lpips, tmp_path):
    release, data, copies = planted
    write_toy_report(tmp_path / "out", release, owner_inputs=OwnerInputs(data))
    inside = tmp_path / "out-internal"
    public = tmp_path / "out"
    shown = read_json(inside, "internal.json")["nearest"]["shown"]
    records = {record["record"] for facts in shown for record in facts["real"]} - set(copies)
    images = data._read_records(torch.tensor(sorted(records))).images
    uris = {encode_data_uri(image) for image in images}
    assert len(uris) > 10
    assert uris <= list_image_sources(inside / "internal.html")
    assert not uris & list_image_sources(public / "report.html")
    page = (inside / "internal.html").read_text()
    for label in ("sample", "nearest by L2", "second", "nearest by LPIPS"):
        assert page.count(f"<b>{label}</b>") == 20
    for words in (
        "100 of 200 samples are exact copies",
        "a copy: L2 0",
        "LPIPS was searched among all records",
        "proves no privacy",
    ):
        assert words in read_visible_text(inside, "internal.html")
    for path in public.iterdir():
        seen = read_visible_text(public, path.name)
        assert not re.search("LPIPS|nearest|copies|real record", seen), path.name


def test_the_page_says_how_far_lpips_was_searched(planted, random_lpips, tmp_path, monkeypatch):
    monkeypatch.setattr(nearest_records, "MAX_FULL_LPIPS_RECORDS", 100)
    monkeypatch.setattr(nearest_records, "LPIPS_SHORTLIST_SIZE", 7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_toy_report(tmp_path / "out", planted[0], owner_inputs=OwnerInputs(planted[1]))
    inside = tmp_path / "out-internal"
    count = read_json(inside, "internal.json")["nearest"]["lpips"]["searched"]
    assert 7 < count <= 70
    words = f"searched among {count} records, the 7 nearest in pixels to each"
    assert words in read_visible_text(inside, "internal.html")


@pytest.mark.parametrize("damaged", [False, True])
def test_without_weights_the_page_has_no_such_column_and_says_why(
    planted, empty_data_folders, damaged
):
    names = image_similarity.LPIPS_WEIGHTS
    why = f"LPIPS needs the weights {' and '.join(names)}"
    if damaged:
        why = r"\S+ and \S+: not the weights of LPIPS"
        folder = empty_data_folders / "data" / "weights"
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_bytes(b"no tensors")
    out = empty_data_folders / "out"
    write_toy_report(out, planted[0], owner_inputs=OwnerInputs(planted[1]))
    inside = internal_folder(out)
    study = read_json(inside, "internal.json")["nearest"]
    assert study["lpips"]["searched"] == 0
    for facts in study["shown"]:
        captions = [record["caption"] for record in facts["real"]]
        assert captions == ["nearest by L2", "second"]
        assert all("lpips" not in record for record in facts["real"])
    page = (inside / "internal.html").read_text()
    assert page.count("<b>second</b>") == 20
    assert "<b>nearest by LPIPS</b>" not in page
    reason = f"The nearest records by LPIPS are not shown. {why}"
    assert re.search(reason, read_visible_text(inside, "internal.html"))
