"""Audits of whole methods: too little noise is found, an honest method holds, and nothing but the record distinguishes the worlds."""

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
# 12 runs a side that are counted can prove 0.12 of any mechanism, and only if all are guessed right: by chance once in 10^7 audits.
WEAK = {"epsilon": 0.05, "runs_per_side": 24, "confidence": 0.999}


both_relations = pytest.mark.parametrize("neighbours", ["add-remove", "replace"])


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
        sampling = {"sampling": Poisson(0.5)} if self.sampled else {}
        noise = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        return Plan((Stage("sum", "sum", noise, **sampling),), Neighbours(self.neighbours))

    def forecast(self, spec, plan):
        return {}

    def fit(self, gate, streams, progress):
        total = gate.sum(
            "sum", lambda image, label: image.flatten() / 2, clip_norm=1.0, per_class=True
        )
        total = total.float().cpu().view(CLASSES, *SHAPE)
        if self.public_noise:  # as a random start or network, which depends on the public seed
            total = total + 100 * torch.randn(total.shape, generator=streams.make_rng("start"))
        return Artifact.from_images(total, torch.arange(CLASSES))


@dataclass(frozen=True, kw_only=True)
class All(Mean):
    """Every record."""

    def plan(self, spec):
        return Plan((), Neighbours.REPLACE)

    def fit(self, gate, streams, progress):
        return Artifact.from_images(*gate.read_without_guarantee("all is released"))


@pytest.fixture(autouse=True)
def registered_methods(monkeypatch):
    """The methods; and their price, which is the same in every run and tested elsewhere, is computed once."""
    monkeypatch.setitem(list_methods(), "mean", Mean)
    monkeypatch.setitem(list_methods(), "all", All)
    monkeypatch.setattr(prepare, "resolve_plan", cache(prepare.resolve_plan))


@pytest.fixture
def set_noise(monkeypatch):
    """Add a share of the noise only."""
    real = secret_side_module.add_noise

    def add_share(share):
        monkeypatch.setattr(
            secret_side_module,
            "add_noise",
            lambda total, std, grid, secret: (
                real(total, std * share, grid, secret) if share else total * grid
            ),
        )

    return add_share


@pytest.fixture
def runs(monkeypatch):
    """The seed of every run that an audit makes."""
    seeds = []
    real = runner.synthesize

    def record_run(*arguments, **options):
        seeds.append(options["seed"])
        return real(*arguments, **options)

    monkeypatch.setattr(runner, "synthesize", record_run)
    return seeds


def make_records(kind=Sensitive, spec=None, dtype=np.float32):
    images = np.random.default_rng(0).random((COUNT, *SHAPE), np.float32) / 2
    images = images if dtype is np.float32 else (images * 255).round().astype(dtype)
    spec = spec or Spec(SHAPE, CLASSES, COUNT, (6, 6))
    return kind(images, np.arange(COUNT) % CLASSES, spec, name="few")


@pytest.fixture
def make_audit(tmp_path):
    def make(folder="audit", **options):
        defaults = {"dataset": make_records(), "method": "mean", "canary_kind": "orthogonal"}
        return EpsilonAudit(folder=tmp_path / folder, **{**defaults, **WEAK, **options})

    return make


# What is proved


@both_relations
def test_a_claim_without_its_noise_is_broken(make_audit, set_noise, neighbours):
    dataset = make_records(spec=Spec(SHAPE, CLASSES))
    set_noise(0)
    verdict = make_audit(settings={"neighbours": neighbours}, dataset=dataset).run(CPU)
    assert verdict.status == "broken"
    perfect = audit_many_runs([1.0] * 24, [0.0] * 24, 1e-5, 0.999)
    assert verdict.lower_bound == verdict.ceiling == pytest.approx(perfect.ceiling)
    assert verdict.claimed == pytest.approx(0.05, rel=1e-6)
    assert not verdict.publishable


@pytest.mark.parametrize(
    ("neighbours", "options"),
    [
        ("add-remove", {}),
        ("add-remove", {"canary_kind": "clean"}),
        ("replace", {"canary_kind": "clean"}),
        ("replace", {"dataset": make_records(dtype=np.uint8)}),
    ],
)
def test_the_honest_one_holds(make_audit, neighbours, options):
    verdict = make_audit(settings={"neighbours": neighbours}, **options).run(CPU)
    assert verdict.status == "holds"
    assert not verdict.is_inconclusive
    assert verdict.lower_bound <= 0.05


