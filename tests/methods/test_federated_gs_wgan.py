"""Federated GS-WGAN: what an owner pays, what it can move, that a generator learns from owners, and that halves go on after a crash."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from privot.components.client_critics import Owners, wish
from privot.components.federated_settings import MOST
from privot.components.server_generator import Drawing
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.methods.federated_gs_wgan import FederatedGsWgan
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget, Neighbours
from privot.runtime import Runtime, Streams
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 8, 8)
CLASSES = 2
OWNERS = 3
SIZES = (7, 3, 12)
SPEC = Spec(SHAPE, CLASSES, owners=OWNERS)
FEMNIST = Spec((1, 28, 28), 62, owners=300)
TINY = {
    "rounds": 4,
    "rows": 2,
    "records": 8,
    "lessons": 1,
    "warm": 1,
    "critic_batch": 4,
    "width": 2,
    "code": 3,
    "channels": 2,
    "critics": 2,
}


def held(sizes=SIZES, seed=0):
    """Class 0 is bright on the left, class 1 on the right; each owner's records come from a stream of its own."""
    found = []
    for owner, size in enumerate(sizes):
        labels = np.arange(size) // 2 % CLASSES  # so that both parts of an owner have both
        images = np.random.default_rng((seed, owner)).random((size, *SHAPE), np.float32) * 0.2
        images[labels == 0, :, :, :4] += 0.7
        images[labels == 1, :, :, 4:] += 0.7
        found.append((images, labels, np.full(size, owner)))
    return [np.concatenate(each) for each in zip(*found, strict=True)]


def gate_for(folder, method, images, labels, owners, **more):
    box = Sensitive(images, labels, SPEC, owners=owners)
    plan = method.plan(SPEC)
    folder.mkdir(parents=True, exist_ok=True)
    return Gate(
        box, plan, Ledger(folder / "x.jsonl"), Budget(math.inf), runtime=Runtime("cpu"), **more
    )


def streams(seed=3):
    return Streams(seed, Runtime("cpu"))


# What an owner pays


@pytest.mark.parametrize(("rounds", "noise"), [(25, 5.0), (100, 10.0), (400, 20.0)])
def test_an_owner_s_slopes_are_one_gaussian_whatever_their_number(rounds, noise):
    plan = FederatedGsWgan(rounds=rounds, noise=noise).plan(FEMNIST)
    assert plan.neighbours is Neighbours.CLIENT
    assert plan.cost().mu == pytest.approx(math.sqrt(62 * 100) / 10)
    assert plan.cost().epsilon(1.15e-3) == pytest.approx(54.2, abs=0.05)


def test_the_paper_s_goal_is_within_reach():
    """User-level epsilon of 59.9 at delta 1.15e-3, ten times less than 599."""
    plan = FederatedGsWgan(rounds=100).plan(FEMNIST).calibrated(Budget(59.9, 1.15e-3))
    assert plan.cost().epsilon(1.15e-3) <= 59.9
    assert plan.stages[0].noise == pytest.approx(9.4, abs=0.1)


def test_the_record_unit_is_that_of_gs_wgan_with_as_many_critics():
    from privot.methods.gs_wgan import GsWgan

    settings = FederatedGsWgan(unit="record", critics=20, rounds=10, rows=2, noise=3.0)
    central = GsWgan(critics=20, steps=10, batch=20, noise=3.0).plan(Spec((1, 8, 8), 10))
    assert settings.plan(Spec((1, 8, 8), 10, owners=5)).event() == central.event()


@pytest.mark.parametrize(
    ("owners", "cohort", "rounds"), [*itertools.product([1, 5, 12], [0, 1, 4, 5, 99], [1, 7, 24])]
)
def test_the_schedule_asks_nobody_more_often_than_the_plan_says(owners, cohort, rounds):
    settings = FederatedGsWgan(cohort=cohort, rounds=rounds, rows=3, noise=1.0)
    turns = np.zeros(owners, int)
    for number in range(rounds):
        asked = settings.asked(number, owners)
        assert 0 < len(asked) == len(set(asked)) <= (cohort or owners)
        turns[asked] += 1
    assert settings.plan(Spec(SHAPE, 4, owners=owners)).stages[0].steps == turns.max() * 12
    assert turns.max() - turns.min() <= 1


def test_delta_is_held_against_the_number_of_owners():
    from privot.synthesis.preflight import cautions

    plan = FederatedGsWgan(noise=9.0).plan(FEMNIST)
    spec = dataclasses.replace(FEMNIST, size=41258)
    assert "1/owners" not in " ".join(cautions(spec, plan, 1.15e-3, {}))
    assert "1/owners" in " ".join(cautions(spec, plan, 0.01, {}))


