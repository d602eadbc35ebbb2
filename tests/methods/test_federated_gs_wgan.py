"""Federated GS-WGAN: what an owner pays, what it can move, that a generator learns from owners, and that halves go on after a crash."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from privot.components.client_critics import ClientCritics, masked_gradient
from privot.components.federated_settings import MAX_SETTING
from privot.components.server_generator import ServerGenerator
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.methods.federated_gs_wgan import FederatedGSWGAN
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
SPEC = Spec(SHAPE, CLASSES, num_clients=OWNERS)
FEMNIST = Spec((1, 28, 28), 62, num_clients=300)
TINY = {
    "rounds": 4,
    "batch_per_class": 2,
    "records_per_critic": 8,
    "critic_steps": 1,
    "warmup_rounds": 1,
    "critic_batch_size": 4,
    "critic_channels": 2,
    "latent_dim": 3,
    "generator_channels": 2,
    "num_critics": 2,
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
    box = Sensitive(images, labels, SPEC, client_ids=owners)
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
    plan = FederatedGSWGAN(rounds=rounds, noise_multiplier=noise).plan(FEMNIST)
    assert plan.neighbours is Neighbours.CLIENT
    assert plan.cost().mu == pytest.approx(math.sqrt(62 * 100) / 10)
    assert plan.cost().epsilon(1.15e-3) == pytest.approx(54.2, abs=0.05)


def test_the_paper_s_goal_is_within_reach():
    """User-level epsilon of 59.9 at delta 1.15e-3, ten times less than 599."""
    plan = FederatedGSWGAN(rounds=100).plan(FEMNIST).calibrate(Budget(59.9, 1.15e-3))
    assert plan.cost().epsilon(1.15e-3) <= 59.9
    assert plan.stages[0].noise_multiplier == pytest.approx(9.4, abs=0.1)


def test_the_record_unit_is_that_of_gs_wgan_with_as_many_critics():
    from privot.methods.gs_wgan import GSWGAN

    settings = FederatedGSWGAN(
        unit="record", num_critics=20, rounds=10, batch_per_class=2, noise_multiplier=3.0
    )
    central = GSWGAN(num_critics=20, steps=10, batch_size=20, noise_multiplier=3.0).plan(
        Spec((1, 8, 8), 10)
    )
    assert settings.plan(Spec((1, 8, 8), 10, num_clients=5)).event() == central.event()


@pytest.mark.parametrize(
    ("owners", "cohort", "rounds"), [*itertools.product([1, 5, 12], [0, 1, 4, 5, 99], [1, 7, 24])]
)
def test_the_schedule_asks_nobody_more_often_than_the_plan_says(owners, cohort, rounds):
    settings = FederatedGSWGAN(
        clients_per_round=cohort, rounds=rounds, batch_per_class=3, noise_multiplier=1.0
    )
    turns = np.zeros(owners, int)
    for number in range(rounds):
        asked = settings.schedule_clients(number, owners)
        assert 0 < len(asked) == len(set(asked)) <= (cohort or owners)
        turns[asked] += 1
    assert settings.plan(Spec(SHAPE, 4, num_clients=owners)).stages[0].steps == turns.max() * 12
    assert turns.max() - turns.min() <= 1


def test_delta_is_held_against_the_number_of_owners():
    from privot.synthesis.run_warnings import collect_warnings

    plan = FederatedGSWGAN(noise_multiplier=9.0).plan(FEMNIST)
    spec = dataclasses.replace(FEMNIST, size=41258)
    assert "1/clients" not in " ".join(collect_warnings(spec, plan, 1.15e-3, {}))
    assert "1/clients" in " ".join(collect_warnings(spec, plan, 0.01, {}))


def test_who_owns_what_must_be_known():
    with pytest.raises(SettingError, match="clients"):
        FederatedGSWGAN().plan(Spec(SHAPE, CLASSES))


def test_bytes_of_the_wire_are_told_beforehand():
    settings = FederatedGSWGAN(noise_multiplier=1.0)
    told = settings.forecast(FEMNIST, settings.plan(FEMNIST))
    assert told["bytes_down"] == 62 * 784
    assert told["bytes_up"] == 62 * 14 * 14 * 4
    assert told["bytes_up"] + told["bytes_down"] < 1.5e5  # the paper's
    apart = FederatedGSWGAN(noise_multiplier=10.0, unit="record")
    assert (
        1e9 < apart.forecast(FEMNIST, apart.plan(FEMNIST))["memory_of_a_client"] < 4e9
    )  # what an owner lends, unless it says otherwise
    assert told["memory_of_a_client"] < 1e8
    assert FederatedGSWGAN(window_size=16).compute_gradient_shape(FEMNIST) == (1, 8, 8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("unit", "user"),
        ("generator", "vae"),
        ("pretrain", "mnist"),
        ("rounds", 0),
        ("batch_per_class", MAX_SETTING + 1),
        ("records_per_critic", 0),
        ("num_critics", -1),
        ("clients_per_round", -1),
        ("window_size", -1),
        ("warmup_rounds", -1),
        ("frequency_fraction", 0.0),
        ("frequency_fraction", math.nan),
        ("generator_learning_rate", 1.0),
        ("critic_learning_rate", math.inf),
        ("ema_decay", 1.0),
        ("noise_multiplier", -1.0),
        ("noise_multiplier", math.nan),
        ("noise_multiplier", math.inf),
        ("critic_channels", 10**9),
    ],
)
def test_bad_settings_are_errors(key, value):
    with pytest.raises(SettingError, match="federated-gs-wgan") as refused:
        FederatedGSWGAN(**{key: value})
    assert key in str(refused.value)


# What an owner can move


@pytest.mark.parametrize("cohort", [0, 2])
@pytest.mark.parametrize("size", [7, 1, 40])
@pytest.mark.usefixtures("array_order")
def test_a_replaced_owner_moves_no_state_and_no_answer_of_another(tmp_path, size, cohort):
    """All it holds, and how much: to the bit, through warming up, lessons and answers on the same images."""
    method = FederatedGSWGAN(**TINY, noise_multiplier=2.0, clients_per_round=cohort)
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
        owners = ClientCritics(gate, method, streams())
        images = torch.randint(
            256, (2, OWNERS, CLASSES, 2, *SHAPE), generator=torch.Generator().manual_seed(0)
        ).byte()
        said = []
        for number, drawn in enumerate(images):
            places = method.schedule_clients(number, OWNERS)
            said.append(
                owners.query_gradients(places, drawn[places], number // method.count_groups(OWNERS))
            )
        found.append((gate._shards[1], said))
    for name, one in found[0][0].items():
        moved = (one != found[1][0][name]).view(OWNERS, -1).any(1).tolist()
        assert [moved[0], moved[2]] == [False, False], name
        assert moved[1] or name in ("client", "seen_classes"), name
    for number, (one, two) in enumerate(zip(found[0][1], found[1][1], strict=True)):
        for place, left, right in zip(
            method.schedule_clients(number, OWNERS), one, two, strict=True
        ):
            assert torch.equal(left, right) == (place != who)


def test_no_slope_is_longer_than_one(tmp_path):
    for full in (True, False):
        method = FederatedGSWGAN(**TINY, noise_multiplier=0.0, normalize_gradients=full)
        owners = ClientCritics(gate_for(tmp_path / str(full), method, *held()), method, streams())
        said = owners.query_gradients(
            range(OWNERS), torch.randint(256, (OWNERS, CLASSES, 2, *SHAPE)).byte()
        )
        assert said.shape == (OWNERS, CLASSES, 2, *method.compute_gradient_shape(SPEC))
        norms = said.flatten(3).norm(dim=3)
        assert norms.max() <= 1
        if full:
            assert norms.min() > 0.99  # all of what the noise is scaled to is used


def test_a_slope_that_is_not_there_has_no_direction():
    from privot.nets.functional_critic import Critic

    critic = Critic(SHAPE, CLASSES, 2)
    weights, along = critic.init_weights(1, torch.Generator().manual_seed(0))  # new: no slope
    how = {
        "critic": critic,
        "row_basis": torch.eye(8),
        "column_basis": torch.eye(8),
        "normalize_gradients": True,
        "mask_missing_classes": False,
    }
    assert not masked_gradient(
        {"weights": weights[0], "left_vectors": along[0]}, torch.rand(SHAPE), torch.tensor(0), **how
    ).any()


@pytest.mark.parametrize("known", [True, False])
def test_an_owner_wishes_nothing_for_classes_it_has_no_record_of(tmp_path, known):
    images, labels, owners = held()
    labels[owners == 1] = 1
    method = FederatedGSWGAN(**TINY, noise_multiplier=0.0, mask_missing_classes=known)
    said = ClientCritics(
        gate_for(tmp_path, method, images, labels, owners), method, streams()
    ).query_gradients(range(OWNERS), torch.randint(256, (OWNERS, CLASSES, 2, *SHAPE)).byte())
    there = said.flatten(2).any(2)
    assert there.tolist() == [[True, True], [not known, True], [True, True]]


# That it learns


@pytest.mark.parametrize("unit", ["client", pytest.param("record", marks=pytest.mark.slow)])
def test_a_generator_learns_from_owners(tmp_path, unit):
    """Without noise: class 0 becomes brighter on the left, class 1 on the right."""
    method = FederatedGSWGAN(
        **{
            **TINY,
            "rounds": 50,
            "batch_per_class": 8,
            "records_per_critic": 16,
            "critic_channels": 4,
            "generator_channels": 8,
            "critic_batch_size": 16,
            "critic_steps": 4,
            "warmup_rounds": 4,
        },
        noise_multiplier=0.0,
        unit=unit,
        critic_learning_rate=2e-3,
        generator_learning_rate=5e-3,
        ema_decay=0.8,
    )
    box = Sensitive(*(given := held((24, 16, 30)))[:2], SPEC, client_ids=given[2], name="box")
    release = synthesize(box, method, ledger=tmp_path / "l.jsonl", runtime=Runtime("cpu"))
    images = release.sample(20, torch.arange(20) % 2)[0]
    left = images[..., :4].mean((1, 2, 3))
    right = images[..., 4:].mean((1, 2, 3))
    assert (left - right)[::2].mean() > 0.1
    assert (right - left)[1::2].mean() > 0.1


# The generator's half


def drawing(**more):
    return ServerGenerator(
        FederatedGSWGAN(**{**TINY, **more}, noise_multiplier=1.0), SPEC, streams()
    )


def weights(half):
    return torch.cat([each.detach().flatten() for each in half.trainer.net.parameters()])


def test_a_round_is_drawn_alike_whenever_it_is_drawn():
    one = drawing()
    other = drawing()
    for number in (2, 0):
        one.generate_images(number, [0, 2])
    first = other.generate_images(0, [0, 2])
    assert torch.equal(one.generate_images(0, [0, 2]), first)
    assert first.shape == (2, CLASSES, 2, *SHAPE)
    assert first.dtype == torch.uint8
    assert not torch.equal(one.generate_images(1, [0, 2]), first)
    assert not torch.equal(first[0], first[1])  # each has rows of its own


def test_who_does_not_answer_has_no_weight_and_those_who_do_have_the_same():
    said = torch.randn(
        OWNERS,
        CLASSES,
        2,
        *drawing().settings.compute_gradient_shape(SPEC),
        generator=torch.Generator().manual_seed(0),
    )
    found = []
    for missing in (torch.nan, 0.0, 1e30):
        half = drawing()
        half.generate_images(0, range(OWNERS))
        values = said.clone()
        values[1] = missing
        half.apply_gradients(values, torch.tensor([True, False, True]))
        found.append(weights(half))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    whole = []
    for answered in (None, torch.ones(OWNERS, dtype=torch.bool)):
        half = drawing()
        half.generate_images(0, range(OWNERS))
        half.apply_gradients(said, answered)
        whole.append(weights(half))
    assert torch.equal(*whole)
    assert not torch.equal(whole[0], found[0])


def test_large_rounds_are_drawn_in_lots(monkeypatch):
    from privot.components import server_generator as module

    monkeypatch.setattr(module, "CHUNK_SIZE", 5)
    half = drawing()
    first = half.generate_images(0, range(OWNERS))
    before = weights(half)
    assert first.shape == (OWNERS, CLASSES, 2, *SHAPE)
    half.apply_gradients(
        torch.ones(OWNERS, CLASSES, 2, *half.settings.compute_gradient_shape(SPEC))
    )
    assert not torch.equal(weights(half), before)


def test_a_half_that_was_kept_goes_on_as_it_would_have():
    one = drawing()
    said = torch.randn(
        OWNERS,
        CLASSES,
        2,
        *drawing().settings.compute_gradient_shape(SPEC),
        generator=torch.Generator().manual_seed(0),
    )
    one.generate_images(0, range(OWNERS))
    one.apply_gradients(said)
    other = drawing()
    assert not other.restore(None)
    assert other.restore(one.state_dict())
    for half in (one, other):
        half.generate_images(1, [1])
        half.apply_gradients(said[:1])
    assert torch.equal(weights(one), weights(other))
    made = [half.export_artifact() for half in (one, other)]
    assert all(
        torch.equal(made[0].tensors[name], made[1].tensors[name]) for name in made[0].tensors
    )


def test_slopes_move_pixels_where_they_point():
    """A slope towards white in one corner's frequencies, and images there become whiter."""
    half = drawing(generator_learning_rate=1e-2, generator_channels=8)
    white = (half.row_basis.T @ torch.ones(8, 8) @ half.column_basis).expand(
        OWNERS, CLASSES, 2, 1, -1, -1
    )
    before = half.generate_images(0, range(OWNERS)).float().mean()
    for number in range(15):
        half.generate_images(number, range(OWNERS))
        half.apply_gradients(white)
    assert half.generate_images(0, range(OWNERS)).float().mean() > before + 20


