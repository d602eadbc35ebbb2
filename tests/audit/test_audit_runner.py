"""Audits of whole methods: too little noise is found, an honest method holds, and nothing but the record tells the worlds apart."""

import fcntl
import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import ClassVar

import numpy as np
import pytest
import torch

from privot.audit import audit_many_runs, runner
from privot.audit.canary_scores import CANARY_SCORES
from privot.audit.result import load_attack_results
from privot.audit.run_store import RunStore
from privot.audit.runner import EpsilonAudit
from privot.data import load_dataset
from privot.data.dataset import Public, Sensitive
from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError
from privot.methods import MethodBase, list_methods
from privot.privacy import secret_side as secret_side_module
from privot.privacy.guarantee import NoGuarantee
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.release import Release
from privot.release.artifact import Artifact
from privot.runtime import Runtime
from privot.synthesis import prepare

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")

CPU = Runtime("cpu")
SHAPE = (1, 2, 2)
CLASSES = 2
COUNT = 12
# 12 runs a side that are counted can prove 0.12 of any mechanism, and only if all are told right: by chance once in 10^7 audits.
WEAK = {"epsilon": 0.05, "runs_per_side": 24, "confidence": 0.999}


def pixels(image, label):
    """Of norm 1 at most."""
    return image.flatten() / 2


@dataclass(frozen=True, kw_only=True)
class Mean(MethodBase):
    """One image of each class: the noisy sum of its records. A run takes milliseconds."""

    name: ClassVar[str] = "mean"
    title: ClassVar[str] = "the mean"
    trusted_party: ClassVar[str] = "the data owner"
    guarantee_summary: ClassVar[str] = "(epsilon, delta)"
    citation: ClassVar[str] = ""

    noise_multiplier: float | None = None
    neighbours: str = "add-remove"
    sampled: bool = False
    public_noise: bool = False

    def plan(self, spec):
        drawn = {"sampling": Poisson(0.5)} if self.sampled else {}
        return Plan(
            (
                Stage(
                    "sum",
                    "sum",
                    1.0 if self.noise_multiplier is None else self.noise_multiplier,
                    **drawn,
                ),
            ),
            Neighbours(self.neighbours),
        )

    def forecast(self, spec, plan):
        return {}

    def fit(self, gate, streams, progress):
        total = (
            gate.sum("sum", pixels, clip_norm=1.0, per_class=True)
            .float()
            .cpu()
            .view(CLASSES, *SHAPE)
        )
        if (
            self.public_noise
        ):  # as a method that is not steady in its public seed: a start, a random net
            total = total + 100 * torch.randn(total.shape, generator=streams.make_rng("start"))
        return Artifact.from_images(total, torch.arange(CLASSES))


