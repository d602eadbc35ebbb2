"""Every verb, for people and for programs: what it prints, what it writes, what it must not touch."""

import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image
from rich.console import Console
from support.factories import make_release

from privot import __version__
from privot import io as files
from privot.cli import demo, main
from privot.data import load_catalog, load_dataset, readers
from privot.data.dataset import Sensitive
from privot.measures.result import MetricResult, load_metric_results
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import ledger_path
from privot.progress import show_progress_bar
from privot.release import Release, artifact
from privot.synthesis import synthesize

QUICK = ("--method", "merf", "--set", "num_features=200", "--set", "steps=20")  # a generator
SMALL = {
    "images_per_class": 2,
    "num_random_nets": 4,
    "nets_per_round": 2,
    "net_width": 4,
    "steps": 4,
    "net_train_epochs": 1,
    "soft_label_weight": 0.5,
}  # a set, by the default method


@pytest.fixture
def said(privot):
    """The one JSON value that `privot WORDS --json` prints."""

    def run(*words):
        code, out, err = privot(*words, "--json")
        assert code == 0, err
        assert out.count("\n") == 1
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return run


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A release of the digits, made once."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        words = (
            "synthesize",
            "digits",
            "--epsilon",
            "5",
            *QUICK,
            "--out",
            str(root / "digits"),
            "--ledger",
            str(root / "book.jsonl"),
        )
        patch.setattr(sys, "argv", ["privot", *words])
        main()
    return root / "digits"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A release of a set, made once, by the default method."""
    root = tmp_path_factory.mktemp("set")
    return (
        synthesize(
            "digits", budget=5.0, settings=SMALL, out=root / "digits", ledger=root / "book.jsonl"
        )
        and root / "digits"
    )


def settings(**more):
    return tuple(
        word for key, value in {**SMALL, **more}.items() for word in ("--set", f"{key}={value}")
    )


def test_methods(privot, said):
    code, out, _ = privot("methods")
    assert code == 0
    assert "merf" in out
    rows = said("methods")
    assert {"merf"} <= {row["name"] for row in rows}
    assert all({"name", "title", "trusts", "promise"} == row.keys() for row in rows)


def test_plan(privot, said):
    code, out, err = privot("plan", "digits", "--epsilon", 5)
    assert code == 0
    assert "epsilon 5" in out
    assert "None" not in out
    assert err == ""
    code, _, err = privot(
        "plan", "digits", "--epsilon", 0.2
    )  # too little for 1,438 records, and said so before anything is spent
    assert code == 0
    assert err.startswith("warning: the predicted signal-to-noise ratio")
    assert "a class has about 144 records" in err
    assert err.count("\n") == 1
    facts = said("plan", "digits", "--epsilon", 1)
    assert facts["method"] == "private-set"
    assert facts["guarantee"]["epsilon"] == pytest.approx(1, rel=1e-6)
    whole = (
        sum(stage["steps"] / stage["noise_multiplier"] ** 2 for stage in facts["plan"]["stages"])
        ** -0.5
    )
    assert whole == pytest.approx(
        3.7306, rel=1e-4
    )  # one Gaussian of this multiplier has epsilon 1 at delta 1e-5
    assert facts["forecast"]["predicted_seconds"] > 0
    assert said("plan", "digits", "--set", "noise_multiplier=5")["guarantee"][
        "epsilon"
    ] == pytest.approx(0.726, abs=1e-3)
    powers = said("plan", "digits", "--max-tpr", "0.05@0.01")["guarantee"]["max_tpr"]
    assert 0.0499 < powers["0.01"] <= 0.05
    assert said("plan", "digits", "--epsilon", "inf")["guarantee"] == {
        "reason": "no noise is added"
    }


def test_plan_reads_no_record_and_spends_nothing(privot, said, tmp_path, monkeypatch):
    def touched(*_, **__):
        raise AssertionError("a record was read")

    for name in ("read_idx", "read_npz", "read_parquet", "read_folder"):
        monkeypatch.setattr(readers, name, touched)
    monkeypatch.setattr("sklearn.datasets.load_digits", touched)
    monkeypatch.setattr(Sensitive, "__init__", touched)
    for source in load_catalog():
        assert said("plan", source, "--epsilon", 1)["spec"]["size"]
    (tmp_path / "scans.npz").write_bytes(b"nobody looks in here")
    (tmp_path / "photos").mkdir()
    for path in ("scans.npz", "photos"):
        facts = said("plan", path, "--epsilon", 1, "--shape", "3x16x16", "--classes", 4)
        assert facts["spec"] == {
            "shape": [3, 16, 16],
            "num_classes": 4,
            "size": None,
            "class_sizes": None,
            "class_names": None,
            "flip_invariant": None,
        }
        code, _, err = privot("plan", path, "--epsilon", 1)
        assert code == 2
        assert "--shape" in err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["photos", "scans.npz"]


def test_synthesize(privot, said, tmp_path):
    code, out, err = privot(
        "synthesize", "digits", "--epsilon", 5, *QUICK, "--set", "steps=100", "--out", "one"
    )
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == [
        "release",
        "guarantee",
        "ledger",
    ]
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert [line.split(":")[0] for line in lines] == ["embedding the records"] * 2 + [
        "training the generator"
    ] * 4
    assert all(
        "epsilon 5" in line for line in lines[1:]
    )  # in a pipe: whole lines, no bars, no escapes
    assert err.isascii()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["home", "one"]

    result = said("synthesize", "digits", "--epsilon", 2, *QUICK, "--out", "two")
    assert result["guarantee"]["epsilon"] == pytest.approx(2, rel=1e-6)
    assert result["ledger"]["spent_epsilon"] > 5  # the first run counts too
    assert result["release"] == "two"


def test_the_method_is_a_private_set_unless_another_is_named(said):
    result = said("synthesize", "digits", "--epsilon", 5, *settings(), "--out", "one")
    assert result["warnings"] == []
    made = Release.load("one")
    assert made.metadata["method"] == "private-set"
    assert made.artifact.tensors["images"].shape == (20, 1, 8, 8)
    assert said("ledger", "digits")["runs"][0]["method"] == "private-set"


def test_too_little_signal_is_said_before_anything_is_spent(privot, said, monkeypatch):
    words = ("digits", "--epsilon", 0.2, *settings())
    [told] = said("plan", *words)["warnings"]
    with monkeypatch.context() as stopped:
        stopped.setattr(
            Ledger, "reserve", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        code, _, err = privot("synthesize", *words, "--out", "one")
    assert (code, err.splitlines()[0]) == (130, f"warning: {told}")
    assert said("ledger", "digits")["runs"] == []
    assert said("synthesize", *words, "--out", "two")["warnings"] == [told]
    needed = float(told.split("epsilon ")[1].split()[0])
    assert said("plan", "digits", "--epsilon", needed, *settings())["warnings"] == []
    assert said("plan", "digits", "--epsilon", 0.8 * needed, *settings())["warnings"] != []


def test_resize(privot, said, images, tmp_path, monkeypatch):
    def touched(*_, **__):
        raise AssertionError("data or a ledger was touched")

    for place in (Ledger, Sensitive, Gate):
        monkeypatch.setattr(place, "__init__", touched)
    code, out, err = privot("resize", images, "--images-per-class", 5, "--out", "five")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == [
        "release",
        "guarantee",
    ]
    assert "50 images, nothing spent" in out
    assert all(line.split(":")[0] for line in err.splitlines())
    result = said("resize", images, "--images-per-class", 1, "--out", "one")
    assert (result["release"], result["images"]) == ("one", 10)
    assert result["from"] == (images / "manifest.sha256").read_text().strip()
    assert said("verify", "one")["epsilon_from_events"] == pytest.approx(5, rel=1e-6)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["five", "one"]


def test_settings_come_from_a_file_and_the_command_wins(said, tmp_path):
    (tmp_path / "c.toml").write_text(
        'num_features = 300\nsteps = 20\nneighbours = "add-remove"\nbandwidths = [5, 10.5]\n'
    )
    words = ("--method", "merf", "--config", "c.toml", "--set", "num_features=200")
    settings = said("plan", "digits", "--epsilon", 1, *words)["settings"]
    assert {
        key: settings[key] for key in ("num_features", "steps", "neighbours", "bandwidths")
    } == {
        "num_features": 200,
        "steps": 20,
        "neighbours": "add-remove",
        "bandwidths": [5.0, 10.5],
    }


def test_synthesize_from_a_path(said, tmp_path):
    images, labels = load_dataset("digits", public=True).records()
    np.savez(tmp_path / "a.npz", x=(images[:, 0] * 255).byte().numpy(), y=labels.numpy())
    said("synthesize", "a.npz", "--epsilon", 5, *QUICK, "--out", "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["spec"]["size"] is None
    assert str(tmp_path) not in json.dumps(
        manifest
    )  # where the owner keeps the data is nobody's business
    assert len(said("ledger", "a.npz")["runs"]) == len(said("ledger", "./a.npz")["runs"]) == 1


def test_the_public_seed_replays_what_is_public(said, tmp_path):
    """The answers of the gate differ from run to run; from the same answer the same generator must come."""
    for name in ("one", "two"):
        said("synthesize", "digits", "--epsilon", "inf", "--seed", 7, *QUICK, "--out", name)
    said("synthesize", "digits", "--epsilon", "inf", "--seed", 8, *QUICK, "--out", "other")
    one, two, other = (
        (tmp_path / name / "tensors.safetensors").read_bytes() for name in ("one", "two", "other")
    )
    assert one == two  # without noise the answer is the same
    assert one != other
    said("synthesize", "digits", "--epsilon", 5, "--seed", 7, *QUICK, "--out", "noisy")
    said("synthesize", "digits", "--epsilon", 5, "--seed", 7, *QUICK, "--out", "noisier")
    noisy, noisier = (
        (tmp_path / name / "tensors.safetensors").read_bytes() for name in ("noisy", "noisier")
    )
    assert noisy != noisier  # the noise has no seed


@pytest.mark.parametrize("out", ["a.npz", "a.png", "a.parquet", "folder", "deep/er/a.npz"])
def test_sample(privot, said, release, out, tmp_path):
    code, said_out, _ = privot("sample", release, "--count", 25, "--out", out)
    assert (code, said_out) == (0, f"25 samples in {out}\n")
    images, labels = Release.load(release).sample(25)
    pixels = (images * 255).round().byte().numpy()
    if out.endswith(".png"):
        assert Image.open(out).size[0] > 100
    else:
        found, found_labels = load_dataset(tmp_path / out, public=True).records()
        order = labels.argsort(stable=True) if out == "folder" else slice(None)
        assert np.array_equal((found * 255).round().byte().numpy(), pixels[order])
        assert found_labels.tolist() == labels[order].tolist()
    code, _, err = privot("sample", release, "--count", 3, "--out", out)
    assert (code, err) == (2, f"privot: {out} already exists. Choose another name or remove it.\n")
    assert said("sample", release, "--count", 3, "--out", "b.npz") == {"out": "b.npz", "count": 3}


def test_samples_replay_by_their_seed(said, release):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        said("sample", release, "--out", f"{name}.npz", "--seed", seed)
    a, b, c = (np.load(f"{name}.npz")["x"] for name in "abc")
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)
    said("sample", release, "--out", "narrow.npz", "--seed", 3, "--latent-scale", 0.01)
    assert np.load("narrow.npz")["x"].std(0).mean() < a.std(0).mean()


def test_a_parquet_has_the_layout_that_others_read(said, release):
    said("sample", release, "--count", 4, "--out", "a.parquet")
    row = parquet.read_table("a.parquet").to_pylist()[3]
    assert row["label"] == 3
    assert row["image"]["bytes"].startswith(b"\x89PNG")


def test_writing_a_parquet_needs_its_extra(privot, release, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = privot("sample", release, "--out", "a.parquet")
    assert (code, "privot[parquet]" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_many_samples_show_how_far_they_are(release, monkeypatch):
    """A large generator takes minutes where there is no GPU; in portions it draws what it would in one go."""
    told = []
    loaded = Release.load(release)
    whole = loaded.sample(25)
    monkeypatch.setattr(artifact, "SAMPLE_CHUNK_SIZE", 10)
    parts = loaded.artifact.sample(
        loaded.spec, 25, progress=lambda stage, step, of, **facts: told.append((stage, step, of))
    )
    assert told == [("sampling", 10, 25), ("sampling", 20, 25), ("sampling", 25, 25)]
    assert torch.allclose(whole[0], parts[0], atol=1e-5)
    assert torch.equal(whole[1], parts[1])


def test_nothing_is_drawn_for_a_file_that_cannot_be_written(privot, release, tmp_path, monkeypatch):
    (tmp_path / "a.npz").touch()
    monkeypatch.setattr(
        artifact.Artifact, "sample", lambda *given, **more: pytest.fail("drawn for nothing")
    )
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for out, why in (
        ("a.npz", "already exists"),
        ("a.gif", "samples can be written as"),
        ("a.parquet", "privot[parquet]"),
        ("a.npz/b.npz", "a.npz"),
    ):
        code, _, err = privot("sample", release, "--out", out)
        assert (code, why in err) == (2, True)


def test_samples_ask_for_a_device_that_is_there(privot, release, tmp_path):
    code, _, err = privot("sample", release, "--device", "cuda:99", "--out", tmp_path / "none.npz")
    assert code == 2
    assert "cuda:99" in err
    assert not (tmp_path / "none.npz").exists()


def test_samples_of_a_crashed_run_do_not_end_among_the_new_ones(said, release, tmp_path):
    (tmp_path / ".folder.part" / "0").mkdir(parents=True)
    (tmp_path / ".folder.part" / "0" / "old.png").write_bytes(b"old")
    said("sample", release, "--count", 10, "--out", "folder")
    assert len(list((tmp_path / "folder").rglob("*.png"))) == 10
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_measure(privot, said, release):
    words = ("measure", release, "--test", "digits", "--only", "logistic", "--count", 500)
    code, out, err = privot(*words)
    assert code == 0
    assert "logistic_accuracy" in out
    assert "internal" in out
    assert "training the classical classifiers: 1 of 1" in err
    found = said(*words)
    assert found.keys() == {"source", "release", "results"}
    assert found["release"] == (release / "manifest.sha256").read_text().strip()
    assert found["source"] == "digits"
    [reading] = found["results"]
    assert (reading["name"], reading["reference_size"], reading["publishable"]) == (
        "logistic_accuracy",
        359,
        False,
    )
    assert 0 < reading["value"] < 1
    [public] = said(*words, "--public")["results"]
    assert public["publishable"]
    assert public["value"] == reading["value"]  # the same samples, the same classifier


def test_measure_writes_what_report_and_ceiling_read(said, privot, release, tmp_path):
    words = (
        "measure",
        release,
        "--test",
        "digits",
        "--count",
        200,
        "--public",
        "--out",
        "deep/er/r.json",
    )
    found = said(*words, "--only", "gaussian_nb,exact")
    assert json.loads((tmp_path / "deep/er/r.json").read_text()) == found
    assert [each["name"] for each in found["results"]] == [
        "exact_wasserstein",
        "gaussian_nb_accuracy",
    ]
    assert found["results"][0]["standard_error"] == "nan"  # JSON has no other word for it
    assert [path.name for path in (tmp_path / "deep/er").iterdir()] == ["r.json"]
    again = [MetricResult.from_json(each) for each in found["results"]]
    assert [repr(each) for each in load_metric_results(tmp_path / "deep/er/r.json")] == [
        repr(each) for each in again
    ]
    code, _, err = privot(*words, "--only", "lda")
    assert (code, "deep/er/r.json already exists" in err) == (2, True)
    assert said(
        "measure",
        release,
        "--test",
        "digits",
        "--count",
        50,
        "--only",
        "lda",
        "--real-data-results",
        "deep/er/r.json",
    )


def test_measure_takes_foreign_output_and_features(said, privot, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "list_data_folders", lambda: [tmp_path / "data"])
    np.savez(
        tmp_path / "theirs.npz",
        x=np.random.default_rng(0).integers(0, 255, (60, 8, 8), np.uint8),
        y=np.arange(60) % 10,
    )
    words = ("measure", "theirs.npz", "--test", "digits", "--only", "fid,sliced")
    found = said(*words)
    assert found["source"] == "theirs"
    names = {each["name"] for each in found["results"]}
    assert {"domain_fd", "sliced_wasserstein"} <= names
    assert "fid" not in names
    code, out, err = privot(*words, "--public")
    assert code == 0
    assert err.count("warning: ") == 2
    assert "The domain_ metrics of a small network are measured instead" in err
    assert "domain_fd: so few images (60 samples)" in err
    assert "ConvNet of width 32" in out
    code, _, err = privot(*words, "--weights", "theirs.npz")
    assert (code, err.count("\n"), "not the weights" in err) == (2, 1, True)


def test_a_slip_in_a_measure_is_answered_by_the_nearest(privot, release):
    code, _, err = privot("measure", release, "--test", "digits", "--only", "cnn,precison")
    assert (code, err) == (2, "privot: There is no metric 'precison'. Did you mean 'precision'?\n")


def test_measure_refuses_a_test_on_the_training_data(privot, said, release, tmp_path):
    images, labels = load_dataset("digits", public=True).records()
    np.savez(tmp_path / "train.npz", x=(images[:, 0] * 16).round().numpy() / 16, y=labels.numpy())
    for words in (("--test", "train.npz"), ("--test", "train.npz", "--train", "digits")):
        code, _, err = privot("measure", release, *words, "--only", "lda", "--count", 50)
        assert (code, "overlaps the training data" in err) == (2, True)


def test_a_number_can_be_bought(privot, said, release):
    words = (
        "measure",
        release,
        "--test",
        "digits",
        "--count",
        60,
        "--accuracy-epsilon",
        3,
        "--ledger",
        "paid.jsonl",
    )
    [reading] = said(*words)["results"]
    assert (reading["name"], reading["publishable"]) == ("cnn_accuracy", True)
    assert "through the gate at epsilon 3" in reading["protocol"]
    assert said("ledger", "digits", "--ledger", "paid.jsonl")["spent_epsilon"] == pytest.approx(
        3, rel=1e-6
    )
    for more, name in (
        (("--public",), "--accuracy-epsilon"),
        (("--only", "lda"), "with networks"),
        (("--accuracy-epsilon", 0), "epsilon=0"),
    ):
        code, _, err = privot(*words, *more)
        assert (code, name in err) == (2, True)
    assert len(said("ledger", "digits", "--ledger", "paid.jsonl")["runs"]) == 1


def test_networks_that_are_paid_for_learn_soft_labels_too(said, images):
    [reading] = said(
        "measure", images, "--test", "digits", "--accuracy-epsilon", 3, "--ledger", "paid.jsonl"
    )["results"]
    assert "; soft labels;" in reading["protocol"]
    assert reading["num_samples"] == 20  # the set as it is


def test_what_was_paid_for_is_not_lost(privot, release, tmp_path):
    (tmp_path / "file").write_text("x")
    words = (
        "measure",
        release,
        "--test",
        "digits",
        "--count",
        60,
        "--accuracy-epsilon",
        3,
        "--ledger",
        "paid.jsonl",
    )
    code, _, _ = privot(*words, "--out", "file/x.json")  # said before anything is charged
    assert code == 2
    assert not (tmp_path / "paid.jsonl").exists()
    code, out, _ = privot(*words, "--out", "deep/x.json")
    assert code == 0
    assert "cnn_accuracy" in out
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["x.json"]
    code, _, err = privot(*words, "--train", "digits")
    assert (code, "--train" in err) == (2, True)


def test_the_ledger_of_a_test_split_can_be_seen_and_limited(privot, said, release):
    privot("measure", release, "--test", "digits", "--count", 60, "--accuracy-epsilon", 3)
    assert said("ledger", "digits/test")["spent_epsilon"] == pytest.approx(3, rel=1e-6)
    assert said("ledger", "digits")["spent_epsilon"] != pytest.approx(3, rel=1e-6)
    said("ledger", "digits/test", "--limit", 4)
    code, _, err = privot(
        "measure", release, "--test", "digits", "--count", 60, "--accuracy-epsilon", 3
    )
    assert (code, "does not allow" in err, "training" in err) == (2, True, False)  # before the work


def test_compare(privot, said, release, tmp_path):
    np.savez(
        tmp_path / "theirs.npz",
        x=np.random.default_rng(0).integers(0, 255, (60, 8, 8), np.uint8),
        y=np.arange(60) % 10,
    )
    words = (
        "compare",
        release,
        "theirs.npz",
        "--test",
        "digits",
        "--only",
        "gaussian_nb,cnn",
        "--count",
        60,
    )
    found = said(*words)
    assert [each["source"] for each in found["outputs"]] == ["digits", "theirs"]
    assert Path(found["page"]).name == "comparison.html"
    page = Path(found["page"]).read_text()
    assert "theirs" in page
    assert "foreign: no certificate" in page
    code, out, _ = privot(*words, "--out", "page")
    assert code == 0
    assert "gaussian_nb_accuracy" in out
    assert (tmp_path / "page" / "comparison.html").exists()
    code, _, err = privot("compare", release, "nothing.npz", "--test", "digits")
    assert (code, "nothing.npz" in err) == (2, True)


PUBLIC = ["report.html", "report.json", "registry.yaml", "README.md"]


def test_report(privot, said, release, tmp_path):
    said(
        "measure",
        release,
        "--test",
        "digits",
        "--only",
        "lda",
        "--count",
        50,
        "--public",
        "--out",
        "public.json",
    )
    said(
        "measure",
        release,
        "--test",
        "digits",
        "--only",
        "gaussian_nb",
        "--count",
        50,
        "--out",
        "internal.json",
    )
    assert (os.stat("public.json").st_mode & 0o004, os.stat("internal.json").st_mode & 0o777) == (
        0o004,
        0o600,
    )
    words = ("report", release, "--results", "public.json", "--results", "internal.json")
    code, out, err = privot(*words)
    assert code == 0
    assert [Path(line).name for line in out.splitlines()[:4]] == PUBLIC
    assert "guarantee  epsilon 5" in out
    assert "warning: Left out 1 result(s) that are not publishable" in err
    facts = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [each["name"] for each in facts["utility"]["results"]] == ["lda_accuracy"]
    found = said(*words)  # an earlier report is replaced
    assert [Path(each).name for each in found["files"]] == PUBLIC
    assert (found["broken"], found["left_out"]) == (False, 1)


def test_a_report_takes_nothing_of_another_release(privot, said, release, images, tmp_path):
    words = ("--test", "digits", "--only", "lda", "--count", 50, "--public")
    said("measure", release, *words, "--out", "one.json")
    said("sample", release, "--count", 50, "--out", "foreign.npz")
    said("measure", "foreign.npz", *words, "--out", "foreign.json")
    assert privot("report", release, "--results", "one.json")[0] == 0
    for target, file in ((images, "one.json"), (release, "foreign.json")):
        code, _, err = privot("report", target, "--results", file, "--out", "page")
        assert (code, f"{file} belongs to another release" in err, err.count("\n")) == (2, True, 1)
    shutil.copytree(release, "mine")
    Path("mine.attacks").mkdir()
    attack = {
        "name": "a",
        "fpr": [0.01],
        "tpr": [0.01],
        "tpr_lower": [0.0],
        "confidence": 0.95,
        "publishable": True,
    }
    for digest, code in (
        (Release.load(release).digest, 0),
        (Release.load(images).digest, 2),
    ):  # left by one that lay here before
        Path("mine.attacks", "a.json").write_text(
            json.dumps({"release": digest, "attacks": [attack]})
        )
        assert privot("report", "mine", "--out", "mine-page")[0] == code


def test_the_internal_report_is_for_the_owner(privot, said, release, tmp_path):
    said(
        "measure",
        release,
        "--test",
        "digits",
        "--only",
        "gaussian_nb",
        "--count",
        50,
        "--out",
        "internal.json",
    )
    book = release.parent / "book.jsonl"
    found = said(
        "report",
        release,
        "--internal",
        "--data",
        "digits",
        "--ledger",
        book,
        "--results",
        "internal.json",
        "--out",
        "both",
    )
    assert [Path(each).name for each in found["files"]] == [
        *PUBLIC,
        "internal.html",
        "internal.json",
    ]
    assert found["left_out"] == 0
    facts = json.loads((tmp_path / "both-internal" / "internal.json").read_text())
    assert [each["name"] for each in facts["utility"]["results"]] == ["gaussian_nb_accuracy"]
    assert facts["history"]["contains_head"]
    assert "gaussian_nb" not in (tmp_path / "both" / "report.json").read_text()
    for words in (("--data", "digits"), ("--ledger", book)):
        code, _, err = privot("report", release, *words, "--out", "none")
        assert (code, "--internal" in err, err.count("\n")) == (2, True, 1)
    code, _, err = privot(
        "report", release, "--internal", "--ledger", "nothing.jsonl", "--out", "none"
    )
    assert (code, err) == (2, "privot: The ledger nothing.jsonl does not exist.\n")
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "nothing.jsonl").exists()


def test_an_attack_above_the_certificate_ends_with_3(privot, release, tmp_path):
    claim = Release.load(release).guarantee.max_tpr["0.01"]
    for name, power, broken in (("weak", claim / 2, False), ("strong", (1 + claim) / 2, True)):
        attack = {
            "name": name,
            "fpr": [0.01],
            "tpr": [power],
            "tpr_lower": [power],
            "confidence": 0.95,
            "publishable": True,
        }
        (tmp_path / f"{name}.json").write_text(json.dumps({"attacks": [attack]}))
        for json_too in ((), ("--json",)):
            code, out, err = privot(
                "report", release, "--attacks", f"{name}.json", "--out", name, *json_too
            )
            assert code == (3 if broken else 0)
            assert ("implementation broken" in err) is broken
            assert out
            if json_too:
                assert json.loads(out)["broken"] is broken
        assert (tmp_path / name / "report.html").exists()  # the page says so too


@pytest.mark.parametrize("option", ["--results", "--attacks"])
def test_report_refuses_files_of_another_kind(privot, release, tmp_path, option):
    for text in ("", "{}", '{"results": [3], "attacks": 3}'):
        (tmp_path / "a.json").write_text(text)
        code, _, err = privot("report", release, option, "a.json")
        assert (code, err.startswith("privot: a.json") and " file of " in err, err.count("\n")) == (
            2,
            True,
            1,
        )
    assert not (tmp_path / "report").exists()


def test_verify(privot, said, release):
    code, out, _ = privot("verify", release)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == [
        "digests",
        "guarantee",
        "recomputed",
    ]
    result = said("verify", release)
    assert result["epsilon_from_events"] == pytest.approx(result["guarantee"]["epsilon"])


def test_ledger(privot, said, tmp_path):
    book = ("--ledger", tmp_path / "book.jsonl")
    assert said("ledger", "digits", *book) == {
        "ledger": str(tmp_path / "book.jsonl"),
        "limit": None,
        "limit_delta": None,
        "spent_epsilon": 0.0,
        "delta": 1e-5,
        "runs": [],
        "checkpoints": [],
        "neighbours": None,
        "privacy_unit": None,
        "is_dataset_ledger": False,
        "internal": [],
    }
    assert not (tmp_path / "book.jsonl").exists()  # looking writes nothing
    said("synthesize", "digits", "--epsilon", 1, *QUICK, "--out", "one", *book)
    said("synthesize", "digits", "--epsilon", 1, *QUICK, "--out", "two", *book)
    facts = said("ledger", "digits", *book, "--limit", 3)
    assert facts["limit"] == 3
    assert 1 < facts["spent_epsilon"] < 2  # composition, not addition
    assert [run["method"] for run in facts["runs"]] == ["merf", "merf"]
    code, out, err = privot("ledger", "digits", *book)
    assert code == 0
    assert "of 3" in out
    assert "warning" not in err
    assert Ledger(tmp_path / "book.jsonl").limit().epsilon == 3
    code, out, err = privot("ledger", "digits", *book, "--limit", 0.5)
    assert (code, "of 0.5" in out, "spent more than the limit" in err) == (0, True, True)
    assert "embedding" in out  # answers are named
    facts = said("ledger", "digits", *book, "--limit", 3, "--delta", 1e-7)
    assert said("ledger", "digits", *book) == facts  # spent at the delta of the limit
    assert (facts["delta"], facts["limit_delta"]) == (1e-7, 1e-7)
    assert (
        said("ledger", "digits", *book, "--limit", 4)["limit_delta"] == 1e-7
    )  # unless another is given
    assert said("ledger", "digits", *book, "--limit", 3, "--delta", 1e-7)["limit"] == 3
    assert "of 3 at delta 1e-07" in privot("ledger", "digits", *book, "--delta", 1e-4)[1]


def test_a_slip_in_a_verb_is_asked_about_once(privot):
    code, _, err = privot("synthesise", "digits")
    assert code == 2
    assert err.count("Did you mean 'synthesize'?") <= 1  # older versions of click do not ask


def test_cite(privot, said):
    code, out, _ = privot("cite", "merf")
    assert code == 0
    assert out.startswith("@inproceedings{")
    assert said("cite", "merf") == {"method": "merf", "citation": out[:-1]}


@pytest.fixture
def quick_demo(monkeypatch):
    """The demo itself, with less training, and one classifier."""
    monkeypatch.setattr(demo, "DEMO_SETTINGS", SMALL)
    monkeypatch.setattr(demo, "DEMO_CLASSIFIERS", ("logistic",))


def test_demo(privot, said, quick_demo, tmp_path):
    code, out, err = privot("demo")
    assert code == 0
    words = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
    assert words == [
        "guarantee",
        "logistic_accuracy",
        "verified",
        "release",
        "samples",
        "report",
        "ledger",
    ]
    result = said("demo", "--epsilon", 2)  # what the demo made, the demo may replace
    assert result["verified_epsilon"] == pytest.approx(2, rel=1e-6)
    assert all(Path(where).exists() for where in result["files"].values())
    assert result["results"][0]["num_samples"] == 20  # the set itself
    assert "guarantee  none" in privot("demo", "--epsilon", "inf")[1]
    for wrong, name in (("0", "epsilon=0"), ("-1", "epsilon=-1")):
        code, out, err = privot("demo", "--epsilon", wrong)
        assert (code, name in err) == (2, True)
    assert Path(result["files"]["release"]).exists()  # a refused demo leaves the last one alone
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    code, out, err = privot("demo", "--out", "mine")
    assert (code, "--out" in err) == (2, True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"


REFUSED = {
    "no such verb": ("synthesise", "digits"),
    "verify nothing": ("verify", "nothing"),
    "verify a file": ("verify", __file__),
    "sample nothing": ("sample", "nothing", "--out", "a.npz"),
    "sample none": ("sample", "{release}", "--count", "0", "--out", "a.npz"),
    "sample too many": ("sample", "{release}", "--count", "1000000000000", "--out", "a.npz"),
    "sample an unknown ending": ("sample", "{release}", "--out", "a.gif"),
    "sample with a wild seed": ("sample", "{release}", "--seed", str(2**70), "--out", "a.npz"),
    "sample under a file": ("sample", "{release}", "--out", "{release}/manifest.json/a.npz"),
    "resize nothing": ("resize", "nothing", "--images-per-class", "3", "--out", "b"),
    "resize a generator": ("resize", "{release}", "--images-per-class", "3", "--out", "b"),
    "resize to nothing": ("resize", "{images}", "--images-per-class", "0", "--out", "b"),
    "resize to no number": ("resize", "{images}", "--out", "b"),
    "resize to nowhere": ("resize", "{images}", "--images-per-class", "3"),
    "resize onto something": ("resize", "{images}", "--images-per-class", "3", "--out", "a.npz"),
    "resize on no device": (
        "resize",
        "{images}",
        "--images-per-class",
        "3",
        "--out",
        "b",
        "--device",
        "abacus",
    ),
    "measure by an unknown classifier": (
        "measure",
        "{release}",
        "--test",
        "digits",
        "--only",
        "oracle",
        "--count",
        "20",
    ),
    "measure on nothing": ("measure", "{release}", "--test", "nothing.npz"),
    "measure on another shape": (
        "measure",
        "{release}",
        "--test",
        "a.npz",
        "--only",
        "logistic",
        "--count",
        "50",
    ),
    "measure with one sample": (
        "measure",
        "{release}",
        "--test",
        "digits",
        "--only",
        "logistic",
        "--count",
        "1",
    ),
    "measure by no measure": ("measure", "{release}", "--test", "digits", "--only", ""),
    "measure with an unreadable ceiling": (
        "measure",
        "{release}",
        "--test",
        "digits",
        "--real-data-results",
        "a.npz",
    ),
    "measure the score without training data": (
        "measure",
        "{release}",
        "--test",
        "digits",
        "--only",
        "is",
        "--count",
        "20",
    ),
    "measure with the old option": ("measure", "{release}", "--test", "digits", "--public-test"),
    "compare nothing": ("compare", "--test", "digits"),
    "compare with nothing": ("compare", "{release}", "nothing.npz", "--test", "digits"),
    "report on nothing": ("report", "nothing"),
    "report without --internal": ("report", "{release}", "--data", "digits"),
    "report with other readings": ("report", "{release}", "--results", "a.npz"),
    "report into something else": ("report", "{release}", "--out", "{release}"),
    "measure with a wild seed": ("measure", "{release}", "--test", "digits", "--seed", "-1"),
    "ledger of nothing": ("ledger", "nothing.npz"),
    "ledger of a slip": ("ledger", "digit", "--limit", "3"),
    "ledger with a limit of nothing": ("ledger", "digits", "--limit", "0"),
    "ledger with an impossible delta": ("ledger", "digits", "--delta", "1"),
    "cite nobody": ("cite", "nobody"),
    "plan without a budget": ("plan", "digits"),
    "plan on no device": ("plan", "digits", "--epsilon", "1", "--device", "abacus"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(privot, release, images, tmp_path, name):
    np.savez(tmp_path / "a.npz", x=np.zeros((20, 9, 9), np.uint8), y=np.arange(20) % 10)
    words = [each.format(release=release, images=images) for each in REFUSED[name]]
    for json_too in ((), ("--json",)):
        code, out, err = privot(*words, *json_too)
        assert code == 2
        assert err.startswith("privot: ")
        assert err.count("\n") == 1
        if json_too:
            assert json.loads(out) == {"error": err[len("privot: ") : -1]}
        else:
            assert out == ""
    assert [
        each.name for each in tmp_path.iterdir() if each.suffix != ".lock" and each.name != "home"
    ] == ["a.npz"]


VERBS = (
    "methods",
    "plan",
    "synthesize",
    "resize",
    "sample",
    "measure",
    "compare",
    "report",
    "verify",
)


@pytest.mark.parametrize("words", [(), ("--help",), *((verb, "--help") for verb in VERBS)])
def test_help(privot, words):
    code, out, err = privot(*words)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: privot")


def test_version(privot):
    assert privot("--version") == (0, f"privot {__version__}\n", "")


def test_not_enough_memory_is_said_in_one_line(privot, release, monkeypatch):
    for error in (
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ):
        monkeypatch.setattr(
            artifact.Artifact, "sample", lambda *_, error=error, **__: (_ for _ in ()).throw(error)
        )
        code, _, err = privot("sample", release, "--out", "a.npz")
        assert (code, err.count("\n"), "memory" in err) == (2, 1, True)
    monkeypatch.setattr(
        artifact.Artifact, "sample", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("a bug"))
    )
    with pytest.raises(
        RuntimeError, match="a bug"
    ):  # our own mistakes are not dressed up as the user's
        privot("sample", release, "--out", "a.npz")


LONG = [
    ("resize", "{images}", "--images-per-class", "3"),
    ("compare", "{release}", "--test", "digits"),
    ("invert", "--data", "digits"),
]


def test_classes_are_known_by_their_names(privot, said, tmp_path):
    make_release(classes=3).save(tmp_path / "ours")  # cat, dog, ship
    pixels = np.random.default_rng(0).integers(0, 255, (3, 4, 8, 8), np.uint8)
    for folder, names in (
        ("test", ("ship", "cat", "dog")),
        ("wrong", ("ant", "cat", "dog")),
        ("few", ("cat", "ship")),
    ):
        for name, own in zip(names, pixels, strict=False):
            Path(folder, name).mkdir(parents=True)
            for place, each in enumerate(own):
                Image.fromarray(each).save(Path(folder, name, f"{place}.png"))
    words = ("measure", "ours", "--only", "lda", "--test")
    assert said(*words, "test")["results"][0]["reference_size"] == 12
    for folder, what in (
        ("wrong", "'ant' is not one of the known classes"),
        ("few", "'dog' has no records"),
    ):
        code, _, err = privot(*words, folder)
        assert (code, f"class {what}" in err, err.count("\n")) == (2, True, 1), err
    code, _, err = privot(
        "attack", "nearest-pixels", "ours", "--members", "test", "--nonmembers", "wrong"
    )
    assert (code, "class 'ant' is not one of the known classes" in err) == (2, True)
    code, _, err = privot("compare", "ours", "test", "--test", "wrong", "--only", "lda")
    assert (code, "class 'ant' is not one of the known classes" in err) == (2, True)
    said("sample", "ours", "--count", 6, "--out", "drawn")
    assert sorted(each.name for each in Path("drawn").iterdir()) == ["cat", "dog", "ship"]
    said("compare", "ours", "drawn", "--test", "test", "--only", "lda", "--out", "page")
    numbered = make_release(classes=3, names=("1", "2", "3")).save(tmp_path / "numbered")
    said("sample", numbered, "--count", 6, "--out", "one-two-three")
    assert sorted(each.name for each in Path("one-two-three").iterdir()) == ["1", "2", "3"]


def test_foreign_folders_are_known_by_the_names_of_a_built_in(privot, said, monkeypatch):
    """Whose order is not that of the alphabet."""
    entry = {
        **load_catalog()["digits"],
        "class_names": [f"{10 - each} units" for each in range(10)],
    }
    monkeypatch.setitem(load_catalog(), "digits", entry)
    images, labels = load_dataset("digits", public=True).records()
    for place in range(200):
        folder = Path("theirs", entry["class_names"][labels[place]])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((images[place, 0] * 255).byte().numpy()).save(folder / f"{place}.png")
    assert (
        said("measure", "theirs", "--test", "digits", "--only", "lda")["results"][0]["value"] > 0.5
    )


def test_what_adds_no_noise_keeps_to_no_budget(privot, said):
    words = (
        "synthesize",
        "digits",
        "--method",
        "real-subset",
        "--set",
        "images_per_class=1",
        "--out",
        "one",
    )
    for wall in (("--epsilon", 1), ("--max-tpr", "0.05@0.01")):
        code, _, err = privot(*words, *wall)
        assert (
            code,
            "real-subset adds no noise, so it cannot stay within a budget" in err,
            err.count("\n"),
        ) == (2, True, 1)
    assert (said("ledger", "digits")["runs"], Path("one.run").exists()) == ([], False)
    assert [
        "infinite epsilon for good" in each for each in said(*words, "--epsilon", "inf")["warnings"]
    ] == [True]


@pytest.mark.usefixtures("coarse_accounting")
def test_a_run_that_is_refused_before_it_asks_leaves_nothing(privot, said):
    np.savez("few.npz", x=np.zeros((20, 8, 8), np.uint8), y=np.arange(20) % 2)
    words = (
        "synthesize",
        "few.npz",
        "--method",
        "gs-wgan",
        "--epsilon",
        1,
        "--out",
        "one",
        "--ledger",
        "book.jsonl",
        "--device",
        "cpu",
    )
    for _ in range(2):
        code, _, err = privot(*words, "--set", "steps=100")
        assert (code, "Set fewer critics" in err.splitlines()[-1]) == (2, True), err
    assert (
        said("ledger", "digits", "--ledger", "book.jsonl")["runs"],
        Path("one.run").exists(),
    ) == ([], False)


def test_critics_that_a_crash_left_behind_are_named(privot, said, tmp_path):
    said("synthesize", "digits", "--epsilon", 5, *QUICK, "--out", "one", "--ledger", "book.jsonl")
    for name in (
        "vault0.safetensors",
        "vault3.safetensors.7.part",
        "vault0 (copy).safetensors",
        "vaulted",
    ):
        Path(f"book.jsonl.{name}").touch()
    assert (
        f"{tmp_path}/book.jsonl.vault3.safetensors.7.part holds"
        in privot("ledger", "digits", "--ledger", tmp_path / "book.jsonl")[2]
    )
    told = f"{tmp_path}/book.jsonl.vault0.safetensors holds shard states"
    assert told in privot("ledger", "digits", "--ledger", tmp_path / "book.jsonl")[2]
    assert said("ledger", "digits", "--ledger", "book.jsonl")["checkpoints"] == [
        "book.jsonl.vault0.safetensors"
    ]
    found = said(
        "synthesize",
        "digits",
        "--epsilon",
        5,
        *QUICK,
        "--out",
        "two",
        "--ledger",
        tmp_path / "book.jsonl",
    )
    assert any(each.startswith(told) for each in found["warnings"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            (
                "digits",
                "--method",
                "gs-wgan",
                "--set",
                "num_critics=200",
                "--set",
                "noise_multiplier=9",
                "--set",
                "steps=9",
            ),
            "would have 7 records",
        ),
        (
            ("digits", "--method", "merf", "--clients", "3", "--epsilon", 10),
            "not for all records of one of the 3 clients",
        ),
        (
            ("here.npz", "--shape", "1x8x8", "--classes", "10", "--epsilon", 10),
            "no sizes are declared",
        ),
    ],
)
def test_a_plan_says_what_a_careful_colleague_would(words, told, said):
    Path("here.npz").touch()
    cautions = said("plan", *words)["warnings"]
    assert sum(told in each for each in cautions) == 1, cautions
    assert not any(
        told in each
        for each in said("plan", "mnist", "--method", "merf", "--epsilon", 10)["warnings"]
    )


@pytest.mark.parametrize("words", LONG)
def test_what_cannot_be_written_is_said_before_the_work(
    words, privot, release, images, monkeypatch
):
    for place, name in (
        ("privot.synthesis.resize", "_regenerate_artifact"),
        ("privot.measures.evaluator", "Evaluator.measure"),
        ("privot.attacks.inversion.experiment", "invert"),
    ):
        owner = importlib.import_module(place)
        *outer, name = name.split(".")
        for each in outer:
            owner = getattr(owner, each)
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("the work began"))
    Path("file").touch()
    code, _, err = privot(
        *(each.format(release=release, images=images) for each in words), "--out", "file/deeper"
    )
    assert (code, err.count("\n"), "cannot be written" in err) == (2, 1, True), err


def test_once_records_are_open_epsilon_is_not_0(privot):
    _, _, err = privot(
        "synthesize",
        "digits",
        "--method",
        "real-subset",
        "--epsilon",
        "inf",
        "--set",
        "images_per_class=1",
        "--out",
        "one",
    )
    assert err.splitlines()[-1].endswith("epsilon inf")


def test_an_interrupt_ends_with_130(privot, release, monkeypatch):
    monkeypatch.setattr(
        artifact.Artifact, "sample", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    code, out, err = privot("sample", release, "--out", "a.npz")
    assert (code, out, err) == (
        130,
        "",
        "privot: Stopped.\n",
    )  # nothing was charged, and there is nothing to resume
    code, out, _ = privot("sample", release, "--out", "a.npz", "--json")
    assert (code, json.loads(out)) == (130, {"error": "Stopped."})


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines():
    def shown(terminal):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with show_progress_bar(console) as progress:
            for step in range(1, 101):
                progress("training", step, 100, epsilon=1.23456, note="on")
            progress("measuring", 1, 1)
        return console.file.getvalue()

    lines = shown(False).splitlines()
    assert len(lines) == 12
    assert lines[:2] == [
        "training: 1 of 100  epsilon 1.24  note on",
        "training: 10 of 100  epsilon 1.24  note on",
    ]  # rounded up
    bar = shown(True)
    assert "\x1b[" in bar
    assert "100/100" in bar
    assert "epsilon 1.24" in bar


def test_help_does_not_wait_for_torch():
    script = (
        "import sys; sys.argv = ['privot', '--help']\n"
        "from privot.cli import main\n"
        "main()\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'dp_accounting', 'PIL', 'pyarrow', 'matplotlib'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "synthesize" in done.stdout


def test_a_reader_that_goes_away_is_no_crash(release):
    """`privot verify RELEASE | true`."""
    command = [sys.executable, "-c", "from privot.cli import main; main()", "verify", str(release)]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert "Traceback" not in done.stderr


def test_a_plan_takes_declared_sizes(privot):
    """It reads no record, so what needs class sizes must be told them."""
    words = ("plan", "digits", "--method", "sliced-flow", "--epsilon", 10, "--json")
    code, _, err = privot(*words)
    assert code == 2
    assert "--class-sizes" in err
    code, out, err = privot(*words, "--class-sizes", ",".join(["179"] * 10))
    assert code == 0, err
    assert json.loads(out)["forecast"]["signal_to_noise_per_class"] > 0
    for wrong in ("179", "a,b", "5,-1", ""):
        code, _, err = privot(*words, "--class-sizes", wrong)
        assert code == 2, err
    assert privot("plan", "digits", "--method", "merf", "--epsilon", 1, "--size", 100)[0] == 0


def test_a_ledger_that_would_move_with_the_folder_is_refused(privot, monkeypatch, tmp_path):
    """Else who works in another folder would miss what was spent, and the owner's wall."""
    monkeypatch.setenv("PRIVOT_HOME", "state")
    code, out, err = privot("ledger", "digits")
    assert (code, out) == (2, "")
    assert "PRIVOT_HOME=state: an absolute path is needed" in err
    monkeypatch.delenv("PRIVOT_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for state, folder in (
        ("state", tmp_path / "me/.local/state"),
        (str(tmp_path / "state"), tmp_path / "state"),
    ):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert ledger_path("digits").is_relative_to(folder / "privot" / "ledgers")