def test_the_margin_of_a_window_becomes_black():
    """Nobody is asked there, so who begins with nothing would draw anything there."""
    half = drawing(
        generator_learning_rate=1e-2,
        generator_channels=8,
        window_size=4,
        frequency_fraction=1.0,
    )
    middle = (..., slice(2, 6), slice(2, 6))
    assert half.settings.compute_gradient_shape(SPEC) == (1, 4, 4)
    white = (half.row_basis.T @ torch.ones(8, 8) @ half.column_basis).expand(
        OWNERS, CLASSES, 2, 1, -1, -1
    )
    before = half.generate_images(0, range(OWNERS)).float()
    for number in range(40):
        half.generate_images(number, range(OWNERS))
        half.apply_gradients(white)
    after = half.generate_images(0, range(OWNERS)).float()
    assert after[middle].mean() > before[middle].mean() + 20
    before[middle] = after[middle] = 0
    assert after.mean() < before.mean() / 4


@pytest.mark.parametrize(("start", "window"), [("glyphs", 4), ("off", 0), ("off", 8)])
def test_a_prior_and_images_without_a_margin_are_moved_by_slopes_alone(start, window):
    spec = Spec(SHAPE, 10, num_clients=OWNERS)
    half = ServerGenerator(
        FederatedGSWGAN(
            **TINY, noise_multiplier=1.0, pretrain=start, pretrain_steps=1, window_size=window
        ),
        spec,
        streams(),
    )
    before = weights(half)
    half.generate_images(0, range(OWNERS))
    half.apply_gradients(torch.zeros(OWNERS, 10, 2, *half.settings.compute_gradient_shape(spec)))
    assert torch.equal(weights(half), before)