def test_who_owns_what_must_be_known():
    with pytest.raises(SettingError, match="owners"):
        FederatedGsWgan().plan(Spec(SHAPE, CLASSES))


def test_bytes_of_the_wire_are_told_beforehand():
    settings = FederatedGsWgan(noise=1.0)
    told = settings.forecast(FEMNIST, settings.plan(FEMNIST))
    assert told["bytes_down"] == 62 * 784
    assert told["bytes_up"] == 62 * 14 * 14 * 4
    assert told["bytes_up"] + told["bytes_down"] < 1.5e5  # the paper's
    apart = FederatedGsWgan(noise=10.0, unit="record")
    assert (
        1e9 < apart.forecast(FEMNIST, apart.plan(FEMNIST))["memory_of_an_owner"] < 4e9
    )  # what an owner lends, unless it says otherwise
    assert told["memory_of_an_owner"] < 1e8
    assert FederatedGsWgan(window=16).numbers(FEMNIST) == (1, 8, 8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("unit", "user"),
        ("kind", "vae"),
        ("start", "mnist"),
        ("rounds", 0),
        ("rows", MOST + 1),
        ("records", 0),
        ("critics", -1),
        ("cohort", -1),
        ("window", -1),
        ("warm", -1),
        ("detail", 0.0),
        ("detail", math.nan),
        ("rate", 1.0),
        ("critic_rate", math.inf),
        ("average", 1.0),
        ("noise", -1.0),
        ("noise", math.nan),
        ("noise", math.inf),
        ("width", 10**9),
    ],
)
def test_bad_settings_are_errors(key, value):
    with pytest.raises(SettingError, match="federated-gs-wgan") as refused:
        FederatedGsWgan(**{key: value})
    assert key in str(refused.value)


# What an owner can move


