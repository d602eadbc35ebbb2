"""The verb invert: what it prints and writes, for people and for programs; and what it refuses."""

import json

import pytest
import torch
from PIL import Image

from privot.attacks.inversion.experiment import TRACE_STEPS, InversionExperiment
from privot.data import load_dataset

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = "invert --data digits --images 4 --steps 50 --checked 1"


def test_updates_of_the_digits_leak(privot, tmp_path):
    code, out, err = privot(SMALL, "--attack idlg --optimizer lbfgs-search --out result")
    assert code == 0
    for words in (
        "iDLG",
        "64 of 64 directions",
        "these updates leak",
        "100.0 % recovered from the update",
        "result/inversion.json",
    ):
        assert words in " ".join(out.split())
    assert "data owner alone" in err
    folder = tmp_path / "result"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    facts = json.loads((folder / "inversion.json").read_text())
    assert facts["tiers"]["closed form"]["median_mse"] < 1e-6
    assert facts["tiers"]["search"]["leak_rate"] >= 0.75
    assert facts["publishable"] is False
    page = (folder / "page.html").read_text()
    assert "Internal: not for publication" in page
    assert page.count("<img") == 4 * (sum(step <= 50 for step in TRACE_STEPS) + 2)
    with Image.open(folder / "snapshots.png") as snapshots:
        assert snapshots.width > snapshots.height


def test_a_clipped_and_noisy_update_for_programs(run_json, coarse_accounting):
    defense = "--clip-norm 1 --noise-scale 0.5 --training 60000,256,100"
    facts = run_json(SMALL, "--attack wdlg", defense, "--public")
    assert facts["defense"] == {"clip_norm": 1.0, "noise_scale": 0.5, "noise_std": 0.5}
    assert facts["tiers"]["search"]["objective"] == "cosine"  # the attacker cannot know the scale
    assert facts["tiers"]["search"]["leak_rate"] == 0
    assert facts["guarantee"]["neighbours"] == "add or remove one record"
    assert 1 < facts["guarantee"]["epsilon"] < 20
    assert facts["publishable"] is True
    assert "no proof" in facts["summary"]


def test_noise_without_a_clip_promises_nothing(privot):
    noise = "--steps 2 --checked 0 --noise-scale 0.01 --training 60000,256,100"
    code, out, _ = privot(SMALL, noise, "--attack hybrid")
    assert code == 0
    assert "no guarantee: Nothing limits" in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--attack dgl", "There is no attack 'dgl'. Choose one of dlg"),
        ("--model resnet", "There is no model 'resnet'. Choose one of lenet, cnn6"),
        ("--model cnn6 --attack dlg", "cnn6 has one logit, from which labels cannot be recovered"),
        ("--optimizer sgd", "no optimizer 'sgd'"),
        ("--images 5000", "records are needed, but the data set has fewer"),
        ("--noise-scale -1", "noise_std=-1"),
        ("--prune 1", "a share from 0 to below 1"),
        ("--training many", "SIZE,BATCH,STEPS"),
        ("--out .", "already exists"),
    ],
)
def test_refuses_wrong_words_in_one_line(expect_refusal, words, reason):
    expect_refusal(reason, SMALL, words)


def test_the_same_seed_gives_the_same_victims():
    def build_problem(seed):
        experiment = InversionExperiment(num_victims=3, seed=seed)
        return experiment.build_problem(load_dataset("digits"), torch.device("cpu"))

    one, two, other = (build_problem(seed) for seed in (5, 5, 6))
    assert torch.equal(one[1], two[1])
    assert all(torch.equal(value, two[0].update[name]) for name, value in one[0].update.items())
    assert not torch.equal(one[1], other[1])
