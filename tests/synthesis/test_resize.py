"""A set of another size of a release: the same proof, other images; what does not fit is refused."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forged_release import forge_release

from privot import resize
from privot.data.spec import Spec
from privot.errors import PrivotError, ReleaseError, SettingError
from privot.methods import make_method
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget
from privot.release import Release
from privot.release.verify import verify
from privot.runtime import Runtime
from privot.synthesis import synthesize
from privot.synthesis.preflight import plan_run

QUICK = {
    "images_per_class": 3,
    "num_random_nets": 12,
    "nets_per_round": 2,
    "net_width": 4,
    "steps": 4,
    "net_train_epochs": 1,
    "soft_label_weight": 0.5,
}
CPU = {"runtime": Runtime("cpu")}

pytestmark = pytest.mark.usefixtures("one_thread")


def train(out, method="private-set", budget=5.0, settings=QUICK, **more):
    ledger = out.with_name("ledger.jsonl")
    synthesize("digits", method, budget, settings=settings, out=out, ledger=ledger, **more, **CPU)
    return out


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    return train(tmp_path_factory.mktemp("origin") / "release", seed=3)


@pytest.fixture
def copied(origin, tmp_path):
    return shutil.copytree(origin, tmp_path / "release")


def read_digest(folder):
    return (folder / "manifest.sha256").read_text().strip()


def resize_images(release, **settings):
    return resize(release, 2, settings=settings or None, **CPU).artifact.tensors["images"]


def test_all_that_is_claimed_stays(origin, tmp_path):
    before = Release.load(origin)
    ledger = origin.with_name("ledger.jsonl").read_bytes()
    resize(origin, 5, out=tmp_path / "five", **CPU)
    after = Release.load(tmp_path / "five")
    assert verify(tmp_path / "five")["epsilon_from_events"] == verify(origin)["epsilon_from_events"]
    assert (after.guarantee, after.spec) == (before.guarantee, before.spec)
    for key in ("method", "plan", "event", "seed", "data", "ledger"):
        assert after.metadata[key] == before.metadata[key]
    assert after.metadata["settings"] == before.metadata["settings"] | {"images_per_class": 5}
    assert after.metadata["resized"]["from"] == read_digest(origin)
    assert "resized" not in before.metadata
    assert origin.with_name("ledger.jsonl").read_bytes() == ledger
    tensors = after.artifact.tensors
    assert tensors["images"].shape == (50, 1, 8, 8)
    assert tensors["labels"].bincount().tolist() == [5] * 10
    assert tensors["soft_labels"].shape == (50, 10)
    back = resize(tmp_path / "five", 2, **CPU)  # all comes of what was kept, and of the seed
    assert torch.equal(back.artifact.tensors["images"], resize_images(before))
    assert back.metadata["resized"]["from"] == read_digest(tmp_path / "five")


def test_how_it_is_made_may_change_and_what_was_asked_may_not(origin):
    coarse = resize(origin, 2, settings={"frequency_fraction": 0.3}, **CPU)
    assert not torch.equal(resize_images(origin), coarse.artifact.tensors["images"])
    assert coarse.metadata["settings"]["frequency_fraction"] == 0.3
    assert coarse.guarantee == Release.load(origin).guarantee
    for name, value in (
        ("noise_multiplier", 0.1),
        ("num_random_nets", 24),
        ("neighbours", "replace"),
    ):
        with pytest.raises(SettingError, match=f"cannot make new queries, but {name} would"):
            resize_images(origin, **{name: value})


def test_the_kept_answers_are_what_it_is_made_of(origin):
    """Other answers, other images; and the images of the release itself have no part in it."""
    plain = resize_images(origin)
    for name, matters in (
        ("images", False),
        ("resize_state.means", True),
        ("resize_state.random.target", True),
        ("resize_state.trained1.target", True),
    ):
        other = Release.load(origin)
        other.artifact.tensors[name] = other.artifact.tensors[name].flip(0).contiguous()
        assert torch.equal(resize_images(other), plain) is not matters, name


def test_without_a_guarantee_it_stays_without(tmp_path):
    train(tmp_path / "open", budget=Budget(float("inf")))
    resize(tmp_path / "open", 2, out=tmp_path / "two", **CPU)
    assert verify(tmp_path / "two")["guarantee"] == verify(tmp_path / "open")["guarantee"]
    assert "reason" in verify(tmp_path / "two")["guarantee"]


@pytest.mark.parametrize(
    ("method", "settings", "match"),
    [
        ("private-set", {**QUICK, "keep_answers": False}, "keep_answers=false"),
        (
            "merf",
            {"num_features": 50, "steps": 2},
            "merf cannot make a set of another size. private-set or sliced-flow can",
        ),
    ],
)
def test_what_kept_nothing_is_refused(tmp_path, method, settings, match):
    train(tmp_path / "bare", method, settings=settings)
    with pytest.raises(ReleaseError, match=match):
        resize(tmp_path / "bare", 2, out=tmp_path / "out", **CPU)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_a_large_size_is_not_blamed_on_the_release(
    origin, tmp_path, monkeypatch
):
    def run_out_of_memory(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(type(make_method("private-set")), "regenerate", run_out_of_memory)
    (tmp_path / "out").mkdir()
    with pytest.raises(ReleaseError, match="already exists"):  # before the work begins
        resize(origin, 2, out=tmp_path / "out", **CPU)
    with pytest.raises(RuntimeError, match="memory"):
        resize(origin, 10**5, **CPU)


FORGED = {
    "another width": {"settings/net_width": 8},
    "a smaller depth": {"settings/net_depth": 1},
    "more nets": {"settings/num_random_nets": 10**9},
    "a net less": {"settings/num_random_nets": 11},
    "a few nets more": {"settings/num_random_nets": 14},
    "more trained nets": {"settings/nets_per_round": 3},
    "other shares": {"settings/budget_shares": [0.1, 0.1, 0.1, 0.7]},
    "shares of one part less": {"settings/budget_shares": [0.1, 0.9, 0.0]},
    "other neighbours": {"settings/neighbours": "replace"},
    "a setting that is not there": {"settings/magic": 1},
    "a setting of another kind": {"settings/learning_rate": [1]},
    "settings as a list": {"settings": []},
    "no settings": {"settings": None},
    "an unknown method": {"method": "alchemy"},
    "a method that is a list": {"method": ["private-set"]},
    "another method": {"method": "real-subset"},
    "a seed in words": {"seed": "three"},
    "another seed": {"seed": 4},
    "no plan": {"plan": None},
    "a better epsilon": {"guarantee/epsilon": 0.1},
}


def check_refused(folder, error):
    with pytest.raises(error) as refused:
        resize(folder, 2, out=folder.with_name("out"), **CPU)
    assert "\n" not in str(refused.value)
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("name", FORGED)
def test_a_manifest_that_does_not_fit_is_refused(copied, name):
    forge_release(copied, FORGED[name])
    check_refused(copied, PrivotError)


STATE = """
    means random.center random.target random.affine random.cutout random.color random.conv0
    random.gain1 trained1.center trained1.target trained1.affine trained1.conv1 trained1.bias0