@pytest.mark.parametrize("cohort", [0, 2])
@pytest.mark.parametrize("size", [7, 1, 40])
@pytest.mark.usefixtures("array_order")
def test_a_replaced_owner_moves_no_state_and_no_answer_of_another(tmp_path, size, cohort):
    """All it holds, and how much: to the bit, through warming up, lessons and answers on the same images."""
    method = FederatedGsWgan(**TINY, noise=2.0, cohort=cohort)
    who = 1
    found = []
    others = held(seed=5, sizes=(SIZES[0], size, SIZES[2]))
    for turn in range(2):
        mine = others[2] == who
        rest = (first := held())[2] != who
        given = (
            first
            if not turn
            else [
                np.concatenate([there[mine], here[rest]])
                for there, here in zip(others, first, strict=True)
            ]
        )
        gate = gate_for(tmp_path / str(turn), method, *given, insecure_seed=1)
        owners = Owners(gate, method, streams())
        images = torch.randint(
            256, (2, OWNERS, CLASSES, 2, *SHAPE), generator=torch.Generator().manual_seed(0)
        ).byte()
        said = []
        for number, drawn in enumerate(images):
            places = method.asked(number, OWNERS)
            said.append(owners.answers(places, drawn[places], number // method.groups(OWNERS)))
        found.append((gate._shards[1], said))
    for name, one in found[0][0].items():
        moved = (one != found[1][0][name]).view(OWNERS, -1).any(1).tolist()
        assert [moved[0], moved[2]] == [False, False], name
        assert moved[1] or name in ("owner", "known"), name
    for number, (one, two) in enumerate(zip(found[0][1], found[1][1], strict=True)):
        for place, left, right in zip(method.asked(number, OWNERS), one, two, strict=True):
            assert torch.equal(left, right) == (place != who)


def test_no_slope_is_longer_than_one(tmp_path):
    for full in (True, False):
        method = FederatedGsWgan(**TINY, noise=0.0, full=full)
        owners = Owners(gate_for(tmp_path / str(full), method, *held()), method, streams())
        said = owners.answers(
            range(OWNERS), torch.randint(256, (OWNERS, CLASSES, 2, *SHAPE)).byte()
        )
        assert said.shape == (OWNERS, CLASSES, 2, *method.numbers(SPEC))
        norms = said.flatten(3).norm(dim=3)
        assert norms.max() <= 1
        if full:
            assert norms.min() > 0.99  # all of what the noise is scaled to is used


def test_a_slope_that_is_not_there_has_no_direction():
    from privot.nets.functional_critic import Critic

    critic = Critic(SHAPE, CLASSES, 2)
    weights, along = critic.begin(1, torch.Generator().manual_seed(0))  # new: no slope
    how = {
        "critic": critic,
        "down": torch.eye(8),
        "across": torch.eye(8),
        "full": True,
        "known": False,
    }
    assert not wish(
        {"weights": weights[0], "along": along[0]}, torch.rand(SHAPE), torch.tensor(0), **how
    ).any()


@pytest.mark.parametrize("known", [True, False])
def test_an_owner_wishes_nothing_for_classes_it_has_no_record_of(tmp_path, known):
    images, labels, owners = held()
    labels[owners == 1] = 1
    method = FederatedGsWgan(**TINY, noise=0.0, known=known)
    said = Owners(gate_for(tmp_path, method, images, labels, owners), method, streams()).answers(
        range(OWNERS), torch.randint(256, (OWNERS, CLASSES, 2, *SHAPE)).byte()
    )
    there = said.flatten(2).any(2)
    assert there.tolist() == [[True, True], [not known, True], [True, True]]


# That it learns


@pytest.mark.parametrize("unit", ["client", pytest.param("record", marks=pytest.mark.slow)])
def test_a_generator_learns_from_owners(tmp_path, unit):
    """Without noise: class 0 becomes brighter on the left, class 1 on the right."""
    method = FederatedGsWgan(
        **{
            **TINY,
            "rounds": 50,
            "rows": 8,
            "records": 16,
            "width": 4,
            "channels": 8,
            "critic_batch": 16,
            "lessons": 4,
            "warm": 4,
        },
        noise=0.0,
        unit=unit,
        critic_rate=2e-3,
        rate=5e-3,
        average=0.8,
    )
    box = Sensitive(*(given := held((24, 16, 30)))[:2], SPEC, owners=given[2], name="box")
    release = synthesize(box, method, ledger=tmp_path / "l.jsonl", runtime=Runtime("cpu"))
    images = release.sample(20, torch.arange(20) % 2)[0]
    left = images[..., :4].mean((1, 2, 3))
    right = images[..., 4:].mean((1, 2, 3))
    assert (left - right)[::2].mean() > 0.1
    assert (right - left)[1::2].mean() > 0.1


# The generator's half


def drawing(**more):
    return Drawing(FederatedGsWgan(**{**TINY, **more}, noise=1.0), SPEC, streams())


def weights(half):
    return torch.cat([each.detach().flatten() for each in half.pair.net.parameters()])


def test_a_round_is_drawn_alike_whenever_it_is_drawn():
    one = drawing()
    other = drawing()
    for number in (2, 0):
        one.draw(number, [0, 2])
    first = other.draw(0, [0, 2])
    assert torch.equal(one.draw(0, [0, 2]), first)
    assert first.shape == (2, CLASSES, 2, *SHAPE)
    assert first.dtype == torch.uint8
    assert not torch.equal(one.draw(1, [0, 2]), first)
    assert not torch.equal(first[0], first[1])  # each has rows of its own


def test_who_does_not_answer_has_no_weight_and_those_who_do_have_the_same():
    said = torch.randn(
        OWNERS,
        CLASSES,
        2,
        *drawing().settings.numbers(SPEC),
        generator=torch.Generator().manual_seed(0),
    )
    found = []
    for missing in (torch.nan, 0.0, 1e30):
        half = drawing()
        half.draw(0, range(OWNERS))
        values = said.clone()
        values[1] = missing
        half.take(values, torch.tensor([True, False, True]))
        found.append(weights(half))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    whole = []
    for answered in (None, torch.ones(OWNERS, dtype=torch.bool)):
        half = drawing()
        half.draw(0, range(OWNERS))
        half.take(said, answered)
        whole.append(weights(half))
    assert torch.equal(*whole)
    assert not torch.equal(whole[0], found[0])


def test_large_rounds_are_drawn_in_lots(monkeypatch):
    from privot.components import server_generator as module

    monkeypatch.setattr(module, "LOT", 5)
    half = drawing()
    first = half.draw(0, range(OWNERS))
    before = weights(half)
    assert first.shape == (OWNERS, CLASSES, 2, *SHAPE)
    half.take(torch.ones(OWNERS, CLASSES, 2, *half.settings.numbers(SPEC)))
    assert not torch.equal(weights(half), before)


def test_a_half_that_was_kept_goes_on_as_it_would_have():
    one = drawing()
    said = torch.randn(
        OWNERS,
        CLASSES,
        2,
        *drawing().settings.numbers(SPEC),
        generator=torch.Generator().manual_seed(0),
    )
    one.draw(0, range(OWNERS))
    one.take(said)
    other = drawing()
    assert not other.restore(None)
    assert other.restore(one.kept())
    for half in (one, other):
        half.draw(1, [1])
        half.take(said[:1])
    assert torch.equal(weights(one), weights(other))
    made = [half.product() for half in (one, other)]
    assert all(
        torch.equal(made[0].tensors[name], made[1].tensors[name]) for name in made[0].tensors
    )


def test_slopes_move_pixels_where_they_point():
    """A slope towards white in one corner's frequencies, and images there become whiter."""
    half = drawing(rate=1e-2, channels=8)
    white = (half.down.T @ torch.ones(8, 8) @ half.across).expand(OWNERS, CLASSES, 2, 1, -1, -1)
    before = half.draw(0, range(OWNERS)).float().mean()
    for number in range(15):
        half.draw(number, range(OWNERS))
        half.take(white)
    assert half.draw(0, range(OWNERS)).float().mean() > before + 20


def test_the_margin_of_a_window_becomes_black():
    """Nobody is asked there, so who begins with nothing would draw anything there."""
    half = drawing(rate=1e-2, channels=8, window=4, detail=1.0)
    middle = (..., slice(2, 6), slice(2, 6))
    assert half.settings.numbers(SPEC) == (1, 4, 4)
    white = (half.down.T @ torch.ones(8, 8) @ half.across).expand(OWNERS, CLASSES, 2, 1, -1, -1)
    before = half.draw(0, range(OWNERS)).float()
    for number in range(40):
        half.draw(number, range(OWNERS))
        half.take(white)
    after = half.draw(0, range(OWNERS)).float()
    assert after[middle].mean() > before[middle].mean() + 20
    before[middle] = after[middle] = 0
    assert after.mean() < before.mean() / 4


@pytest.mark.parametrize(("start", "window"), [("glyphs", 4), ("nothing", 0), ("nothing", 8)])
def test_a_prior_and_images_without_a_margin_are_moved_by_slopes_alone(start, window):
    spec = Spec(SHAPE, 10, owners=OWNERS)
    half = Drawing(
        FederatedGsWgan(**TINY, noise=1.0, start=start, practice=1, window=window), spec, streams()
    )
    before = weights(half)
    half.draw(0, range(OWNERS))
    half.take(torch.zeros(OWNERS, 10, 2, *half.settings.numbers(spec)))
    assert torch.equal(weights(half), before)


# A crash


@pytest.mark.parametrize(
    ("cohort", "again"), [(0, 12), (2, 13)]
)  # of three owners in two groups, the next turn begins at an even round
def test_a_killed_run_goes_on_and_asks_nobody_twice(tmp_path, cohort, again):
    method = FederatedGsWgan(**{**TINY, "rounds": 20, "cohort": cohort}, noise=3.0)
    box = Sensitive(*(given := held())[:2], SPEC, owners=given[2], name="box")
    ways = {"out": tmp_path / "out", "ledger": tmp_path / "x.jsonl", "runtime": Runtime("cpu")}

    def killed(stage, step, of, **more):
        if stage == "training the generator" and step == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(box, method, **ways, progress=killed)
    seen = []
    release = synthesize(
        box,
        method,
        **ways,
        resume=True,
        progress=lambda stage, step, of, **more: seen.append((stage, step)),
    )
    assert {stage for stage, _ in seen} == {
        "training the generator"
    }  # critics that were warm stay warm
    assert seen[0][1] == again
    assert seen[-1][1] == 20
    lines = Ledger(tmp_path / "x.jsonl").entries()
    assert [each["kind"] for each in lines].count("reserve") == 1
    asked = [(each["first"], each["last"]) for each in lines if each["kind"] == "ask"]
    assert all(later[0] == before[1] + 1 for before, later in itertools.pairwise(asked))
    assert asked[-1][1] == method.plan(SPEC).stages[0].steps - 1
    assert list(tmp_path.glob("*.vault*")) == []
    assert release.guarantee.unit == "all records of one owner"
    assert release.guarantee.neighbours == "client"


def test_the_promise_is_worded_for_owners(tmp_path):
    from privot.release import Guarantee, Release, verify
    from privot.report.statement import statement, verdict

    method = FederatedGsWgan(**TINY, noise=30.0)
    box = Sensitive(*(given := held())[:2], SPEC, owners=given[2], name="box")
    release = synthesize(
        box, method, ledger=tmp_path / "l.jsonl", runtime=Runtime("cpu"), out=tmp_path / "out"
    )
    assert verify(tmp_path / "out")["epsilon_from_events"] == pytest.approx(
        release.guarantee.epsilon
    )
    assert Release.load(tmp_path / "out").spec.owners == OWNERS
    said = statement(release.guarantee, release.spec)
    assert verdict(release.guarantee).endswith("of all records of one owner")
    assert "one owner holds other records" in said["neighbours"]
    assert any("owner holds given records" in each for each in said["promise"])
    assert not any("People with several records" in each for each in said["not_covered"])
    assert any("the number of owners" in each for each in said["not_covered"])
    record = Guarantee.of(dataclasses.replace(method, unit="record", critics=2).plan(SPEC), 1e-3)
    assert record.unit == "one record"
