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
from support.report_pages import write_toy_report

from privot.data.dataset import Public
from privot.data.spec import Spec
from privot.errors import ReleaseError
from privot.report import OwnerInputs

REGISTRY = {
    "": "url_slug status tier deployment",
    "deployment": "basic dp_variant privacy_loss deployment_model accounting implementation "
    "administrative",
    "basic": "name data_curators description intended_use data_product_type data_product_region "
    "publication_date data_product_sector",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details privacy_parameters "
    "privacy_parameters_details",
    "privacy_parameters": "epsilon delta rho",
    "deployment_model": "model_name actors release_type data_source_type access_type",
    "accounting": "post_processing composition",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms justification",
    "administrative": "registry_authors sources notes",
}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def list_tree(folder):
    return sorted(str(path) for path in folder.rglob("*"))


# The records for others


@pytest.mark.parametrize("claim", [None, NO_GUARANTEE], ids=["proved", "none"])
def test_the_registry_record_has_the_registry_s_keys(out, claim):
    release = make_release(claim=claim)
    write_toy_report(out, release, 'yes: "no" #1 \\', results=[make_metric_result()])
    text = (out / "registry.yaml").read_text()
    record = parse_data_card(text)

    def check_keys(name, value):
        assert value.keys() <= set(REGISTRY[name].split())
        for key, inner in value.items():
            if isinstance(inner, dict):
                check_keys(key, inner)

    check_keys("", record)
    assert record["deployment"]["basic"]["name"] == 'yes: "no" #1 \\'
    assert record["deployment"]["basic"]["data_product_type"] == "Synthetic data"
    assert re.fullmatch(r"[a-z0-9-]+", record["url_slug"])
    if claim is None:
        parameters = record["deployment"]["privacy_loss"]["privacy_parameters"]
        assert parameters == {"epsilon": release.guarantee.epsilon, "delta": 1e-5}
        assert "delta: 1.0e-05" in text  # without the point, readers of YAML 1.1 read a word


def test_the_card_has_front_matter_and_obeys_no_name(out):
    name = "<img src=x> [a](http://b) *c* | `d` www.e.f"
    write_toy_report(out, name=name, results=[make_metric_result(name)])
    empty, front, body = (out / "README.md").read_text().split("---\n", 2)
    assert empty == ""
    assert parse_data_card(front)["pretty_name"] == name
    assert r"&lt;img src=x&gt; \[a\](http\://b) \*c\* \| \`d\` www\.e.f" in body
    assert "<img" not in body


def test_results_survive_as_they_were_given(out):
    nan = float("nan")
    result = make_metric_result(
        "fid", 50.0, standard_error=nan, better="lower", warning="few samples"
    )
    write_toy_report(out, results=[result])
    (shown,) = read_json(out)["utility"]["results"]
    assert shown.pop("standard_error") == "nan"
    wanted = asdict(result)
    del wanted["standard_error"], wanted["seconds"]
    assert shown.items() >= wanted.items()
    assert "few samples" in read_visible_text(out)


# The folder


def test_an_earlier_report_is_replaced_and_nothing_else(out):
    out.mkdir()
    write_toy_report(out, name="first", owner_inputs=OwnerInputs())
    write_toy_report(out, name="second")
    assert read_json(out)["name"] == "second"
    assert read_json(internal_folder(out), "internal.json")["name"] == "first"
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ReleaseError, match="contains other files"):
        write_toy_report(out, name="third")
    assert (out / "mine.txt").read_text() == "mine"
    assert read_json(out)["name"] == "second"


@pytest.mark.parametrize("mask", [0o022, 0o000])
def test_the_internal_face_is_for_its_owner_alone(out, mask):
    before = os.umask(mask)
    try:
        done = write_toy_report(out, owner_inputs=OwnerInputs(make_noise_dataset(0)))
    finally:
        os.umask(before)
    paths = (*done.paths, out, internal_folder(out))
    modes = {path.name: path.stat().st_mode & 0o777 for path in paths}
    assert (modes.pop("out"), modes.pop("out-internal")) == (0o777 & ~mask, 0o700)
    private = {name for name, mode in modes.items() if mode == 0o600}
    assert private == {"internal.html", "internal.json"}
    assert {modes[name] for name in modes.keys() - private} == {0o666 & ~mask}