"""
CHANGES = {
    "missing": None,
    "shorter": lambda value: value[: len(value) // 2],
    "one number": lambda value: value.new_zeros(1),
    "one more side": lambda value: value[..., None],
    "narrower": lambda value: value[..., :-1],
    "infinite": lambda value: value / 0,
    "whole numbers": lambda value: value.long(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", STATE.split())
def test_kept_tensors_that_do_not_fit_are_refused(copied, name, change):
    path = copied / "tensors.safetensors"
    tensors = load_file(path)
    whole = tensors.pop(f"resize_state.{name}")
    if CHANGES[change]:
        tensors[f"resize_state.{name}"] = CHANGES[change](whole).contiguous()
    save_file(tensors, path)
    forge_release(copied)
    check_refused(copied, ReleaseError)


# Warnings of classes that are too small


def list_warnings(sizes, epsilon, names=None):
    spec = Spec((1, 8, 8), 3, sum(sizes), sizes, names)
    method = make_method("private-set", QUICK)
    return plan_run(spec, method, Budget(epsilon), "cpu")["warnings"]


def test_the_warning_names_the_smallest_class_and_what_would_do():
    sizes = (500, 100, 500)
    [warning] = list_warnings(sizes, 0.1, ("cat", "dog", "ship"))
    assert "class dog is the smallest, with 100 records" in warning
    epsilon = float(warning.split("epsilon ")[1].split()[0])
    records = int(warning.split("classes of ")[1].split()[0].replace(",", ""))
    assert list_warnings(sizes, epsilon) == []
    assert list_warnings(sizes, 0.9 * epsilon) != []
    assert list_warnings((5000, records, 5000), 0.1) == []
    assert len(list_warnings((5000, round(0.9 * records), 5000), 0.1)) == 1
    assert list_warnings((500, 0, 500), 5.0) == [
        "class 1 is declared to have no records: what is released of it is noise only."
    ]


def test_synthesize_warns_before_the_ledger_is_charged(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    warnings = []

    def record(text):
        warnings.append((text.split(" is")[0], ledger.entries()))

    synthesize("digits", budget=0.1, settings=QUICK, ledger=ledger, on_warning=record, **CPU)
    assert warnings == [("the predicted signal-to-noise ratio per class", [])]