@dataclass(frozen=True, kw_only=True)
class All(Mean):
    """Every record."""

    def plan(self, spec):
        return Plan((), Neighbours.REPLACE)

    def fit(self, gate, streams, progress):
        return Artifact.from_images(*gate.read_without_guarantee("all is told"))


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The method; and its price, which is the same in every run and tested elsewhere, is computed once."""
    monkeypatch.setitem(list_methods(), "mean", Mean)
    monkeypatch.setitem(list_methods(), "all", All)
    monkeypatch.setattr(prepare, "resolve_plan", cache(prepare.resolve_plan))


def silenced(monkeypatch):
    monkeypatch.setattr(
        secret_side_module, "add_noise", lambda total, std, grid, secret: total * grid
    )


def quietened(monkeypatch, share):
    real = secret_side_module.add_noise
    monkeypatch.setattr(
        secret_side_module, "add_noise", lambda total, std, *more: real(total, std * share, *more)
    )


def records(kind=Sensitive, spec=None, dtype=np.float32):
    images = np.random.default_rng(0).random((COUNT, *SHAPE), np.float32) / 2
    images = images if dtype is np.float32 else (images * 255).round().astype(dtype)
    return kind(
        images, np.arange(COUNT) % CLASSES, spec or Spec(SHAPE, CLASSES, COUNT, (6, 6)), name="few"
    )


@pytest.fixture
def audit(tmp_path):
    def make(**given):
        return EpsilonAudit(
            **{
                "folder": tmp_path / "audit",
                "dataset": records(),
                "method": "mean",
                "canary_kind": "orthogonal",
                **WEAK,
                **given,
            }
        )

    return make


# What is proved


@pytest.mark.parametrize("neighbours", ["add-remove", "replace"])
def test_a_claim_without_its_noise_is_broken(audit, monkeypatch, neighbours):
    silenced(monkeypatch)
    found = audit(
        settings={"neighbours": neighbours}, dataset=records(spec=Spec(SHAPE, CLASSES))
    ).run(CPU)
    assert found.status == "broken"
    assert (
        found.lower_bound
        == found.ceiling
        == pytest.approx(audit_many_runs([1.0] * 24, [0.0] * 24, 1e-5, 0.999).ceiling)
    )
    assert found.claimed == pytest.approx(0.05, rel=1e-6)
    assert not found.publishable


@pytest.mark.parametrize("neighbours", ["add-remove", "replace"])
def test_the_honest_one_holds(audit, neighbours):
    found = audit(settings={"neighbours": neighbours}).run(CPU)
    assert found.status == "holds"
    assert not found.is_inconclusive
    assert found.lower_bound <= 0.05


def test_a_part_of_the_noise_is_seen_by_the_gaussian_reading(audit, monkeypatch, tmp_path):
    """Epsilon 1 has a deviation of 3.7 records: with a fiftieth of it every run is plainly on its side, and with all of it not."""
    loud = {"epsilon": 1.0, "assume_gaussian": True, "runs_per_side": 60, "confidence": 1 - 1e-6}
    assert audit(**loud, folder=tmp_path / "honest").run(CPU).status == "holds"
    quietened(monkeypatch, 1 / 50)
    assert audit(**loud, folder=tmp_path / "quiet").run(CPU).status == "broken"


def test_noise_of_the_public_seed_is_no_noise(audit, monkeypatch):
    """Had every run a seed of its own, this bug would look like privacy."""
    monkeypatch.setattr(
        secret_side_module,
        "add_noise",
        lambda total, std, grid, _: (
            total * grid
            + std * torch.randn(total.shape, generator=torch.Generator().manual_seed(0))
        ),
    )
    assert audit().run(CPU).is_broken


def test_the_public_seed_is_the_same_in_both_worlds(audit, monkeypatch):
    """What it does to a release drowns the noise a hundred times over, and must neither hide a record nor pass for one."""
    seen = []
    real = runner.synthesize
    monkeypatch.setattr(
        runner,
        "synthesize",
        lambda *given, **more: seen.append(more["seed"]) or real(*given, **more),
    )
    assert audit(settings={"public_noise": True}, seed=3).run(CPU).status == "holds"
    assert seen == [3] * 48
    silenced(monkeypatch)
    assert (
        audit(settings={"public_noise": True}, folder=audit().folder.with_name("two"))
        .run(CPU)
        .is_broken
    )


def test_who_claims_nothing_is_never_broken(audit, monkeypatch, tmp_path):
    found = audit(epsilon=math.inf, folder=tmp_path / "none").run(CPU)
    assert (found.status, found.claimed, found.is_broken) == ("no claim", None, False)
    assert found.lower_bound == found.ceiling > 0.1  # though all is proved
    gaussian = audit(epsilon=math.inf, assume_gaussian=True, folder=tmp_path / "gaussian").run(CPU)
    assert (gaussian.status, gaussian.quantity) == ("no claim", "epsilon at delta 1e-05")
    subset = audit(
        method="real-subset",
        settings={"images_per_class": 3},
        epsilon=None,
        folder=tmp_path / "subset",
    ).run(CPU)
    assert (subset.status, subset.claimed) == ("no claim", None)


def test_only_public_data_gives_numbers_that_may_be_published(audit):
    assert audit(dataset=records(Public)).run(CPU).publishable


@pytest.mark.parametrize(
    "kind", ["blank", "noise", "orthogonal", "mislabelled", "clean", "dead-leaves"]
)
@pytest.mark.parametrize("score", CANARY_SCORES)
def test_a_higher_score_means_that_the_canary_is_there(kind, score):
    """On a release that holds the class as it is, and the same with the canary in it; for any canary, brighter or darker than most."""
    box = load_dataset("digits", public=True)
    for seed in range(8):
        audit = EpsilonAudit(
            folder=None,
            dataset=box,
            method="real-subset",
            settings={"images_per_class": 1},
            canary_kind=kind,
            canary_score=score,
            seed=seed,
        )
        kept, planted = audit._split_records()
        shown = [torch.from_numpy(kept.images[kept.labels == int(planted.labels[0])])]
        shown.append(torch.cat([shown[0], planted.images]))
        one, two = (
            Release(
                Artifact.from_images(each, planted.labels.expand(len(each)).clone()),
                NoGuarantee(""),
                box.spec,
                {},
            )
            for each in shown
        )
        assert (
            audit._score_canaries(two, kept, planted, CPU)[0]
            > audit._score_canaries(one, kept, planted, CPU)[0]
        )


def test_scores_of_a_generator_are_of_the_canary_s_class(audit, tmp_path):
    tiny = {
        "num_features": 20,
        "steps": 2,
        "hidden_dim": 4,
        "num_frequencies": 2,
        "latent_dim": 2,
        "batch_per_class": 2,
        "neighbours": "add-remove",
    }
    assert (
        audit(method="merf", settings=tiny, runs_per_side=4, epsilon=1.0).run(CPU).status == "holds"
    )
    assert len({each["scores"][0] for each in map(json.loads, lines(tmp_path / "audit"))}) > 1


# The worlds


def worlds(audit):
    """Of one audit, without and with the canary; and the canary."""
    kept, planted = audit._split_records()
    return *(
        audit._build_dataset(kept, planted, np.array([each])) for each in (False, True)
    ), planted


def test_under_add_remove_a_record_comes_and_no_size_is_declared(audit):
    without, within, planted = worlds(audit())
    assert without.spec == within.spec == Spec(SHAPE, CLASSES)
    assert np.array_equal(without._images, records()._images)
    assert np.array_equal(within._images[:-1], without._images)
    assert np.array_equal(within._labels[:-1], without._labels)
    assert within._images[-1] == pytest.approx(planted.images[0].numpy(), abs=1e-6)
    assert within._labels[-1] == planted.labels[0]


@pytest.mark.parametrize("seed", range(4))
def test_under_replace_a_record_of_its_class_makes_room(audit, seed):
    without, within, planted = worlds(audit(settings={"neighbours": "replace"}, seed=seed))
    assert without.spec == within.spec == records().spec
    assert np.array_equal(without._labels, within._labels)
    [place] = np.flatnonzero((without._images != within._images).any((1, 2, 3)))
    assert within._labels[place] == planted.labels[0]
    assert within._images[place] == pytest.approx(planted.images[0].numpy(), abs=1e-6)
    assert np.array_equal(without._images, records()._images)  # nothing was written into the box


def test_where_an_owner_is_protected_all_it_has_of_the_class_makes_room(audit):
    box = records(spec=Spec(SHAPE, CLASSES, COUNT, (6, 6), num_clients=3))
    without, within, planted = worlds(audit(settings={"neighbours": "client"}, dataset=box))
    assert without.spec == within.spec == box.spec
    assert np.array_equal(without._labels, within._labels)
    place = np.flatnonzero((without._images != within._images).any((1, 2, 3)))
    owners = box._assign_clients(np.arange(COUNT))
    [owner] = {*without._client_ids[place]}
    assert np.array_equal(
        place,
        np.flatnonzero(
            (without._client_ids == owner) & (without._labels == int(planted.labels[0]))
        ),
    )
    assert np.array_equal(without._client_ids, owners)


def test_bytes_stay_bytes(audit):
    for neighbours in ("add-remove", "replace"):
        without, within, planted = worlds(
            audit(settings={"neighbours": neighbours}, dataset=records(dtype=np.uint8))
        )
        assert without._images.dtype == within._images.dtype == np.uint8
        assert (within._images == (planted.images[0].numpy() * 255).round()).all(
            (1, 2, 3)
        ).sum() == 1
    assert audit(dataset=records(dtype=np.uint8)).run(CPU).status == "holds"


@pytest.mark.parametrize("neighbours", ["add-remove", "replace"])
def test_a_canary_made_of_a_record_is_in_one_world_alone(audit, neighbours):
    without, within, planted = worlds(
        audit(canary_kind="clean", settings={"neighbours": neighbours})
    )
    held = [
        np.isclose(each._images, planted.images[0].numpy(), atol=1e-6).all((1, 2, 3)).sum()
        for each in (without, within)
    ]
    assert held == [0, 1]
    assert len(without._labels) == COUNT - 1
    if neighbours == "replace":
        assert within.spec.size == without.spec.size == COUNT - 1
        assert np.array_equal(within._labels, without._labels)
    assert (
        audit(canary_kind="clean", settings={"neighbours": neighbours}).run(CPU).status == "holds"
    )


# Broken off


class Killed(KeyboardInterrupt):
    pass


def until(number):
    def show(stage, step, of, **facts):
        assert (stage, of) == ("audit runs", 8)
        if step == number:
            raise Killed

    return show


def lines(folder):
    return (folder / "runs.jsonl").read_text().splitlines()


def test_no_run_is_done_twice(audit, monkeypatch):
    made = []
    real = runner.synthesize
    monkeypatch.setattr(
        runner, "synthesize", lambda *given, **more: made.append(1) or real(*given, **more)
    )
    mine = audit(runs_per_side=4)
    with pytest.raises(Killed):
        mine.run(CPU, until(3))
    assert len(made) == len(before := lines(mine.folder)) == 3
    with pytest.raises(ReleaseError, match="3 of 8 runs"):
        mine.compute_verdict()  # who may look and stop proves anything
    with open(mine.folder / "runs.jsonl", "a") as file:
        file.write('{"included": [true], "sco')  # the process died while it wrote
    found = mine.run(CPU)
    assert len(made) == len(after := lines(mine.folder)) == 8
    assert after[:3] == before
    assert [json.loads(each)["included"] for each in after] == [[False], [True]] * 4
    assert mine.run(CPU) == found == mine.compute_verdict()
    assert len(made) == 8
    assert not list(mine.folder.glob("*.part"))
    assert mine.folder.stat().st_mode & 0o777 == 0o700


def test_what_is_no_run_is_refused(audit):
    mine = audit(runs_per_side=4)
    mine.run(CPU)
    whole = lines(mine.folder)
    (mine.folder / "runs.jsonl").write_text("\n".join(["no run", *whole[1:]]) + "\n")
    with pytest.raises(ReleaseError, match="no runs of an audit"):
        mine.run(CPU)
    other = json.dumps({**json.loads(whole[0]), "guarantee": asdict(NoGuarantee("none"))})
    (mine.folder / "runs.jsonl").write_text("\n".join([other, *whole[1:]]) + "\n")
    with pytest.raises(ReleaseError, match="claim the same"):
        mine.compute_verdict()


@pytest.mark.parametrize(
    "other",
    [
        {"epsilon": 0.1},
        {"runs_per_side": 5},
        {"seed": 1},
        {"canary_kind": "blank"},
        {"canary_score": "nearest"},
        {"assume_gaussian": True},
        {"settings": {"noise_multiplier": 30.0}, "epsilon": None},
    ],
    ids=str,
)
def test_another_plan_is_refused(audit, other):
    mine = audit(runs_per_side=4)
    with pytest.raises(Killed):
        mine.run(CPU, until(1))
    with pytest.raises(SettingError, match="holds another audit"):
        replace(mine, **other).run(CPU)
    changed = records()._images.copy()
    changed[5] = 0
    with pytest.raises(SettingError, match="holds another audit"):
        replace(mine, dataset=Sensitive(changed, records()._labels, records().spec)).run(CPU)
    assert len(lines(mine.folder)) == 1
    assert replace(mine, confidence=0.9).run(CPU).confidence == 0.9


def test_the_folder_is_for_one_audit_alone(audit, tmp_path):
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "letters").touch()
    with pytest.raises(SettingError, match="holds something else"):
        audit().run(CPU)
    assert [each.name for each in (tmp_path / "audit").iterdir()] == [
        "letters"
    ]  # nothing of ours was left there
    (tmp_path / "audit" / "letters").unlink()
    with open(tmp_path / "audit" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SettingError, match="uses this folder"):
            audit().run(CPU)
    assert sorted(each.name for each in (tmp_path / "audit").iterdir()) == ["lock"]


# One run


def test_one_run_with_many_canaries(tmp_path):
    box = load_dataset("digits")
    given = {
        "dataset": box,
        "method": "private-set",
        "epsilon": 0.5,
        "num_canaries": 60,
        "canary_kind": "orthogonal",
        "canary_score": "mean",
    }
    given["confidence"] = 1 - 1e-6  # all of 30 guesses right would refute it
    tiny = {
        "images_per_class": 2,
        "num_random_nets": 4,
        "nets_per_round": 2,
        "net_width": 4,
        "steps": 4,
        "net_train_epochs": 1,
    }
    found = EpsilonAudit(**given, folder=tmp_path / "one", settings=tiny).run(CPU)
    assert found.status == "holds"
    [line] = lines(tmp_path / "one")
    assert len(json.loads(line)["scores"]) == 60


def test_one_run_tells_who_was_there_if_nothing_hides_it(audit):
    """Each canary its own image of a set: half of 100 canaries are guessed, and all of these guesses are right (unless 75 coins agree)."""
    one = audit(
        method="all", num_canaries=100, canary_kind="noise", canary_score="nearest", epsilon=None
    )
    found = one.run(CPU)
    assert found.status == "no claim"
    assert found.lower_bound == found.ceiling > 1.3
    assert found.quantity == "epsilon at delta 1e-05"
    # the same guesses prove more where the mechanism is known to be Gaussian
    assert (
        replace(one, assume_gaussian=True)
        .compute_bound(RunStore(one.folder).read(), NoGuarantee("none"))
        .epsilon
        > found.lower_bound + 1
    )


# In the report


def test_what_an_audit_tells_is_read_by_the_report(audit, tmp_path):
    one = audit()
    one.run(CPU)
    told = one.to_json()
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps(told))
    [attack] = load_attack_results(path)
    assert attack.verdict.endswith(told["summary"])
    assert not attack.verdict_refutes_guarantee
    assert attack.tpr_lower[0] <= attack.tpr[0]
    assert (attack.fpr[0], attack.publishable) == (
        one.compute_bound(RunStore(one.folder).read(), NoGuarantee("none")).fpr_upper_bound,
        told["publishable"],
    )
    assert told["audited"] == {
        "method": "mean",
        "settings": one.describe_plan()["settings"],
        "claimed": told["claimed"],
    }


def test_coins_are_fair_and_each_its_own(audit):
    mine = audit(num_canaries=50, canary_kind="noise")
    drawn = np.array([mine._draw_inclusion(0) for _ in range(200)])
    assert drawn.shape == (200, 50)
    assert abs(drawn.mean() - 0.5) < 6 * 0.5 / 100
    assert drawn.sum(1).std() == pytest.approx(
        math.sqrt(50) / 2, rel=0.35
    )  # exact halves would have 0, one throw for all 25
    kept, planted = mine._split_records()
    world = mine._build_dataset(kept, planted, drawn[0])
    assert len(world._labels) == COUNT + drawn[0].sum()
    assert world._images[COUNT:] == pytest.approx(planted.images.numpy()[drawn[0]], abs=1e-6)


# Refusals


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"num_canaries": 20, "settings": {"neighbours": "replace"}},
            "private for replace neighbours. An audit in one run needs add-remove",
        ),
        ({"num_canaries": 1}, "2 or more, canaries"),
        ({"runs_per_side": 3}, "at least 4 runs"),
        ({"canary_score": "guess"}, "mean, nearest"),
        ({"canary_kind": "yellow"}, "orthogonal"),
        ({"method": "meen"}, "did you mean 'mean'"),
        ({"num_canaries": 5}, "at most so many "),
        ({"canary_kind": "clean", "num_canaries": COUNT}, "taken from the records"),
        ({"epsilon": None}, "no budget"),
        (
            {
                "assume_gaussian": True,
                "epsilon": None,
                "settings": {"sampled": True, "noise_multiplier": 2.0},
            },
            "a bound for Gaussian mechanisms cannot judge",
        ),
        ({"method": "dp-sinkhorn", "epsilon": 5.0}, "no size is declared, and then: dp-sinkhorn"),
    ],
    ids=str,
)
def test_what_no_audit_can_do_is_refused_before_anything_is_written(audit, tmp_path, given, words):
    with pytest.raises(SettingError, match=words):
        audit(**given).run(CPU)
    assert not (tmp_path / "audit").exists()
