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
from support.command_words import TINY_SET, format_settings
from support.factories import make_release

from privot import __version__
from privot import io as files
from privot.cli import demo
from privot.data import load_catalog, load_dataset, readers
from privot.data.dataset import Sensitive
from privot.measures.result import MetricResult, load_metric_results
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import ledger_path
from privot.progress import show_progress_bar
from privot.release import Release, artifact
from privot.synthesis import synthesize

QUICK = "--method merf --set num_features=200 --set steps=20"  # a generator
SMALL = {**TINY_SET, "soft_label_weight": 0.5}  # a set, by the default method
SETS = format_settings(SMALL)
PUBLIC = ["report.html", "report.json", "registry.yaml", "README.md"]


def fail(error):
    """Whatever it is given, it raises this error."""

    def stop(*_, **__):
        raise error

    return stop


def read_heads(out):
    """The first words of the lines that are not indented."""
    return [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A generator of digits."""
    root = tmp_path_factory.mktemp("generator")
    settings = {"num_features": 200, "steps": 20}
    out = root / "digits"
    synthesize("digits", "merf", 5.0, settings=settings, out=out, ledger=root / "ledger.jsonl")
    return out


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A set of digits, by the default method."""
    root = tmp_path_factory.mktemp("set")
    out = root / "digits"
    synthesize("digits", budget=5.0, settings=SMALL, out=out, ledger=root / "ledger.jsonl")
    return out


@pytest.fixture
def foreign(tmp_path):
    """60 images that another program wrote."""
    pixels = np.random.default_rng(0).integers(0, 255, (60, 8, 8), np.uint8)
    np.savez(tmp_path / "theirs.npz", x=pixels, y=np.arange(60) % 10)


# methods, cite, help


def test_lists_methods_and_cites_them(privot, run_json):
    code, out, _ = privot("methods")
    assert (code, "merf" in out) == (0, True)
    rows = run_json("methods")
    assert "merf" in {row["name"] for row in rows}
    assert all(row.keys() == {"name", "title", "trusts", "promise"} for row in rows)
    code, out, _ = privot("cite merf")
    assert (code, out.startswith("@inproceedings{")) == (0, True)
    assert run_json("cite merf") == {"method": "merf", "citation": out[:-1]}


def test_prints_help_and_version(privot):
    verbs = "methods plan synthesize resize sample measure compare report verify"
    for words in ("", "--help", *(f"{verb} --help" for verb in verbs.split())):
        code, out, err = privot(words)
        assert (code, err) == (0, "")
        assert out.startswith("Usage: privot")
    assert privot("--version") == (0, f"privot {__version__}\n", "")


# plan


def test_a_plan_prices_a_run(privot, run_json):
    code, out, err = privot("plan digits --epsilon 5")
    assert (code, err) == (0, "")
    assert "epsilon 5" in out
    assert "None" not in out
    facts = run_json("plan digits --epsilon 1")
    assert facts["method"] == "private-set"
    assert facts["guarantee"]["epsilon"] == pytest.approx(1, rel=1e-6)
    stages = facts["plan"]["stages"]
    whole = sum(stage["steps"] / stage["noise_multiplier"] ** 2 for stage in stages) ** -0.5
    assert whole == pytest.approx(3.7306, rel=1e-4)  # one Gaussian of epsilon 1 at delta 1e-5
    assert facts["forecast"]["predicted_seconds"] > 0
    fixed = run_json("plan digits --set noise_multiplier=5")["guarantee"]
    assert fixed["epsilon"] == pytest.approx(0.726, abs=1e-3)
    powers = run_json("plan digits --max-tpr 0.05@0.01")["guarantee"]["max_tpr"]
    assert 0.0499 < powers["0.01"] <= 0.05
    assert run_json("plan digits --epsilon inf")["guarantee"] == {"reason": "no noise is added"}


def test_plan_reads_no_record_and_spends_nothing(run_json, expect_refusal, tmp_path, monkeypatch):
    touched = fail(AssertionError("a record was read"))
    for name in ("read_idx", "read_npz", "read_parquet", "read_folder"):
        monkeypatch.setattr(readers, name, touched)
    monkeypatch.setattr("sklearn.datasets.load_digits", touched)
    monkeypatch.setattr(Sensitive, "__init__", touched)
    for source in load_catalog():
        assert run_json("plan", source, "--epsilon 1")["spec"]["size"]
    (tmp_path / "scans.npz").write_bytes(b"nobody looks in here")
    (tmp_path / "photos").mkdir()
    for path in ("scans.npz", "photos"):
        spec = run_json("plan", path, "--epsilon 1 --shape 3x16x16 --classes 4")["spec"]
        assert (spec.pop("shape"), spec.pop("num_classes")) == ([3, 16, 16], 4)
        undeclared = ("size", "class_sizes", "class_names", "flip_invariant")
        assert spec == dict.fromkeys(undeclared)
        expect_refusal("--shape", "plan", path, "--epsilon 1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "scans.npz"]


def test_a_plan_takes_declared_sizes(privot, run_json):
    """It reads no record, so what needs class sizes must be given them."""
    words = "plan digits --method sliced-flow --epsilon 10"
    code, _, err = privot(words)
    assert (code, "--class-sizes" in err) == (2, True)
    forecast = run_json(words, "--class-sizes", ",".join(["179"] * 10))["forecast"]
    assert forecast["signal_to_noise_per_class"] > 0
    for wrong in ("179", "a,b", "5,-1", "''"):
        assert privot(words, "--class-sizes", wrong)[0] == 2, wrong
    assert privot("plan digits --method merf --epsilon 1 --size 100")[0] == 0


def test_settings_come_from_a_file_and_the_command_wins(run_json, tmp_path):
    given = 'num_features = 300\nsteps = 20\nneighbours = "add-remove"\nbandwidths = [5, 10.5]\n'
    (tmp_path / "c.toml").write_text(given)
    words = "plan digits --epsilon 1 --method merf --config c.toml --set num_features=200"
    settings = run_json(words)["settings"]
    assert (settings["num_features"], settings["steps"]) == (200, 20)
    assert (settings["neighbours"], settings["bandwidths"]) == ("add-remove", [5.0, 10.5])


@pytest.mark.parametrize(
    ("words", "caution"),
    [
        (
            "digits --method gs-wgan --set num_critics=200 --set noise_multiplier=9 --set steps=9",
            "would have 7 records",
        ),
        (
            "digits --method merf --clients 3 --epsilon 10",
            "not for all records of one of the 3 clients",
        ),
        ("here.npz --shape 1x8x8 --classes 10 --epsilon 10", "no sizes are declared"),
    ],
)
@pytest.mark.usefixtures("coarse_accounting")
def test_a_plan_warns_of_what_a_colleague_would_notice(words, caution, run_json):
    Path("here.npz").touch()
    cautions = run_json("plan", words)["warnings"]
    assert sum(caution in text for text in cautions) == 1, cautions
    plain = run_json("plan mnist --method merf --epsilon 10")["warnings"]
    assert not any(caution in text for text in plain)


# synthesize, resize


def test_synthesize(privot, run_json, tmp_path):
    code, out, err = privot("synthesize digits --epsilon 5", QUICK, "--set steps=100 --out one")
    assert code == 0
    assert read_heads(out) == ["release", "guarantee", "ledger"]
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    stages = ["embedding the records"] * 2 + ["training the generator"] * 4
    assert [line.split(":")[0] for line in lines] == stages
    assert all("epsilon 5" in line for line in lines[1:])  # whole lines in a pipe, no escapes
    assert err.isascii()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "one"]
    result = run_json("synthesize digits --epsilon 2", QUICK, "--out two")
    assert result["guarantee"]["epsilon"] == pytest.approx(2, rel=1e-6)
    assert result["ledger"]["spent_epsilon"] > 5  # the first run counts too
    assert result["release"] == "two"


def test_the_method_is_a_private_set_unless_another_is_named(run_json):
    result = run_json("synthesize digits --epsilon 5", SETS, "--out one")
    assert result["warnings"] == []
    made = Release.load("one")
    assert made.metadata["method"] == "private-set"
    assert made.artifact.tensors["images"].shape == (20, 1, 8, 8)
    assert run_json("ledger digits")["runs"][0]["method"] == "private-set"


def test_warns_of_too_little_signal_before_anything_is_spent(privot, run_json, monkeypatch):
    words = f"digits --epsilon 0.2 {SETS}"
    [caution] = run_json("plan", words)["warnings"]
    assert caution.startswith("the predicted signal-to-noise ratio")
    assert "a class has about 144 records" in caution
    with monkeypatch.context() as stopped:
        stopped.setattr(Ledger, "reserve", fail(KeyboardInterrupt))
        code, _, err = privot("synthesize", words, "--out one")
    assert (code, err.splitlines()[0]) == (130, f"warning: {caution}")
    assert run_json("ledger digits")["runs"] == []
    assert run_json("synthesize", words, "--out two")["warnings"] == [caution]
    needed = float(caution.split("epsilon ")[1].split()[0])
    assert run_json("plan digits", SETS, f"--epsilon {needed}")["warnings"] == []
    assert run_json("plan digits", SETS, f"--epsilon {0.8 * needed}")["warnings"] != []


def test_synthesize_from_a_path(run_json, tmp_path):
    images, labels = load_dataset("digits", public=True).records()
    np.savez(tmp_path / "a.npz", x=(images[:, 0] * 255).byte().numpy(), y=labels.numpy())
    run_json("synthesize a.npz --epsilon 5", QUICK, "--out out")
    manifest = (tmp_path / "out" / "manifest.json").read_text()
    assert json.loads(manifest)["spec"]["size"] is None
    assert str(tmp_path) not in manifest  # where the owner keeps the data is nobody's business
    for same in ("a.npz", "./a.npz"):
        assert len(run_json("ledger", same)["runs"]) == 1


def test_the_public_seed_replays_what_is_public(run_json, tmp_path):
    """The answers of the gate are noisy; from the same answers comes the same generator."""

    def read_tensors(epsilon, seed, out):
        run_json(f"synthesize digits --epsilon {epsilon} --seed {seed} {QUICK} --out {out}")
        return (tmp_path / out / "tensors.safetensors").read_bytes()

    one = read_tensors("inf", 7, "one")
    assert one == read_tensors("inf", 7, "two")
    assert one != read_tensors("inf", 8, "other")
    assert read_tensors(5, 7, "noisy") != read_tensors(5, 7, "noisier")  # noise has no seed


def test_what_adds_no_noise_keeps_to_no_budget(privot, run_json, expect_refusal):
    words = "synthesize digits --method real-subset --set images_per_class=1 --out one"
    reason = "real-subset adds no noise, so it cannot stay within a budget"
    for budget in ("--epsilon 1", "--max-tpr 0.05@0.01"):
        expect_refusal(reason, words, budget)
    assert (run_json("ledger digits")["runs"], Path("one.run").exists()) == ([], False)
    code, out, err = privot(words, "--epsilon inf --json")
    [warning] = json.loads(out)["warnings"]
    assert (code, "infinite epsilon for good" in warning) == (0, True)
    assert err.splitlines()[-1].endswith("epsilon inf")  # and not 0


@pytest.mark.usefixtures("coarse_accounting")
def test_a_run_that_is_refused_before_it_asks_leaves_nothing(privot, run_json):
    np.savez("few.npz", x=np.zeros((20, 8, 8), np.uint8), y=np.arange(20) % 2)
    noise = "--set noise_multiplier=9 --set steps=9"
    words = f"synthesize few.npz --method gs-wgan {noise} --out one"
    for _ in range(2):
        code, _, err = privot(words, "--ledger ledger.jsonl --device cpu")
        assert (code, "Set fewer critics" in err.splitlines()[-1]) == (2, True), err
    assert run_json("ledger digits --ledger ledger.jsonl")["runs"] == []
    assert not Path("one.run").exists()


def test_names_the_critics_that_a_crash_left_behind(privot, run_json, tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    run_json("synthesize digits --epsilon 5", QUICK, "--out one --ledger", ledger)
    states = ("vault0.safetensors", "vault3.safetensors.7.part")
    for name in (*states, "vault0 (copy).safetensors", "vaulted"):
        Path(f"ledger.jsonl.{name}").touch()
    _, _, err = privot("ledger digits --ledger", ledger)
    assert f"{ledger}.vault3.safetensors.7.part holds" in err
    caution = f"{ledger}.vault0.safetensors holds shard states"
    assert caution in err
    facts = run_json("ledger digits --ledger ledger.jsonl")
    assert facts["checkpoints"] == ["ledger.jsonl.vault0.safetensors"]
    result = run_json("synthesize digits --epsilon 5", QUICK, "--out two --ledger", ledger)
    assert any(warning.startswith(caution) for warning in result["warnings"])


def test_resize_touches_neither_data_nor_a_ledger(privot, run_json, images, tmp_path, monkeypatch):
    for type_ in (Ledger, Sensitive, Gate):
        monkeypatch.setattr(type_, "__init__", fail(AssertionError("data or a ledger")))
    code, out, err = privot(f"resize {images} --images-per-class 5 --out five")
    assert (code, read_heads(out)) == (0, ["release", "guarantee"])
    assert "50 images, nothing spent" in out
    assert all(line.split(":")[0] for line in err.splitlines())
    result = run_json(f"resize {images} --images-per-class 1 --out one")
    assert (result["release"], result["images"]) == ("one", 10)
    assert result["from"] == (images / "manifest.sha256").read_text().strip()
    assert run_json("verify one")["epsilon_from_events"] == pytest.approx(5, rel=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["five", "one"]


# sample


@pytest.mark.parametrize("out", ["a.npz", "a.png", "a.parquet", "folder", "deep/er/a.npz"])
def test_samples_are_written_as_they_are_drawn(privot, run_json, release, out, tmp_path):
    sample = f"sample {release} --count"
    assert privot(sample, f"25 --out {out}")[:2] == (0, f"25 samples in {out}\n")
    images, labels = Release.load(release).sample(25)
    if out.endswith(".png"):
        assert Image.open(out).size[0] > 100
    else:
        read, read_labels = load_dataset(tmp_path / out, public=True).records()
        order = labels.argsort(stable=True) if out == "folder" else slice(None)
        assert torch.equal((read * 255).round().byte(), (images[order] * 255).round().byte())
        assert read_labels.tolist() == labels[order].tolist()
    if out.endswith(".parquet"):  # the layout that others read
        row = parquet.read_table(out).to_pylist()[3]
        assert (row["label"], row["image"]["bytes"][:4]) == (3, b"\x89PNG")
    code, _, err = privot(sample, f"3 --out {out}")
    assert (code, err) == (2, f"privot: {out} already exists. Choose another name or remove it.\n")
    assert run_json(sample, "3 --out b.npz") == {"out": "b.npz", "count": 3}


def test_samples_replay_by_their_seed(run_json, release):
    def draw(name, seed, *more):
        run_json(f"sample {release} --out {name}.npz --seed {seed}", *more)
        return np.load(f"{name}.npz")["x"]

    first = draw("a", 3)
    assert np.array_equal(first, draw("b", 3))
    assert not np.array_equal(first, draw("c", 4))
    assert draw("narrow", 3, "--latent-scale 0.01").std(0).mean() < first.std(0).mean()


def test_many_samples_show_their_progress(release, monkeypatch):
    """Drawn in chunks they are what they would be at once."""
    steps = []
    loaded = Release.load(release)
    whole = loaded.sample(25)
    monkeypatch.setattr(artifact, "SAMPLE_CHUNK_SIZE", 10)
    parts = loaded.artifact.sample(loaded.spec, 25, progress=lambda *step, **_: steps.append(step))
    assert steps == [("sampling", 10, 25), ("sampling", 20, 25), ("sampling", 25, 25)]
    assert torch.allclose(whole[0], parts[0], atol=1e-5)
    assert torch.equal(whole[1], parts[1])


def test_draws_nothing_for_a_file_that_cannot_be_written(privot, release, tmp_path, monkeypatch):
    (tmp_path / "a.npz").touch()
    monkeypatch.setattr(artifact.Artifact, "sample", fail(AssertionError("drawn for nothing")))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for words, reason in (
        ("a.npz", "already exists"),
        ("a.gif", "samples can be written as"),
        ("a.parquet", "privot[parquet]"),
        ("a.npz/b.npz", "a.npz"),
        ("b.npz --device cuda:99", "cuda:99"),
    ):
        code, _, err = privot(f"sample {release} --out", words)
        assert (code, reason in err) == (2, True), err
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_samples_of_a_crashed_run_do_not_end_among_the_new_ones(run_json, release, tmp_path):
    (tmp_path / ".folder.part" / "0").mkdir(parents=True)
    (tmp_path / ".folder.part" / "0" / "old.png").write_bytes(b"old")
    run_json(f"sample {release} --count 10 --out folder")
    assert len(list((tmp_path / "folder").rglob("*.png"))) == 10
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


# measure, compare


def test_measure(privot, run_json, release):
    words = f"measure {release} --test digits --only logistic --count 500"
    code, out, err = privot(words)
    assert code == 0
    assert "logistic_accuracy" in out
    assert "internal" in out
    assert "training the classical classifiers: 1 of 1" in err
    facts = run_json(words)
    assert facts.keys() == {"source", "release", "results"}
    assert facts["release"] == (release / "manifest.sha256").read_text().strip()
    assert facts["source"] == "digits"
    [result] = facts["results"]
    assert (result["name"], result["reference_size"]) == ("logistic_accuracy", 359)
    assert 0 < result["value"] < 1
    [public] = run_json(words, "--public")["results"]
    assert (result["publishable"], public["publishable"]) == (False, True)
    assert public["value"] == result["value"]  # the same samples, the same classifier


def test_measure_writes_what_report_and_ceiling_read(run_json, privot, release, tmp_path):
    words = f"measure {release} --test digits --count 200 --public --out deep/er/r.json"
    facts = run_json(words, "--only gaussian_nb,exact")
    path = tmp_path / "deep/er/r.json"
    assert json.loads(path.read_text()) == facts
    names = [result["name"] for result in facts["results"]]
    assert names == ["exact_wasserstein", "gaussian_nb_accuracy"]
    assert facts["results"][0]["standard_error"] == "nan"  # JSON has no other word for it
    assert [file.name for file in path.parent.iterdir()] == ["r.json"]
    again = [MetricResult.from_json(result) for result in facts["results"]]
    assert repr(load_metric_results(path)) == repr(again)
    code, _, err = privot(words, "--only lda")
    assert (code, "deep/er/r.json already exists" in err) == (2, True)
    ceiling = "--count 50 --only lda --real-data-results deep/er/r.json"
    assert run_json(f"measure {release} --test digits", ceiling)


def test_measure_takes_foreign_output(privot, expect_refusal, foreign, monkeypatch):
    monkeypatch.setattr(files, "list_data_folders", lambda: [Path("data").absolute()])
    words = "measure theirs.npz --test digits --only fid,sliced"
    code, out, err = privot(words, "--public --json")
    assert (code, err.count("warning: ")) == (0, 2)
    facts = json.loads(out)
    assert facts["source"] == "theirs"
    names = {result["name"] for result in facts["results"]}
    assert {"domain_fd", "sliced_wasserstein"} <= names
    assert "fid" not in names
    assert "The domain_ metrics of a small network are measured instead" in err
    assert "domain_fd: so few images (60 samples)" in err
    assert "ConvNet of width 32" in out
    expect_refusal("not the weights", words, "--weights theirs.npz")


def test_measure_refuses_a_test_on_the_training_data(privot, release, tmp_path):
    images, labels = load_dataset("digits", public=True).records()
    np.savez(tmp_path / "train.npz", x=(images[:, 0] * 16).round().numpy() / 16, y=labels.numpy())
    for words in ("--test train.npz", "--test train.npz --train digits"):
        code, _, err = privot(f"measure {release} --only lda --count 50", words)
        assert (code, "overlaps the training data" in err) == (2, True)


def test_an_accuracy_can_be_bought_through_the_gate(
    privot, run_json, expect_refusal, release, tmp_path
):
    words = f"measure {release} --test digits --count 60 --accuracy-epsilon 3"
    (tmp_path / "file").touch()
    for wrong, reason in (
        ("--public", "--accuracy-epsilon"),
        ("--only lda", "with networks"),
        ("--accuracy-epsilon 0", "epsilon=0"),
        ("--train digits", "--train"),
        ("--out file/x.json", "file"),
    ):
        expect_refusal(reason, words, wrong, "--ledger paid.jsonl")
    assert not (tmp_path / "paid.jsonl").exists()  # refused before anything is charged
    [result] = run_json(words, "--ledger paid.jsonl --out deep/x.json")["results"]
    assert (result["name"], result["publishable"]) == ("cnn_accuracy", True)
    assert "through the gate at epsilon 3" in result["protocol"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.json"]
    paid = run_json("ledger digits --ledger paid.jsonl")
    assert (paid["spent_epsilon"], len(paid["runs"])) == (pytest.approx(3, rel=1e-6), 1)
    code, out, _ = privot(words)  # the ledger of the test split
    assert (code, "cnn_accuracy" in out) == (0, True)
    assert run_json("ledger digits/test")["spent_epsilon"] == pytest.approx(3, rel=1e-6)
    assert run_json("ledger digits")["spent_epsilon"] == 0
    run_json("ledger digits/test --limit 4")
    assert "training" not in expect_refusal("does not allow", words)  # before the work


def test_networks_that_are_paid_for_learn_soft_labels_too(run_json, images):
    words = f"measure {images} --test digits --accuracy-epsilon 3 --ledger paid.jsonl"
    [result] = run_json(words)["results"]
    assert "; soft labels;" in result["protocol"]
    assert result["num_samples"] == 20  # the set as it is


def test_compare(privot, run_json, expect_refusal, release, foreign, tmp_path):
    options = "--test digits --only gaussian_nb,lda --count 60"
    facts = run_json(f"compare {release} theirs.npz", options)
    assert [output["source"] for output in facts["outputs"]] == ["digits", "theirs"]
    assert Path(facts["page"]).name == "comparison.html"
    page = Path(facts["page"]).read_text()
    assert "theirs" in page
    assert "foreign: no certificate" in page
    code, out, _ = privot("compare theirs.npz theirs.npz --out page", options)
    assert (code, "gaussian_nb_accuracy" in out) == (0, True)
    assert (tmp_path / "page" / "comparison.html").exists()
    expect_refusal("nothing.npz", f"compare {release} nothing.npz --test digits")


def test_classes_are_matched_by_their_names(privot, run_json, expect_refusal, tmp_path):
    make_release(classes=3).save(tmp_path / "ours")  # cat, dog, ship
    pixels = np.random.default_rng(0).integers(0, 255, (3, 4, 8, 8), np.uint8)
    for folder, names in (("test", "ship cat dog"), ("wrong", "ant cat dog"), ("few", "cat ship")):
        for name, own in zip(names.split(), pixels, strict=False):
            Path(folder, name).mkdir(parents=True)
            for position, image in enumerate(own):
                Image.fromarray(image).save(Path(folder, name, f"{position}.png"))
    words = "measure ours --only lda --test"
    assert run_json(words, "test")["results"][0]["reference_size"] == 12
    unknown = "class 'ant' is not one of the known classes"
    expect_refusal(unknown, words, "wrong")
    expect_refusal("class 'dog' has no records", words, "few")
    for others in (
        "attack nearest-pixels ours --members test --nonmembers wrong",
        "compare ours test --test wrong --only lda",
    ):
        code, _, err = privot(others)
        assert (code, unknown in err) == (2, True)
    run_json("sample ours --count 6 --out drawn")
    assert sorted(path.name for path in Path("drawn").iterdir()) == ["cat", "dog", "ship"]
    run_json("compare ours drawn --test test --only lda --out page")
    numbered = make_release(classes=3, names=("1", "2", "3")).save(tmp_path / "numbered")
    run_json(f"sample {numbered} --count 6 --out one-two-three")
    assert sorted(path.name for path in Path("one-two-three").iterdir()) == ["1", "2", "3"]


def test_foreign_folders_are_matched_by_the_class_names_of_a_built_in(run_json, monkeypatch):
    """Whose order is not that of the alphabet."""
    names = [f"{10 - label} units" for label in range(10)]
    entry = {**load_catalog()["digits"], "class_names": names}
    monkeypatch.setitem(load_catalog(), "digits", entry)
    images, labels = load_dataset("digits", public=True).records()
    for position in range(200):
        folder = Path("theirs", names[labels[position]])
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (images[position, 0] * 255).byte().numpy()
        Image.fromarray(pixels).save(folder / f"{position}.png")
    [result] = run_json("measure theirs --test digits --only lda")["results"]
    assert result["value"] > 0.5


# report, verify, ledger


def test_report(privot, run_json, release, tmp_path):
    measure = f"measure {release} --test digits --count 50"
    run_json(measure, "--only lda --public --out public.json")
    run_json(measure, "--only gaussian_nb --out internal.json")
    assert os.stat("public.json").st_mode & 0o004
    assert os.stat("internal.json").st_mode & 0o777 == 0o600
    words = f"report {release} --results public.json --results internal.json"
    code, out, err = privot(words)
    assert code == 0
    assert [Path(line).name for line in out.splitlines()[:4]] == PUBLIC
    assert "guarantee  epsilon 5" in out
    assert "warning: Left out 1 result(s) that are not publishable" in err
    facts = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [result["name"] for result in facts["utility"]["results"]] == ["lda_accuracy"]
    again = run_json(words)  # an earlier report is replaced
    assert [Path(path).name for path in again["files"]] == PUBLIC
    assert (again["broken"], again["left_out"]) == (False, 1)


def test_the_internal_report_is_for_the_owner(run_json, expect_refusal, release, tmp_path):
    run_json(f"measure {release} --test digits --only gaussian_nb --count 50 --out internal.json")
    ledger = release.parent / "ledger.jsonl"
    inputs = f"--data digits --ledger {ledger} --results internal.json"
    done = run_json(f"report {release} --internal --out both", inputs)
    names = [Path(path).name for path in done["files"]]
    assert names == [*PUBLIC, "internal.html", "internal.json"]
    assert done["left_out"] == 0
    facts = json.loads((tmp_path / "both-internal" / "internal.json").read_text())
    assert [result["name"] for result in facts["utility"]["results"]] == ["gaussian_nb_accuracy"]
    assert facts["history"]["contains_head"]
    assert "gaussian_nb" not in (tmp_path / "both" / "report.json").read_text()
    for words in ("--data digits", f"--ledger {ledger}"):
        expect_refusal("--internal", f"report {release} --out none", words)
    missing = "--internal --ledger nothing.jsonl --out none"
    expect_refusal("The ledger nothing.jsonl does not exist.", f"report {release}", missing)
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "nothing.jsonl").exists()


def write_attack(path, power, lower, **more):
    attack = {
        "name": path,
        "fpr": [0.01],
        "tpr": [power],
        "tpr_lower": [lower],
        "confidence": 0.95,
        "publishable": True,
    }
    Path(path).write_text(json.dumps({"attacks": [attack], **more}))


def test_a_report_takes_nothing_of_another_release(
    privot, run_json, expect_refusal, release, images
):
    words = "--test digits --only lda --count 50 --public"
    run_json(f"measure {release} {words} --out one.json")
    run_json(f"sample {release} --count 50 --out foreign.npz")
    run_json(f"measure foreign.npz {words} --out foreign.json")
    assert privot(f"report {release} --results one.json")[0] == 0
    for target, file in ((images, "one.json"), (release, "foreign.json")):
        reason = f"{file} belongs to another release"
        expect_refusal(reason, f"report {target} --results {file} --out page")
    shutil.copytree(release, "mine")
    Path("mine.attacks").mkdir()
    for attacked, code in ((release, 0), (images, 2)):  # left by one that had this name before
        write_attack("mine.attacks/a.json", 0.01, 0.0, release=Release.load(attacked).digest)
        assert privot("report mine --out mine-page")[0] == code


def test_an_attack_above_the_certificate_ends_with_3(privot, run_json, release, tmp_path):
    claim = Release.load(release).guarantee.max_tpr["0.01"]
    for name, power, broken in (("weak", claim / 2, False), ("strong", (1 + claim) / 2, True)):
        write_attack(f"{name}.json", power, power)
        words = f"report {release} --attacks {name}.json --out {name}"
        code, out, err = privot(words)
        assert (code, bool(out)) == (3 if broken else 0, True)
        assert ("implementation broken" in err) is broken
        assert run_json(words, code=code)["broken"] is broken
        assert (tmp_path / name / "report.html").exists()  # the page says so too


@pytest.mark.parametrize("option", ["--results", "--attacks"])
def test_report_refuses_files_of_another_kind(expect_refusal, release, tmp_path, option):
    for text in ("", "{}", '{"results": [3], "attacks": 3}'):
        (tmp_path / "a.json").write_text(text)
        err = expect_refusal("privot: a.json", f"report {release} {option} a.json")
        assert " file of " in err
    assert not (tmp_path / "report").exists()


def test_verify(privot, run_json, release):
    code, out, _ = privot("verify", release)
    assert (code, read_heads(out)) == (0, ["digests", "guarantee", "recomputed"])
    result = run_json("verify", release)
    assert result["epsilon_from_events"] == pytest.approx(result["guarantee"]["epsilon"])


def test_ledger(privot, run_json, tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    words = f"ledger digits --ledger {ledger}"
    assert run_json(words) == {
        "ledger": str(ledger),
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
    assert not ledger.exists()  # looking writes nothing
    for out in ("one", "two"):
        run_json("synthesize digits --epsilon 1", QUICK, f"--out {out} --ledger {ledger}")
    facts = run_json(words, "--limit 3")
    assert facts["limit"] == Ledger(ledger).limit().epsilon == 3
    assert 1 < facts["spent_epsilon"] < 2  # composition, not addition
    assert [run["method"] for run in facts["runs"]] == ["merf", "merf"]
    code, out, err = privot(words)
    assert (code, "of 3" in out, "warning" in err) == (0, True, False)
    code, out, err = privot(words, "--limit 0.5")
    assert (code, "of 0.5" in out, "spent more than the limit" in err) == (0, True, True)
    assert "embedding" in out  # answers are named
    facts = run_json(words, "--limit 3 --delta 1e-7")
    assert run_json(words) == facts  # spent at the delta of the limit
    assert (facts["delta"], facts["limit_delta"]) == (1e-7, 1e-7)
    assert run_json(words, "--limit 4")["limit_delta"] == 1e-7  # unless another is given
    assert run_json(words, "--limit 3 --delta 1e-7")["limit"] == 3
    assert "of 3 at delta 1e-07" in privot(words, "--delta 1e-4")[1]


def test_refuses_a_ledger_that_would_move_with_the_folder(expect_refusal, monkeypatch, tmp_path):
    """Else who works in another folder would miss what was spent, and the owner's limit."""
    monkeypatch.setenv("PRIVOT_HOME", "state")
    expect_refusal("PRIVOT_HOME=state: an absolute path is needed", "ledger digits")
    monkeypatch.delenv("PRIVOT_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for state, folder in (("state", "me/.local/state"), (str(tmp_path / "state"), "state")):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert ledger_path("digits").is_relative_to(tmp_path / folder / "privot" / "ledgers")


# demo


def test_demo(privot, run_json, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "DEMO_SETTINGS", SMALL)
    monkeypatch.setattr(demo, "DEMO_CLASSIFIERS", ("logistic",))
    code, out, _ = privot("demo")
    heads = "guarantee logistic_accuracy verified release samples report ledger"
    assert (code, read_heads(out)) == (0, heads.split())
    result = run_json("demo --epsilon 2")  # what the demo made, the demo may replace
    assert result["verified_epsilon"] == pytest.approx(2, rel=1e-6)
    assert all(Path(path).exists() for path in result["files"].values())
    assert result["results"][0]["num_samples"] == 20  # the set itself
    assert "guarantee  none" in privot("demo --epsilon inf")[1]
    thesis = tmp_path / "mine" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years")
    wrong = {"--epsilon 0": "epsilon=0", "--epsilon -1": "epsilon=-1", "--out mine": "--out"}
    for words, reason in wrong.items():
        code, _, err = privot("demo", words)
        assert (code, reason in err) == (2, True)
    assert Path(result["files"]["release"]).exists()  # a refused demo leaves the last one alone
    assert thesis.read_text() == "years"


# Refusals and ends


@pytest.mark.parametrize(
    "words",
    [
        "synthesise digits",
        "verify nothing",
        f"verify {__file__}",
        "sample nothing --out b.npz",
        "sample {release} --count 0 --out b.npz",
        "sample {release} --count 1000000000000 --out b.npz",
        f"sample {{release}} --seed {2**70} --out b.npz",
        "sample {release} --out {release}/manifest.json/b.npz",
        "resize nothing --images-per-class 3 --out b",
        "resize {release} --images-per-class 3 --out b",
        "resize {images} --images-per-class 0 --out b",
        "resize {images} --out b",
        "resize {images} --images-per-class 3",
        "resize {images} --images-per-class 3 --out a.npz",
        "resize {images} --images-per-class 3 --out b --device abacus",
        "measure {release} --test digits --only oracle --count 20",
        "measure {release} --test nothing.npz",
        "measure {release} --test a.npz --only logistic --count 50",
        "measure {release} --test digits --only logistic --count 1",
        "measure {release} --test digits --only ''",
        "measure {release} --test digits --real-data-results a.npz",
        "measure {release} --test digits --only is --count 20",
        "measure {release} --test digits --public-test",
        "measure {release} --test digits --seed -1",
        "compare --test digits",
        "report nothing",
        "report {release} --results a.npz",
        "report {release} --out {release}",
        "ledger nothing.npz",
        "ledger digit --limit 3",
        "ledger digits --limit 0",
        "ledger digits --delta 1",
        "cite nobody",
        "plan digits",
        "plan digits --epsilon 1 --device abacus",
    ],
)
def test_refuses_wrong_words_in_one_line(expect_refusal, run_json, release, images, words):
    np.savez("a.npz", x=np.zeros((20, 9, 9), np.uint8), y=np.arange(20) % 10)
    words = words.format(release=release, images=images)
    err = expect_refusal("", words)
    assert run_json(words, code=2) == {"error": err[len("privot: ") : -1]}
    names = {path.name for path in Path().iterdir() if path.suffix != ".lock"}
    assert names - {"home"} == {"a.npz"}


def test_a_slip_is_answered_by_the_nearest_word(privot, release):
    _, _, err = privot("synthesise digits")
    assert err.count("Did you mean 'synthesize'?") <= 1  # older versions of click do not ask
    code, _, err = privot(f"measure {release} --test digits --only cnn,precison")
    assert (code, err) == (2, "privot: There is no metric 'precison'. Did you mean 'precision'?\n")


@pytest.mark.parametrize(
    "words",
    [
        "resize {images} --images-per-class 3",
        "compare {release} --test digits",
        "invert --data digits",
    ],
)
def test_no_work_begins_if_its_results_cannot_be_written(
    words, expect_refusal, release, images, monkeypatch
):
    began = fail(AssertionError("the work began"))
    resize = importlib.import_module("privot.synthesis.resize")
    monkeypatch.setattr(resize, "_regenerate_artifact", began)
    monkeypatch.setattr("privot.measures.evaluator.Evaluator.measure", began)
    monkeypatch.setattr("privot.attacks.inversion.experiment.invert", began)
    Path("file").touch()
    words = words.format(release=release, images=images)
    expect_refusal("cannot be written", words, "--out file/deeper")


def test_what_stops_a_verb_is_one_line_and_a_bug_is_a_traceback(
    privot, run_json, expect_refusal, release, monkeypatch
):
    def stop_with(error):
        monkeypatch.setattr(artifact.Artifact, "sample", fail(error))
        return f"sample {release} --out a.npz"

    allocator = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    for error in (MemoryError(), RuntimeError(allocator)):
        expect_refusal("memory", stop_with(error))
    with pytest.raises(RuntimeError, match="a bug"):
        privot(stop_with(RuntimeError("a bug")))
    words = stop_with(KeyboardInterrupt)
    assert privot(words) == (130, "", "privot: Stopped.\n")  # there is nothing to resume
    assert run_json(words, code=130) == {"error": "Stopped."}


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines():
    def show(terminal):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with show_progress_bar(console) as progress:
            for step in range(1, 101):
                progress("training", step, 100, epsilon=1.23456, note="on")
            progress("measuring", 1, 1)
        return console.file.getvalue()

    lines = show(False).splitlines()
    assert len(lines) == 12
    assert lines[0] == "training: 1 of 100  epsilon 1.24  note on"  # rounded up
    assert lines[1] == "training: 10 of 100  epsilon 1.24  note on"
    for words in ("\x1b[", "100/100", "epsilon 1.24"):
        assert words in show(True)


def test_help_does_not_wait_for_torch():
    script = (
        "import sys; sys.argv = ['privot', '--help']\n"
        "from privot.cli import main\n"
        "main()\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'dp_accounting', 'PIL', 'pyarrow',"
        " 'matplotlib'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "synthesize" in done.stdout


def test_a_reader_that_goes_away_is_no_crash():
    """`privot --help | true`."""
    command = [sys.executable, "-c", "from privot.cli import main; main()", "--help"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert "Traceback" not in done.stderr