# A crash


@pytest.mark.parametrize(
    ("cohort", "again"), [(0, 12), (2, 13)]
)  # of three owners in two groups, the next turn begins at an even round
def test_a_killed_run_goes_on_and_asks_nobody_twice(tmp_path, cohort, again):
    method = FederatedGSWGAN(
        **{**TINY, "rounds": 20, "clients_per_round": cohort}, noise_multiplier=3.0
    )
    box = Sensitive(*(given := held())[:2], SPEC, client_ids=given[2], name="box")
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
    assert release.guarantee.unit == "all records of one client"
    assert release.guarantee.neighbours == "client"


def test_the_promise_is_worded_for_owners(tmp_path):
    from privot.privacy.guarantee import Guarantee
    from privot.release import Release
    from privot.release.verify import verify
    from privot.report.statement import build_statement, format_guarantee

    method = FederatedGSWGAN(**TINY, noise_multiplier=30.0)
    box = Sensitive(*(given := held())[:2], SPEC, client_ids=given[2], name="box")
    release = synthesize(
        box, method, ledger=tmp_path / "l.jsonl", runtime=Runtime("cpu"), out=tmp_path / "out"
    )
    assert verify(tmp_path / "out")["epsilon_from_events"] == pytest.approx(
        release.guarantee.epsilon
    )
    assert Release.load(tmp_path / "out").spec.num_clients == OWNERS
    said = build_statement(release.guarantee, release.spec)
    assert format_guarantee(release.guarantee).endswith("of all records of one client")
    assert "one client holds other records" in said["neighbours"]
    assert any("client holds given records" in each for each in said["promise"])
    assert not any("People with several records" in each for each in said["not_covered"])
    assert any("the number of clients" in each for each in said["not_covered"])
    record = Guarantee.from_plan(
        dataclasses.replace(method, unit="record", num_critics=2).plan(SPEC), 1e-3
    )
    assert record.unit == "one record"
