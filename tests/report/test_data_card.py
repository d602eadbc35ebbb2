"""A report as files: records that others can read, written whole or not at all, and never over anything else."""

import base64
import errno
import hashlib
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from support.factories import (
    NO_GUARANTEE,
    internal_folder,
    make_metric_result,
    make_noise_dataset,
    make_release,
    parse_data_card,
    read_json,
    read_visible_text,
)

from privot.data.dataset import Public
from privot.data.spec import Spec
from privot.errors import ReleaseError
from privot.report import OwnerInputs, write_report

REGISTRY = {
    "": {"url_slug", "status", "tier", "deployment"},
    "deployment": {
        "basic",
        "dp_variant",
        "privacy_loss",
        "deployment_model",
        "accounting",
        "implementation",
        "administrative",
    },
    "basic": {
        "name",
        "data_curators",
        "description",
        "intended_use",
        "data_product_type",
        "data_product_region",
        "publication_date",
        "data_product_sector",
    },
    "dp_variant": {"variant_name", "data_domain", "unprotected_quantities"},
    "privacy_loss": {
        "privacy_unit",
        "privacy_unit_details",
        "privacy_parameters",
        "privacy_parameters_details",
    },
    "privacy_parameters": {"epsilon", "delta", "rho"},
    "deployment_model": {"model_name", "actors", "release_type", "data_source_type", "access_type"},
    "accounting": {"post_processing", "composition"},
    "implementation": {"preprocessing_and_hyperparameter_tuning", "mechanisms", "justification"},
    "administrative": {"registry_authors", "sources", "notes"},
}


# The records for others


@pytest.mark.parametrize("claim", [None, NO_GUARANTEE], ids=["proved", "none"])
def test_the_registry_record_has_the_registry_s_keys(tmp_path, claim):
    release = make_release(claim=claim)
    write_report(release, tmp_path / "out", name='yes: "no" #1 \\', results=[make_metric_result()])
    record = parse_data_card((tmp_path / "out" / "registry.yaml").read_text())

    def check(name, value):
        assert value.keys() <= REGISTRY[name]
        for key, each in value.items():
            if isinstance(each, dict):
                check(key, each)

    check("", record)
    assert record["deployment"]["basic"]["name"] == 'yes: "no" #1 \\'
    assert record["deployment"]["basic"]["data_product_type"] == "Synthetic data"
    assert re.fullmatch(r"[a-z0-9-]+", record["url_slug"])
    if claim is None:
        assert record["deployment"]["privacy_loss"]["privacy_parameters"] == {
            "epsilon": release.guarantee.epsilon,
            "delta": 1e-5,
        }
        assert (
            "delta: 1.0e-05" in (tmp_path / "out" / "registry.yaml").read_text()
        )  # a word to readers of YAML 1.1 without its point


def test_the_card_has_front_matter_and_obeys_no_name(tmp_path):
    name = "<img src=x> [a](http://b) *c* | `d` www.e.f"
    write_report(make_release(), tmp_path / "out", name=name, results=[make_metric_result(name)])
    card = (tmp_path / "out" / "README.md").read_text()
    empty, front, body = card.split("---\n", 2)
    assert empty == ""
    assert parse_data_card(front)["pretty_name"] == name
    assert r"&lt;img src=x&gt; \[a\](http\://b) \*c\* \| \`d\` www\.e.f" in body
    assert "<img" not in body


# The folder


def test_an_earlier_report_is_replaced_and_nothing_else(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write_report(make_release(), out, name="first", owner_inputs=OwnerInputs())
    write_report(make_release(), out, name="second")
    assert read_json(out)["name"] == "second"
    assert read_json(internal_folder(out), "internal.json")["name"] == "first"
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ReleaseError, match="contains other files"):
        write_report(make_release(), out, name="third")
    assert (out / "mine.txt").read_text() == "mine"
    assert read_json(out)["name"] == "second"


@pytest.mark.parametrize("mask", [0o022, 0o000])
def test_the_internal_face_is_for_its_owner_alone(tmp_path, mask):
    before = os.umask(mask)
    try:
        done = write_report(
            make_release(),
            tmp_path / "out",
            name="toy",
            owner_inputs=OwnerInputs(make_noise_dataset(0)),
        )
    finally:
        os.umask(before)
    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in (*done.paths, tmp_path / "out", internal_folder(tmp_path / "out"))
    }
    assert (modes.pop("out"), modes.pop("out-internal")) == (0o777 & ~mask, 0o700)
    assert set(modes.values()) == {0o666 & ~mask, 0o600}
    assert {name for name, mode in modes.items() if mode == 0o600} == {
        "internal.html",
        "internal.json",
    }


