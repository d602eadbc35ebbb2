"""A set of another size of a release: the same proof, other images; and whatever does not fit together is refused, never a traceback."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

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
CPU = Runtime("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    root = tmp_path_factory.mktemp("origin")
    synthesize(
        "digits",
        budget=5.0,
        settings=QUICK,
        out=root / "release",
        ledger=root / "book.jsonl",
        seed=3,
        runtime=CPU,
    )
    return root / "release"


@pytest.fixture
def copied(origin, tmp_path):
    return shutil.copytree(origin, tmp_path / "release")


def sign(folder, edit=lambda manifest: None):
    """Change the manifest, and make every digest fit again."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {
        "tensors.safetensors": hashlib.sha256(
            (folder / "tensors.safetensors").read_bytes()
        ).hexdigest()
    }
    edit(manifest)
    text = json.dumps(manifest, indent=1)
    (folder / "manifest.json").write_text(text)
    (folder / "manifest.sha256").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")


def test_all_that_is_claimed_stays(origin, tmp_path):
    before = Release.load(origin)
    book = (origin.parent / "book.jsonl").read_bytes()
    resize(origin, 5, out=tmp_path / "five", runtime=CPU)
    after = Release.load(tmp_path / "five")
    assert verify(tmp_path / "five")["epsilon_from_events"] == verify(origin)["epsilon_from_events"]
    assert (after.guarantee, after.spec) == (before.guarantee, before.spec)
    for key in ("method", "plan", "event", "seed", "data", "ledger"):
        assert after.metadata[key] == before.metadata[key]
    assert after.metadata["settings"] == before.metadata["settings"] | {"images_per_class": 5}
    assert after.metadata["resized"]["from"] == (origin / "manifest.sha256").read_text().strip()
    assert "resized" not in before.metadata
    assert (origin.parent / "book.jsonl").read_bytes() == book
    made = after.artifact.tensors
    assert made["images"].shape == (50, 1, 8, 8)
    assert made["labels"].bincount().tolist() == [5] * 10
    assert made["soft_labels"].shape == (50, 10)


def test_a_resized_release_can_be_resized_again(origin, tmp_path):
    resize(origin, 5, out=tmp_path / "five", runtime=CPU)
    back = resize(tmp_path / "five", 2, runtime=CPU)
    direct = resize(Release.load(origin), 2, runtime=CPU)
    assert torch.equal(
        back.artifact.tensors["images"], direct.artifact.tensors["images"]
    )  # all comes of what was kept, and of the seed
    assert (
        back.metadata["resized"]["from"]
        == (tmp_path / "five" / "manifest.sha256").read_text().strip()
    )


def test_how_it_is_made_may_change_and_what_was_asked_may_not(origin):
    plain = resize(origin, 2, runtime=CPU)
    coarse = resize(origin, 2, settings={"frequency_fraction": 0.3}, runtime=CPU)
    assert not torch.equal(plain.artifact.tensors["images"], coarse.artifact.tensors["images"])
    assert (coarse.metadata["settings"]["frequency_fraction"], coarse.guarantee) == (
        0.3,
        plain.guarantee,
    )
    for asked in ({"noise_multiplier": 0.1}, {"num_random_nets": 24}, {"neighbours": "replace"}):
        with pytest.raises(
            SettingError, match=f"cannot make new queries, but {next(iter(asked))} would"
        ):
            resize(origin, 2, settings=asked, runtime=CPU)


def test_the_kept_answers_are_what_it_is_made_of(origin):
    """Other answers, other images; and the images of the release itself have no part in it."""
    release = Release.load(origin)
    plain = resize(release, 2, runtime=CPU).artifact.tensors["images"]
    for name, moved in (
        ("images", False),
        ("resize_state.means", True),
        ("resize_state.random.target", True),
        ("resize_state.trained1.target", True),
    ):
        other = Release.load(origin)
        other.artifact.tensors[name] = other.artifact.tensors[name].flip(0).contiguous()
        assert (
            torch.equal(resize(other, 2, runtime=CPU).artifact.tensors["images"], plain)
            is not moved
        ), name


def test_without_a_guarantee_it_stays_without(tmp_path):
    budget = Budget(float("inf"))
    synthesize(
        "digits",
        budget=budget,
        settings=QUICK,
        out=tmp_path / "open",
        ledger=tmp_path / "a.jsonl",
        runtime=CPU,
    )
    resize(tmp_path / "open", 2, out=tmp_path / "two", runtime=CPU)
    assert verify(tmp_path / "two")["guarantee"] == verify(tmp_path / "open")["guarantee"]
    assert "reason" in verify(tmp_path / "two")["guarantee"]


def test_what_kept_nothing_is_refused(tmp_path):
    bare = {**QUICK, "keep_answers": False}
    synthesize(
        "digits",
        budget=5.0,
        settings=bare,
        out=tmp_path / "bare",
        ledger=tmp_path / "a.jsonl",
        runtime=CPU,
    )
    with pytest.raises(ReleaseError, match="keep_answers=false"):
        resize(tmp_path / "bare", 2, out=tmp_path / "out", runtime=CPU)
    synthesize(
        "digits",
        "merf",
        5.0,
        settings={"num_features": 50, "steps": 2},
        out=tmp_path / "merf",
        ledger=tmp_path / "a.jsonl",
        runtime=CPU,
    )
    with pytest.raises(
        ReleaseError,
        match=r"merf cannot make a set of another size. private-set or sliced-flow can",
    ):
        resize(tmp_path / "merf", 2, out=tmp_path / "out", runtime=CPU)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_that_is_said_before_the_work(origin, tmp_path, monkeypatch):
    monkeypatch.setattr(
        type(make_method("private-set")), "regenerate", lambda *_: pytest.fail("the work was begun")
    )
    (tmp_path / "out").mkdir()
    with pytest.raises(ReleaseError, match="already exists"):
        resize(origin, 2, out=tmp_path / "out", runtime=CPU)