def test_only_public_data_gives_numbers_that_may_be_published(make_audit):
    assert make_audit(dataset=make_records(Public), runs_per_side=4).run(CPU).publishable


@pytest.mark.slow
def test_a_part_of_the_noise_is_seen_by_the_gaussian_reading(make_audit, set_noise):
    """Epsilon 1 has a deviation of 3.7 records: with a fiftieth of it every run is plainly on its side, and with all of it not."""
    gaussian = {
        "epsilon": 1.0,
        "assume_gaussian": True,
        "runs_per_side": 60,
        "confidence": 1 - 1e-6,
    }
    assert make_audit("honest", **gaussian).run(CPU).status == "holds"
    set_noise(1 / 50)
    assert make_audit("quiet", **gaussian).run(CPU).status == "broken"


def test_noise_of_the_public_seed_is_no_noise(make_audit, monkeypatch):
    """Had every run a seed of its own, this bug would look like privacy."""

    def add_public_noise(total, std, grid, secret):
        rng = torch.Generator().manual_seed(0)
        return total * grid + std * torch.randn(total.shape, generator=rng)

    monkeypatch.setattr(secret_side_module, "add_noise", add_public_noise)
    assert make_audit().run(CPU).is_broken


def test_the_public_seed_is_the_same_in_both_worlds(make_audit, runs, set_noise):
    """What it does to a release drowns the noise a hundred times over, and must neither hide a record nor pass for one."""
    public_noise = {"settings": {"public_noise": True}}
    assert make_audit(**public_noise, seed=3).run(CPU).status == "holds"
    assert runs == [3] * 48
    set_noise(0)
    assert make_audit("silent", **public_noise).run(CPU).is_broken


def test_who_claims_nothing_is_never_broken(make_audit):
    verdict = make_audit("none", epsilon=math.inf).run(CPU)
    assert (verdict.status, verdict.claimed, verdict.is_broken) == ("no claim", None, False)
    assert verdict.lower_bound == verdict.ceiling > 0.1  # though all is proved
    few = {"runs_per_side": 4}
    gaussian = make_audit("gaussian", epsilon=math.inf, assume_gaussian=True, **few).run(CPU)
    assert (gaussian.status, gaussian.quantity) == ("no claim", "epsilon at delta 1e-05")
    subset = {"method": "real-subset", "settings": {"images_per_class": 3}, "epsilon": None}
    verdict = make_audit("subset", **subset, **few).run(CPU)
    assert (verdict.status, verdict.claimed) == ("no claim", None)


@pytest.mark.parametrize(
    "kind", ["blank", "noise", "orthogonal", "mislabelled", "clean", "dead-leaves"]
)
@pytest.mark.parametrize("score", CANARY_SCORES)
def test_a_higher_score_means_that_the_canary_is_there(kind, score):
    """On a release that holds the class as it is, and the same with the canary in it; for any canary, brighter or darker than most."""
    dataset = load_dataset("digits", public=True)
    for seed in range(8):
        audit = EpsilonAudit(
            folder=None,
            dataset=dataset,
            method="real-subset",
            settings={"images_per_class": 1},
            canary_kind=kind,
            canary_score=score,
            seed=seed,
        )
        kept, planted = audit._split_records()
        without = torch.from_numpy(kept.images[kept.labels == int(planted.labels[0])])
        scores = []
        for images in (without, torch.cat([without, planted.images])):
            artifact = Artifact.from_images(images, planted.labels.expand(len(images)).clone())
            release = Release(artifact, NoGuarantee(""), dataset.spec, {})
            scores.append(audit._score_canaries(release, kept, planted, CPU)[0])
        assert scores[1] > scores[0]


def test_scores_of_a_generator_are_of_the_class_of_the_canary(make_audit):
    tiny = {
        "num_features": 20,
        "steps": 2,
        "hidden_dim": 4,
        "num_frequencies": 2,
        "latent_dim": 2,
        "batch_per_class": 2,
        "neighbours": "add-remove",
    }
    audit = make_audit(method="merf", settings=tiny, runs_per_side=4, epsilon=1.0)
    assert audit.run(CPU).status == "holds"
    assert len({json.loads(line)["scores"][0] for line in read_lines(audit)}) > 1


# The worlds


def build_worlds(audit):
    """Of one audit, without and with the canary; and the canary."""
    kept, planted = audit._split_records()
    without, within = (
        audit._build_dataset(kept, planted, np.array([present])) for present in (False, True)
    )
    return without, within, planted