def test_a_foreign_folder_beside_is_refused_before_anything_is_written(out):
    inside = internal_folder(out)
    inside.mkdir()
    (inside / "mine.txt").write_text("mine")
    with pytest.raises(ReleaseError, match=r"out-internal contains other files"):
        write_toy_report(out, owner_inputs=OwnerInputs())
    assert not out.exists()
    write_toy_report(out)
    assert (inside / "mine.txt").read_text() == "mine"


def test_neighbours_of_the_folder_are_left_alone(tmp_path, out):
    for name in (".out.part", ".out.old", ".out-internal.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    before = list_tree(tmp_path)
    for _ in range(2):
        write_toy_report(out, owner_inputs=OwnerInputs())
    assert [path for path in list_tree(tmp_path) if "/.out" in path] == before


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
    before = list_tree(tmp_path)
    for name in ("file", "odd", "torn", "foreign", "card", "nested", "link"):
        with pytest.raises(ReleaseError, match="contains other files"):
            write_toy_report(tmp_path / name)
    assert list_tree(tmp_path) == before


@pytest.mark.parametrize(
    ("earlier", "operation", "turn"),
    [
        *((earlier, "write_bytes", turn) for earlier in (False, True) for turn in (1, 2, 3, 4)),
        (False, "replace", 1),
        (True, "replace", 1),
        (True, "replace", 2),
    ],
)
def test_a_disk_that_fills_up_leaves_what_was_there(out, monkeypatch, earlier, operation, turn):
    if earlier:
        write_toy_report(out, name="first")
    real = getattr(Path, operation)
    calls = []

    def fail_once(self, *rest):
        calls.append(self)
        if len(calls) == turn:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *rest)

    monkeypatch.setattr(Path, operation, fail_once)
    with pytest.raises(OSError, match="No space"):
        write_toy_report(out, name="second")
    assert [path.name for path in out.parent.iterdir()] == (["out"] if earlier else [])
    assert not earlier or read_json(out)["name"] == "first"


# The page


def test_a_page_of_large_colour_images_stays_small(tmp_path):
    names = tuple(f"class {number}" for number in range(25))
    many = make_release(shape=(3, 64, 64), classes=25, names=names, each=10)
    large = make_release(shape=(3, 300, 200), classes=2, names=None, each=2)
    for folder, release in ((tmp_path / "many", many), (tmp_path / "large", large)):
        write_toy_report(folder, release)
        assert (folder / "report.html").stat().st_size < 3e6
    assert "20 of 25 classes" in read_visible_text(tmp_path / "many")


def test_a_class_without_images_has_an_empty_row(out):
    release = make_release()
    keep = release.artifact.tensors["labels"] != 1
    tensors = {key: value[keep] for key, value in release.artifact.tensors.items()}
    release = replace(release, artifact=replace(release.artifact, tensors=tensors))
    write_toy_report(out, release, owner_inputs=OwnerInputs(make_noise_dataset(0)))
    row = '<bdi>dog</bdi></span><div class="strip"><small>none'
    assert row in (out / "report.html").read_text()


def test_records_of_another_shape_are_refused(out):
    other = Public(np.zeros((4, 1, 4, 4), np.uint8), np.arange(4) % 3, Spec((1, 4, 4), 3))
    with pytest.raises(ReleaseError, match=r"\[1, 4, 4\]"):
        write_toy_report(out, owner_inputs=OwnerInputs(other))


def test_the_policy_names_the_one_style(out):
    write_toy_report(out)
    html = (out / "report.html").read_text()
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'" in html
    assert not re.search(r"<script|\sstyle=|\son\w+=|https?:", html)
