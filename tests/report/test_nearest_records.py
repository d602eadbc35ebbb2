"""Samples beside their nearest records: what is a copy is found by either ruler, in any portion, and stays on the internal face."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.factories import GAUSSIAN, make_release, read_json, read_visible_text

from privot.attacks.membership import control_data
from privot.data.dataset import Public, Sensitive
from privot.data.spec import Spec
from privot.errors import ReleaseError
from privot.measures import image_similarity
from privot.measures.networks.lpips import Lpips
from privot.nets.generators.conv import initialize_weights
from privot.privacy.guarantee import Guarantee
from privot.release import Release
from privot.release.artifact import Artifact
from privot.report import OwnerInputs, nearest_records, write_report
from privot.report.images import encode_data_uri

SPEC = Spec((1, 8, 8), 10)
PLANTED = 5  # classes whose released image is a record
KNOWN = {"plan": GAUSSIAN.to_json(), "event": str(GAUSSIAN.event())}


@pytest.fixture(autouse=True)
def one(one_thread):
    """Networks on small images."""


@pytest.fixture
def eyes(monkeypatch):
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
    """400 digits, and a released set of one image a class, the first five of them records: (release, data, places of the copies)."""
    other, _, records = control_data.load_digit_splits(0)
    places = [int((records.labels == label).nonzero()[0]) for label in range(PLANTED)]
    fresh = [int((other.labels == label).nonzero()[0]) for label in range(PLANTED, 10)]
    images = torch.cat([records.images[places], other.images[fresh]])
    release = Release(
        Artifact.from_images(images, torch.arange(10)),
        Guarantee.from_plan(GAUSSIAN, 1e-5),
        SPEC,
        KNOWN,
    )
    return (
        release,
        Sensitive(records.images.numpy(), records.labels.numpy(), SPEC, name="digits"),
        places,
    )


# The search


def test_the_nearest_records_are_found_in_any_portion(monkeypatch):
    monkeypatch.setitem(nearest_records.RECORDS_PER_CHUNK, "pixels", 7)
    images = np.random.default_rng(0).random((40, 1, 4, 4), np.float32)
    data = Public(images, np.arange(40) % 2, Spec((1, 4, 4), 2))
    queries = torch.rand(9, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    queries[4] = torch.from_numpy(images[33])
    apart = (queries[:, None] - torch.from_numpy(images)).flatten(2).norm(dim=2).double()
    found = nearest_records.find_nearest_records(queries, data, 3)
    values, places = apart.sort()
    assert torch.equal(found.indices, places[:, :3])
    torch.testing.assert_close(found.distances, values[:, :3], rtol=1e-5, atol=1e-6)
    assert (found.distances[4, 0], found.indices[4, 0]) == (0, 33)
    among = torch.tensor([3, 8, 20, 21])
    assert torch.equal(
        nearest_records.find_nearest_records(queries, data, 9, candidate_indices=among).indices,
        among[apart[:, among].argsort()],
    )


def test_a_record_is_not_its_own_neighbour_but_its_twin_is(monkeypatch):
    monkeypatch.setitem(nearest_records.RECORDS_PER_CHUNK, "pixels", 7)
    images = np.random.default_rng(0).random((40, 1, 4, 4), np.float32)
    images[12] = images[33]
    data = Public(images, np.arange(40) % 2, Spec((1, 4, 4), 2))
    itself = torch.tensor([33, 12, 5])
    found = nearest_records.find_nearest_records(
        torch.from_numpy(images[itself]), data, 39, excluded_indices=itself
    )
    assert found.indices[:2, 0].tolist() == [12, 33]
    assert (found.distances[:2, 0] == 0).all()
    assert (found.distances[2] > 0).all()
    assert (found.indices != itself[:, None]).all()
    assert all(len(set(each.tolist())) == 39 for each in found.indices)


def test_a_copy_is_found_among_near_copies():
    # 1e-3 apart on 4,096 bright pixels: below the rounding of the products that rank.
    images = torch.full((6, 1, 64, 64), 0.999)
    for place in range(5):
        images[place, 0, place, 0] -= 1e-3
    data = Public(images.numpy(), np.zeros(6, int), Spec((1, 64, 64), 1))
    found = nearest_records.find_nearest_records(images[5:], data)
    assert (found.indices.item(), found.distances.item()) == (5, 0)


# The study


def test_copies_are_found_by_both_rulers(planted, eyes):
    release, data, places = planted
    found, drawn = nearest_records.compare_nearest_records(release, data, "cpu")
    assert len(drawn) == len(found["shown"]) == 20
    real = data._read_records(slice(None)).images
    for turn, (each, shown) in enumerate(zip(found["shown"], drawn, strict=True)):
        assert [record["caption"] for record in each["real"]] == [
            "nearest by L2",
            "second",
            "nearest by LPIPS",
        ]
        first, second, seen = each["real"]
        assert first["l2"] <= second["l2"] <= seen["l2"] or seen["record"] in (
            first["record"],
            second["record"],
        )
        assert seen["lpips"] <= min(first["lpips"], second["lpips"])
        assert [record["image"] for record in shown["real"]] == [
            encode_data_uri(real[record["record"]]) for record in each["real"]
        ]
        label = turn % 10
        if label < PLANTED:
            assert first["record"] == seen["record"] == places[label]
            assert first["l2"] == first["lpips"] == seen["l2"] == seen["lpips"] == 0
            assert shown["sample"] == shown["real"][0]["image"]
        else:
            assert min(first["l2"], seen["l2"], seen["lpips"]) > 0
    assert found["copies"] == 100  # half of 200 samples
    assert found["sample to real"][0] == 0 < found["real to real"][0]
    assert found["lpips"] == {"searched": 400, "nearest_in_pixels": 0}


def test_lpips_is_searched_among_the_nearest_in_pixels_when_records_are_many(
    planted, eyes, monkeypatch
):
    release, whole = planted[:2]
    records = whole._read_records(slice(0, 120))
    data = Public(records.images.numpy(), records.labels.numpy(), SPEC)
    monkeypatch.setitem(nearest_records.RECORDS_PER_CHUNK, "lpips", 50)
    monkeypatch.setattr(nearest_records, "LPIPS_SHORTLIST_SIZE", 3)
    images = release.sample(10, torch.arange(10))[0]
    close = (images[:, None] - records.images).flatten(2).norm(dim=2).argsort()[:, :3].unique()
    fresh = range(PLANTED, 10)
    apart = torch.stack(
        [
            image_similarity.lpips(images[each].expand(120, -1, -1, -1), records.images)
            for each in fresh
        ]
    )
    for limit, among in ((120, torch.arange(120)), (119, close)):
        monkeypatch.setattr(nearest_records, "MAX_FULL_LPIPS_RECORDS", limit)
        found = nearest_records.compare_nearest_records(release, data, "cpu")[0]
        assert [found["shown"][each]["real"][2]["record"] for each in fresh] == among[
            apart[:, among].argmin(1)
        ].tolist()
        assert found["lpips"] == {
            "searched": len(among),
            "nearest_in_pixels": 0 if limit == 120 else 3,
        }


def test_a_near_copy_is_not_called_a_copy(eyes):
    release = make_release()
    images = release.artifact.tensors["images"].clone()
    images[:, 0, 0, 0] = (images[:, 0, 0, 0] - 3e-6).clamp(min=0)
    data = Public(images.numpy(), release.artifact.tensors["labels"].numpy(), Spec((1, 8, 8), 3))
    found = nearest_records.compare_nearest_records(release, data, "cpu")[0]
    assert found["copies"] == 0
    assert all(0 < each["real"][0]["l2"] < 1e-5 for each in found["shown"])


def test_a_copy_in_another_layout_of_memory_is_one(eyes):
    release = make_release(shape=(3, 32, 32))
    images = np.ascontiguousarray(
        release.artifact.tensors["images"].numpy().transpose(0, 2, 3, 1)
    ).transpose(0, 3, 1, 2)
    data = Public(images, release.artifact.tensors["labels"].numpy(), Spec((3, 32, 32), 3))
    assert not data._read_records(slice(None)).images.is_contiguous()
    for each in nearest_records.compare_nearest_records(release, data, "cpu")[0]["shown"]:
        assert (each["real"][0]["l2"], each["real"][0]["lpips"], each["real"][2]["lpips"]) == (
            0,
            0,
            0,
        )


def test_one_record_has_no_second_and_no_neighbour(eyes):
    data = Public(np.zeros((1, 1, 8, 8), np.uint8), np.array([0]), Spec((1, 8, 8), 1))
    found = nearest_records.compare_nearest_records(make_release(), data)[0]
    assert found["real to real"] == []
    assert [each["caption"] for each in found["shown"][0]["real"]] == [
        "nearest by L2",
        "nearest by LPIPS",
    ]


def test_records_of_another_shape_are_refused(planted):
    with pytest.raises(ReleaseError, match=r"real records are \[1, 8, 8\]"):
        nearest_records.compare_nearest_records(make_release(shape=(1, 4, 4)), planted[1])


# The page


def sources(folder, name):
    return set(re.findall(r'src="(data:[^"]+)"', (folder / name).read_text()))


def test_the_figure_stands_on_the_internal_face_alone(planted, eyes, tmp_path):
    release, data, places = planted
    write_report(release, tmp_path / "out", name="toy", owner_inputs=OwnerInputs(data))
    inside = tmp_path / "out-internal"
    public = tmp_path / "out"
    shown = read_json(inside, "internal.json")["nearest"]["shown"]
    records = {record["record"] for each in shown for record in each["real"]}
    pictures = {
        encode_data_uri(image)
        for image in data._read_records(torch.tensor(sorted(records - set(places)))).images
    }
    assert len(pictures) > 10
    assert pictures <= sources(inside, "internal.html")
    assert not pictures & sources(public, "report.html")
    page = (inside / "internal.html").read_text()
    for label in ("sample", "nearest by L2", "second", "nearest by LPIPS"):
        assert page.count(f"<b>{label}</b>") == 20
    seen = read_visible_text(inside, "internal.html")
    for words in (
        "100 of 200 samples are exact copies",
        "a copy: L2 0",
        "LPIPS was searched among all records",
        "proves no privacy",
    ):
        assert words in seen
    for path in public.iterdir():
        assert not re.search(
            "LPIPS|nearest|copies|real record", read_visible_text(public, path.name)
        ), path.name


def test_the_page_says_how_far_lpips_looked(planted, eyes, tmp_path, monkeypatch):
    monkeypatch.setattr(nearest_records, "MAX_FULL_LPIPS_RECORDS", 100)
    monkeypatch.setattr(nearest_records, "LPIPS_SHORTLIST_SIZE", 7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_report(planted[0], tmp_path / "out", name="toy", owner_inputs=OwnerInputs(planted[1]))
    seen = read_visible_text(tmp_path / "out-internal", "internal.html")
    count = read_json(tmp_path / "out-internal", "internal.json")["nearest"]["lpips"]["searched"]
    assert 7 < count <= 70
    assert f"searched among {count} records, the 7 nearest in pixels to each" in seen


@pytest.mark.parametrize("damaged", [False, True])
def test_without_weights_the_page_has_no_such_column_and_says_why(
    planted, empty_data_folders, damaged
):
    if damaged:
        (empty_data_folders / "data" / "weights").mkdir(parents=True)
        for name in image_similarity.LPIPS_WEIGHTS:
            (empty_data_folders / "data" / "weights" / name).write_bytes(b"no tensors")
    write_report(
        planted[0], empty_data_folders / "out", name="toy", owner_inputs=OwnerInputs(planted[1])
    )
    found = read_json(inside := empty_data_folders / "out-internal", "internal.json")["nearest"]
    assert found["lpips"]["searched"] == 0
    assert all(
        [record["caption"] for record in each["real"]] == ["nearest by L2", "second"]
        for each in found["shown"]
    )
    assert all("lpips" not in record for each in found["shown"] for record in each["real"])
    page = (inside / "internal.html").read_text()
    assert page.count("<b>second</b>") == 20
    assert "<b>nearest by LPIPS</b>" not in page
    why = (
        r"\S+ and \S+: not the weights of LPIPS"
        if damaged
        else f"LPIPS needs the weights {' and '.join(image_similarity.LPIPS_WEIGHTS)}"
    )
    assert re.search(
        f"The nearest records by LPIPS are not shown. {why}",
        read_visible_text(inside, "internal.html"),
    )