@both_relations
@pytest.mark.parametrize("kind", ["orthogonal", "clean"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("seed", range(2))
def test_worlds_differ_by_the_canary_alone(make_audit, neighbours, kind, dtype, seed):
    """Under add-remove it comes in addition, and no size is declared; under replace in place of a record of its class."""
    dataset = make_records(dtype=dtype)
    before = dataset._images.copy()
    settings = {"neighbours": neighbours}
    audit = make_audit(settings=settings, canary_kind=kind, dataset=dataset, seed=seed)
    without, within, planted = build_worlds(audit)
    assert np.array_equal(dataset._images, before)  # nothing was written into the dataset
    assert without._images.dtype == within._images.dtype == dtype
    canary = planted.images[0].numpy()
    canary = (canary * 255).round() if dtype is np.uint8 else canary
    counts = [
        np.isclose(world._images, canary, atol=1e-6).all((1, 2, 3)).sum()
        for world in (without, within)
    ]
    assert counts == [0, 1]
    size = COUNT - (kind == "clean")
    assert len(without._labels) == size
    assert without.spec == within.spec
    if neighbours == "add-remove":
        assert within.spec == Spec(SHAPE, CLASSES)
        assert np.array_equal(within._images[:-1], without._images)
        assert within._labels.tolist() == [*without._labels, planted.labels[0]]
    else:
        assert within.spec.size == size
        assert np.array_equal(without._labels, within._labels)
        [index] = np.flatnonzero((without._images != within._images).any((1, 2, 3)))
        assert within._labels[index] == planted.labels[0]
    if kind == "orthogonal":
        assert np.array_equal(without._images, before)


def test_where_a_client_is_protected_all_its_records_of_the_class_are_replaced(make_audit):
    dataset = make_records(spec=Spec(SHAPE, CLASSES, COUNT, (6, 6), num_clients=3))
    audit = make_audit(settings={"neighbours": "client"}, dataset=dataset)
    without, within, planted = build_worlds(audit)
    assert without.spec == within.spec == dataset.spec
    assert np.array_equal(without._labels, within._labels)
    changed = (without._images != within._images).any((1, 2, 3))
    [client] = {*without._client_ids[changed]}
    of_class = without._labels == int(planted.labels[0])
    assert np.array_equal(changed, (without._client_ids == client) & of_class)
    assert np.array_equal(without._client_ids, dataset._assign_clients(np.arange(COUNT)))


# Interrupted


class Killed(KeyboardInterrupt):
    pass


def kill_at(number):
    def show(stage, step, of, **facts):
        assert (stage, of) == ("audit runs", 8)
        if step == number:
            raise Killed

    return show


def read_lines(audit):
    return (audit.folder / "runs.jsonl").read_text().splitlines()


def test_no_run_is_repeated(make_audit, runs):
    audit = make_audit(runs_per_side=4)
    with pytest.raises(Killed):
        audit.run(CPU, kill_at(3))
    before = read_lines(audit)
    assert len(runs) == len(before) == 3
    with pytest.raises(ReleaseError, match="3 of 8 runs"):
        audit.compute_verdict()  # who may look and stop proves anything
    with open(audit.folder / "runs.jsonl", "a") as file:
        file.write('{"included": [true], "sco')  # the process died while it wrote
    verdict = audit.run(CPU)
    after = read_lines(audit)
    assert len(runs) == len(after) == 8
    assert after[:3] == before
    assert [json.loads(line)["included"] for line in after] == [[False], [True]] * 4
    assert audit.run(CPU) == verdict == audit.compute_verdict()
    assert len(runs) == 8
    assert not list(audit.folder.glob("*.part"))
    assert audit.folder.stat().st_mode & 0o777 == 0o700
    # what is no run of this audit is refused
    other = json.dumps({**json.loads(after[0]), "guarantee": asdict(NoGuarantee("none"))})
    for line, words in (("no run", "no runs of an audit"), (other, "claim the same")):
        (audit.folder / "runs.jsonl").write_text("\n".join([line, *after[1:]]) + "\n")
        with pytest.raises(ReleaseError, match=words):
            audit.run(CPU)


def test_another_plan_is_refused(make_audit):
    audit = make_audit(runs_per_side=4)
    with pytest.raises(Killed):
        audit.run(CPU, kill_at(1))
    changed = make_records()
    changed._images[5] = 0
    for other in (
        {"epsilon": 0.1},
        {"runs_per_side": 5},
        {"seed": 1},
        {"canary_kind": "blank"},
        {"canary_score": "nearest"},
        {"assume_gaussian": True},
        {"settings": {"noise_multiplier": 30.0}, "epsilon": None},
        {"dataset": changed},
    ):
        with pytest.raises(SettingError, match="holds another audit"):
            replace(audit, **other).run(CPU)
    assert len(read_lines(audit)) == 1
    assert replace(audit, confidence=0.9).run(CPU).confidence == 0.9


def test_the_folder_is_for_one_audit_alone(make_audit):
    audit = make_audit()
    audit.folder.mkdir()
    (audit.folder / "letters").touch()
    with pytest.raises(SettingError, match="holds something else"):
        audit.run(CPU)
    assert [path.name for path in audit.folder.iterdir()] == ["letters"]
    (audit.folder / "letters").unlink()
    with open(audit.folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SettingError, match="uses this folder"):
            audit.run(CPU)
    assert [path.name for path in audit.folder.iterdir()] == ["lock"]


# One run


def test_one_run_with_many_canaries(tmp_path):
    tiny = {
        "images_per_class": 2,
        "num_random_nets": 4,
        "nets_per_round": 2,
        "net_width": 4,
        "steps": 4,
        "net_train_epochs": 1,
    }
    audit = EpsilonAudit(
        folder=tmp_path / "one",
        dataset=load_dataset("digits"),
        method="private-set",
        settings=tiny,
        epsilon=0.5,
        num_canaries=60,
        canary_kind="orthogonal",
        canary_score="mean",
        confidence=1 - 1e-6,  # all of 30 guesses right would refute it
    )
    assert audit.run(CPU).status == "holds"
    [line] = read_lines(audit)
    assert len(json.loads(line)["scores"]) == 60


def test_one_run_proves_who_was_there_if_nothing_hides_it(make_audit):
    """Every canary is an image of the set: half of 100 canaries are guessed, and all of these guesses are right (unless 75 coins agree)."""
    audit = make_audit(
        method="all", num_canaries=100, canary_kind="noise", canary_score="nearest", epsilon=None
    )
    verdict = audit.run(CPU)
    assert verdict.status == "no claim"
    assert verdict.lower_bound == verdict.ceiling > 1.3
    assert verdict.quantity == "epsilon at delta 1e-05"
    # the same guesses prove more where the mechanism is Gaussian
    stored = RunStore(audit.folder).read()
    gaussian = replace(audit, assume_gaussian=True).compute_bound(stored, NoGuarantee("none"))
    assert gaussian.epsilon > verdict.lower_bound + 1


def test_coins_are_fair_and_independent(make_audit):
    audit = make_audit(num_canaries=50, canary_kind="noise")
    coins = np.array([audit._draw_inclusion(0) for _ in range(200)])
    assert coins.shape == (200, 50)
    assert abs(coins.mean() - 0.5) < 6 * 0.5 / 100
    # exact halves would have 0, one coin for all 25
    assert coins.sum(1).std() == pytest.approx(math.sqrt(50) / 2, rel=0.35)
    kept, planted = audit._split_records()
    world = audit._build_dataset(kept, planted, coins[0])
    assert len(world._labels) == COUNT + coins[0].sum()
    assert world._images[COUNT:] == pytest.approx(planted.images.numpy()[coins[0]], abs=1e-6)


# In the report, and refusals


def test_a_verdict_is_read_by_the_report(make_audit, tmp_path):
    audit = make_audit(runs_per_side=4)
    audit.run(CPU)
    stored = audit.to_json()
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps(stored))
    [attack] = load_attack_results(path)
    assert attack.verdict.endswith(stored["summary"])
    assert not attack.verdict_refutes_guarantee
    assert attack.tpr_lower[0] <= attack.tpr[0]
    bound = audit.compute_bound(RunStore(audit.folder).read(), NoGuarantee("none"))
    assert (attack.fpr[0], attack.publishable) == (bound.fpr_upper_bound, stored["publishable"])
    settings = audit.describe_plan()["settings"]
    claimed = stored["claimed"]
    assert stored["audited"] == {"method": "mean", "settings": settings, "claimed": claimed}


@pytest.mark.parametrize(
    ("options", "words"),
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
def test_what_no_audit_can_do_is_refused_before_anything_is_written(
    make_audit, tmp_path, options, words
):
    with pytest.raises(SettingError, match=words):
        make_audit(**options).run(CPU)
    assert not (tmp_path / "audit").exists()
