"""The verb invert: what it prints and writes, for people and for programs; and what it refuses, in one line."""

import json

import pytest
import torch
from PIL import Image

from privot.attacks.inversion.experiment import TRACE, Experiment
from privot.data import load

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("invert", "--data", "digits", "--images", "4", "--steps", "50", "--checked", "1")


def parsed(out):
    assert out.count("\n") == 1
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_updates_of_the_digits_leak(privot, tmp_path):
    code, out, err = privot(
        *SMALL, "--attack", "idlg", "--optimiser", "lbfgs-search", "--out", "found"
    )
    assert code == 0
    for words in (
        "iDLG",
        "64 of 64 directions",
        "these updates leak",
        "100.0 % read off",
        "found/inversion.json",
    ):
        assert words in " ".join(out.split())
    assert "owner's own" in err
    folder = tmp_path / "found"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in folder.iterdir()} == {0o600}
    facts = json.loads((folder / "inversion.json").read_text())
    assert facts["tiers"]["closed form"]["median_mse"] < 1e-6
    assert facts["tiers"]["search"]["leaked"] >= 0.75
    assert facts["publishable"] is False
    page = (folder / "page.html").read_text()
    assert "Internal: not for publication" in page
    assert page.count("<img") == 4 * (sum(step <= 50 for step in TRACE) + 2)
    with Image.open(folder / "strip.png") as strip:
        assert strip.width > strip.height


def test_a_clipped_and_noisy_update_for_programs(privot, coarse_prices):
    words = ("--clip", "1", "--noise", "0.5", "--training", "60000,256,100", "--public", "--json")
    facts = parsed(privot(*SMALL, "--attack", "wdlg", *words)[1])
    assert facts["defence"] == {"clip": 1.0, "noise": 0.5, "noise_std": 0.5}
    assert facts["tiers"]["search"]["objective"] == "cosine"  # the attacker cannot know the scale
    assert facts["tiers"]["search"]["leaked"] == 0
    assert facts["guarantee"]["neighbours"] == "add or remove one record"
    assert 1 < facts["guarantee"]["epsilon"] < 20
    assert facts["publishable"] is True
    assert "no proof" in facts["sentence"]


def test_noise_without_a_clip_promises_nothing(privot):
    code, out, _ = privot(
        *SMALL,
        "--checked",
        "0",
        "--noise",
        "0.01",
        "--training",
        "60000,256,100",
        "--attack",
        "hybrid",
    )
    assert code == 0
    assert "no guarantee: nothing bounds" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--attack", "dgl"), "no attack 'dgl': there are dlg"),
        (("--net", "resnet"), "no net 'resnet': there are lenet, cnn6"),
        (("--net", "cnn6", "--attack", "dlg"), "cnn6: its one logit tells no label"),
        (("--optimiser", "sgd"), "no optimiser 'sgd'"),
        (("--images", "5000"), "records are needed, and there are fewer"),
        (("--noise", "-1"), "noise=-1"),
        (("--prune", "1"), "a share in [0, 1)"),
        (("--training", "many"), "SIZE,BATCH,STEPS"),
        (("--out", "."), "is there already"),
    ],
    ids=lambda each: each[1] if isinstance(each, tuple) else "",
)
def test_bad_words_are_refused_in_one_line(privot, words, said):
    code, out, err = privot(*SMALL, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_the_same_seed_gives_the_same_victims():
    one, two = (
        Experiment(images=3, seed=5).victims(load("digits"), torch.device("cpu")) for _ in range(2)
    )
    assert torch.equal(one[1], two[1])
    assert all(torch.equal(each, two[0].update[name]) for name, each in one[0].update.items())
    assert not torch.equal(
        one[1], Experiment(images=3, seed=6).victims(load("digits"), torch.device("cpu"))[1]
    )