def put(*path):
    *keys, last, value = path

    def edit(manifest):
        for key in keys:
            manifest = manifest[key]
        manifest[last] = value

    return edit


FORGED = {
    "another width": put("settings", "net_width", 8),
    "a smaller depth": put("settings", "net_depth", 1),
    "more nets": put("settings", "num_random_nets", 10**9),
    "a net less": put("settings", "num_random_nets", 11),
    "a few nets more": put("settings", "num_random_nets", 14),
    "more trained nets": put("settings", "nets_per_round", 3),
    "other shares": put("settings", "budget_shares", [0.1, 0.1, 0.1, 0.7]),
    "shares of one part less": put("settings", "budget_shares", [0.1, 0.9, 0.0]),
    "other neighbours": put("settings", "neighbours", "replace"),
    "a setting that is not there": put("settings", "magic", 1),
    "a setting of another kind": put("settings", "learning_rate", [1]),
    "settings as a list": put("settings", []),
    "no settings": put("settings", None),
    "an unknown method": put("method", "alchemy"),
    "a method that is a list": put("method", ["private-set"]),
    "another method": put("method", "real-subset"),
    "a seed in words": put("seed", "three"),
    "another seed": put("seed", 4),
    "no plan": put("plan", None),
    "a better epsilon": put("guarantee", "epsilon", 0.1),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_manifest_that_does_not_fit_is_refused(copied, tmp_path, name):
    sign(copied, FORGED[name])
    with pytest.raises(PrivotError) as refused:
        resize(copied, 2, out=tmp_path / "out", runtime=CPU)
    assert "\n" not in str(refused.value)
    assert [each.name for each in tmp_path.iterdir()] == ["release"]


KEPT = (
    "means",
    "random.center",
    "random.target",
    "random.affine",
    "random.cutout",
    "random.color",
    "random.conv0",
    "random.gain1",
    "trained1.center",
    "trained1.target",
    "trained1.affine",
    "trained1.conv1",
    "trained1.bias0",
)
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
@pytest.mark.parametrize("name", KEPT)
def test_kept_tensors_that_do_not_fit_are_refused(copied, tmp_path, name, change):
    tensors = load_file(copied / "tensors.safetensors")
    whole = tensors.pop(f"resize_state.{name}")
    if CHANGES[change]:
        tensors[f"resize_state.{name}"] = CHANGES[change](whole).contiguous()
    save_file(tensors, copied / "tensors.safetensors")
    sign(copied)
    with pytest.raises(ReleaseError) as refused:
        resize(copied, 2, out=tmp_path / "out", runtime=CPU)
    assert "\n" not in str(refused.value)
    assert [each.name for each in tmp_path.iterdir()] == ["release"]


def test_too_large_a_wish_is_not_blamed_on_the_release(origin, monkeypatch):
    def full(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(type(make_method("private-set")), "regenerate", full)
    with pytest.raises(RuntimeError, match="memory"):
        resize(origin, 10**5, runtime=CPU)


# What a careful colleague says


UNEVEN = Spec((1, 8, 8), 3, 1100, (500, 100, 500), ("cat", "dog", "ship"))


def test_the_caution_names_the_smallest_class_and_what_would_do():
    method = make_method("private-set", QUICK)
    [said] = plan_run(UNEVEN, method, Budget(0.1), "cpu")["warnings"]
    assert "class dog is the smallest, with 100 records" in said
    epsilon = float(said.split("epsilon ")[1].split()[0])
    records = int(said.split("classes of ")[1].split()[0].replace(",", ""))
    assert plan_run(UNEVEN, method, Budget(epsilon), "cpu")["warnings"] == []
    assert plan_run(UNEVEN, method, Budget(0.9 * epsilon), "cpu")["warnings"] != []
    for size, cautions in ((records, 0), (round(0.9 * records), 1)):
        grown = Spec((1, 8, 8), 3, 10_000 + size, (5000, size, 5000))
        assert len(plan_run(grown, method, Budget(0.1), "cpu")["warnings"]) == cautions


def test_a_class_that_is_declared_empty_is_named():
    cautions = plan_run(
        Spec((1, 8, 8), 3, 1000, (500, 0, 500)),
        make_method("private-set", QUICK),
        Budget(5.0),
        "cpu",
    )["warnings"]
    assert cautions == [
        "class 1 is declared to have no records: what is released of it is noise only."
    ]


def test_synthesize_says_it_before_the_ledger_is_charged(tmp_path):
    book = Ledger(tmp_path / "book.jsonl")
    seen = []
    more = {"settings": QUICK, "ledger": book, "runtime": CPU}
    synthesize(
        "digits", budget=0.1, on_warning=lambda text: seen.append((text, book.entries())), **more
    )
    assert [(text.split(" is")[0], lines) for text, lines in seen] == [
        ("the predicted signal-to-noise ratio per class", [])
    ]