def test_a_foreign_folder_beside_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "out-internal").mkdir()
    (tmp_path / "out-internal" / "mine.txt").write_text("mine")
    with pytest.raises(ReleaseError, match=r"out-internal contains other files"):
        write_report(make_release(), tmp_path / "out", name="toy", owner_inputs=OwnerInputs())
    assert not (tmp_path / "out").exists()
    write_report(make_release(), tmp_path / "out", name="toy")
    assert (tmp_path / "out-internal" / "mine.txt").read_text() == "mine"


def test_neighbours_of_the_folder_are_left_alone(tmp_path):
    for name in (".out.part", ".out.old", ".out-internal.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    before = sorted(str(each) for each in tmp_path.rglob("*"))
    for _ in range(2):
        write_report(make_release(), tmp_path / "out", name="toy", owner_inputs=OwnerInputs())
    assert sorted(str(each) for each in tmp_path.rglob(".*")) == [
        each for each in before if not each.endswith(".txt")
    ]
    assert all(
        (tmp_path / name / "mine.txt").exists()
        for name in (".out.part", ".out.old", ".out-internal.part")
    )


def test_what_only_looks_like_a_report_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for name, inside in (("odd", "[]"), ("torn", "{"), ("foreign", '{"name": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(inside)
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "README.md").write_text("mine")
    (tmp_path / "nested" / "report.html").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    before = sorted(str(each) for each in tmp_path.rglob("*"))
    for name in ("file", "odd", "torn", "foreign", "card", "nested", "link"):
        with pytest.raises(ReleaseError, match="contains other files"):
            write_report(make_release(), tmp_path / name, name="toy")
    assert sorted(str(each) for each in tmp_path.rglob("*")) == before


def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path, monkeypatch):
    out = tmp_path / "out"
    real = {"write_bytes": Path.write_bytes, "replace": Path.replace}

    def fails(place, turn):
        left = [turn]

        def maybe(self, *rest):
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real[place](self, *rest)

        return maybe

    for earlier in (False, True):
        if earlier:
            write_report(make_release(), out, name="first")
        for place, turns in (("write_bytes", 4), ("replace", 2 if earlier else 1)):
            for turn in range(1, turns + 1):
                with monkeypatch.context() as broken:
                    broken.setattr(Path, place, fails(place, turn))
                    with pytest.raises(OSError, match="No space"):
                        write_report(make_release(), out, name="second")
                assert [each.name for each in tmp_path.iterdir()] == (["out"] if earlier else [])
                assert not earlier or read_json(out)["name"] == "first"


def test_a_page_of_large_colour_images_stays_small(tmp_path):
    names = tuple(f"class {place}" for place in range(25))
    write_report(
        make_release(shape=(3, 64, 64), classes=25, names=names, each=10),
        tmp_path / "a",
        name="toy",
    )
    assert (tmp_path / "a" / "report.html").stat().st_size < 3e6
    assert "20 of 25 classes" in read_visible_text(tmp_path / "a")
    write_report(
        make_release(shape=(3, 300, 200), classes=2, names=None, each=2), tmp_path / "b", name="toy"
    )
    assert (tmp_path / "b" / "report.html").stat().st_size < 3e6


def test_a_class_without_images_has_an_empty_row(tmp_path):
    release = make_release()
    keep = release.artifact.tensors["labels"] != 1
    tensors = {key: value[keep] for key, value in release.artifact.tensors.items()}
    write_report(
        replace(release, artifact=replace(release.artifact, tensors=tensors)),
        tmp_path / "out",
        name="toy",
        owner_inputs=OwnerInputs(make_noise_dataset(0)),
    )
    assert re.search(
        r"<bdi>dog</bdi></span><div class=\"strip\"><small>none",
        (tmp_path / "out" / "report.html").read_text(),
    )


def test_records_of_another_shape_are_refused(tmp_path):
    other = Public(np.zeros((4, 1, 4, 4), np.uint8), np.arange(4) % 3, Spec((1, 4, 4), 3))
    with pytest.raises(ReleaseError, match=r"\[1, 4, 4\]"):
        write_report(make_release(), tmp_path / "out", name="toy", owner_inputs=OwnerInputs(other))


def test_the_policy_names_the_one_style(tmp_path):
    write_report(make_release(), tmp_path / "out", name="toy")
    html = (tmp_path / "out" / "report.html").read_text()
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'" in html
    assert not re.search(r"<script|\sstyle=|\son\w+=|https?:", html)


def test_readings_survive_as_they_were_given(tmp_path):
    given = [
        make_metric_result(
            "fid", 50.0, standard_error=float("nan"), better="lower", warning="few samples"
        )
    ]
    write_report(make_release(), tmp_path / "out", name="toy", results=given)
    (found,) = read_json(tmp_path / "out")["utility"]["results"]
    wanted = {
        key: value
        for key, value in asdict(given[0]).items()
        if key not in ("standard_error", "seconds")
    }
    assert found.items() >= wanted.items()
    assert found["standard_error"] == "nan"
    assert "few samples" in read_visible_text(tmp_path / "out")
