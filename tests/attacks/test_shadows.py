"""Shadows: exact halves, the same numbers however they are prepared, and little lost when a run is broken off."""

import fcntl
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from privot.attacks.membership.lira import balanced_membership
from privot.attacks.shadows import observe as observation
from privot.attacks.shadows import releases
from privot.attacks.shadows.config import ShadowConfig
from privot.attacks.shadows.observe import (
    TrainedModels,
    compute_nearest_distances,
    logit_scaled_confidence,
    observe,
)
from privot.attacks.shadows.runner import prepare_shadows
from privot.attacks.shadows.store import ShadowStore
from privot.baselines.condensation import ClassPool, standardize_images, unstandardize_images
from privot.baselines.feature_means import compute_class_mean_distance
from privot.baselines.parallel_matching import NUM_PHASES, ParallelDistributionMatching
from privot.data.dataset import Public, Records, Sensitive
from privot.data.spec import Spec
from privot.errors import DataError, ReleaseError, SettingError
from privot.nets.augment import AUGMENTATIONS, apply_augmentations
from privot.nets.ensemble import Ensemble
from privot.nets.generators.conv import initialize_weights
from privot.nets.training import Recipe, train_ensemble
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.runtime import Runtime, Streams, cuda_graphs, ignore_progress

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = Runtime("cpu")
SPEC = Spec((1, 8, 8), 3)
DM = {
    "images_per_class": 2,
    "steps": NUM_PHASES,
    "batch_per_class": 8,
    "net_width": 4,
    "learning_rate": 1.0,
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def candidates(count=60, spec=SPEC, kind=Sensitive, seed=0):
    images = np.random.default_rng(seed).random((count, *spec.shape), np.float32)
    return kind(images, np.arange(count) % spec.num_classes, spec, name="box")


def few(folder, **more):
    return ShadowConfig(
        **{
            "folder": folder,
            "dataset": candidates(),
            "settings": DM,
            "num_shadows": 6,
            "shadows_per_batch": 4,
            "epochs": 2,
            **more,
        }
    )


def files(folder):
    return {each.name: each.read_bytes() for each in folder.glob("shadow-*.npz")}


class Killed(Exception):
    """A stand-in for the end of the process."""


def killing(after, seen=None):
    """A progress that ends the run at its n-th word."""
    told = [] if seen is None else seen

    def progress(stage, step, of, **facts):
        told.append((stage, step))
        if len(told) == after:
            raise Killed

    return progress


def test_each_candidate_is_in_exactly_half_of_the_shadows():
    members = balanced_membership(25_000, 8, torch.Generator().manual_seed(0))
    assert (members.sum(0) == 4).all()
    assert (abs(members.mean(1) - 0.5) < 4 * 0.5 / 25_000**0.5).all()
    both = (members[:4] & members[4:]).mean(
        1
    )  # of two shadows: (n/2)(n/2 - 1) / n(n - 1) of the candidates
    assert (abs(both - 3 / 14) < 4 * (3 / 14 * 11 / 14 / 25_000) ** 0.5).all()
    assert not np.array_equal(
        members, balanced_membership(25_000, 8, torch.Generator().manual_seed(1))
    )
    for wrong in (0, 1, 7):
        with pytest.raises(SettingError, match="even"):
            balanced_membership(10, wrong, torch.Generator().manual_seed(0))


def test_a_run_leaves_what_attacks_need(tmp_path):
    words = []
    prepared = prepare_shadows(
        few(tmp_path), CPU, lambda stage, step, of, **facts: words.append((stage, step, of))
    )
    assert [each for each in words if each[0] == "shadows"] == [
        ("shadows", number, 6) for number in range(7)
    ]
    members = prepared.load_membership()
    assert members.shape == (6, 60)
    assert (members.sum(0) == 3).all()
    for name in observation.OBSERVATIONS:
        found = prepared.load_observation(name)
        assert (found.shape, found.dtype, isinstance(found, np.memmap)) == (
            (6, 60),
            np.float64,
            True,
        )
        for shadow in range(6):
            assert np.array_equal(
                found[shadow], np.load(prepared.observation_path(shadow), allow_pickle=False)[name]
            )
        assert np.isfinite(found).all()
        assert len(np.unique(found, axis=0)) == 6
    assert np.array_equal(prepared.load_fact("records"), members.sum(1))
    assert (
        (prepared.load_fact("accuracy_out") >= 0) & (prepared.load_fact("accuracy_out") <= 1)
    ).all()
    assert isinstance(prepared.load_release(3).guarantee, NoGuarantee)
    assert not prepared.publishable
    assert not list(tmp_path.glob("*.part"))
    assert not list(tmp_path.glob("state*"))
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["method"], plan["settings"]["steps"], len(plan["candidates"]["digest"])) == (
        "distribution-matching",
        NUM_PHASES,
        64,
    )
    with pytest.raises(SettingError, match="was not observed"):
        prepared.load_observation("gradient")


@pytest.mark.parametrize("method", ["distribution-matching", "kernel-points"])
def test_a_run_broken_off_anywhere_ends_with_the_same_bytes(tmp_path, method, monkeypatch):
    """And no shadow that was done is done again; of those made one by one, one a kill is begun again."""
    settings = (
        DM
        if method == "distribution-matching"
        else {"images_per_class": 2, "steps": 2, "batch_size": 8, "net_width": 4, "num_networks": 2}
    )
    words = []
    whole = few(
        tmp_path / "whole", method=method, settings=settings, num_shadows=4, shadows_per_batch=2
    )
    prepare_shadows(whole, CPU, killing(-1, words))
    wanted = files(tmp_path / "whole")
    made = []
    assert len(wanted) == 4
    synthesize = releases.synthesize
    monkeypatch.setattr(
        releases,
        "synthesize",
        lambda *given, **more: made.append(more["seed"]) or synthesize(*given, **more),
    )
    broken = replace(whole, folder=tmp_path / "broken")
    kills = 0
    for after in range(3, 10 * len(words), max(1, len(words) // 8)):
        before = files(broken.folder)
        stamps = {each: each.stat().st_mtime_ns for each in broken.folder.glob("shadow*.npz")}
        try:
            prepare_shadows(broken, CPU, killing(after))
            break
        except Killed:
            kills += 1
        assert before.items() <= files(broken.folder).items()
        assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert kills >= 3
    assert files(broken.folder) == wanted
    assert len(made) <= (4 + kills if method == "kernel-points" else 0)


def test_where_a_batch_stands_is_kept_after_each_leg(tmp_path):
    shadows = few(tmp_path, num_shadows=2)
    told = []
    with pytest.raises(Killed):
        prepare_shadows(shadows, CPU, killing(12, told))
    assert told[-1] == (
        "matching the means",
        11,
    )  # one word for the shadows, then one for each leg of one iteration
    with pytest.raises(Killed):
        prepare_shadows(shadows, CPU, killing(2, told := []))
    assert told[-1] == ("matching the means", 11)  # the leg that was broken off, and none before it


def test_a_folder_has_one_plan(tmp_path):
    shadows = few(tmp_path / "here", num_shadows=2)
    prepare_shadows(shadows, CPU)
    assert (tmp_path / "here").stat().st_mode & 0o077 == 0
    prepare_shadows(shadows, CPU, killing(2))  # nothing is left to do
    for key, value in {
        "epochs": 3,
        "seed": 1,
        "num_shadows": 4,
        "settings": DM | {"learning_rate": 2.0},
        "observations": ("loss",),
    }.items():
        with pytest.raises(SettingError, match=f"another plan .*{key}.* differ"):
            prepare_shadows(replace(shadows, **{key: value}), CPU)
    with pytest.raises(SettingError, match=r"another plan .candidates differ"):
        prepare_shadows(replace(shadows, dataset=candidates(seed=1)), CPU)
    with pytest.raises(SettingError, match=r"another plan .public differ"):
        prepare_shadows(replace(shadows, dataset=candidates(kind=Public)), CPU)
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "mine.txt").write_text("mine")
    with pytest.raises(SettingError, match=r"something else .mine.txt"):
        prepare_shadows(replace(shadows, folder=tmp_path / "plan"), CPU)
    assert [each.name for each in (tmp_path / "plan").iterdir()] == [
        "mine.txt"
    ]  # nothing of ours was left there
    with open(tmp_path / "here" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SettingError, match="another run uses this folder"):
            prepare_shadows(shadows, CPU)


@pytest.mark.parametrize(("kind", "mode"), [(Sensitive, 0o700), (Public, 0o755)])
def test_a_folder_that_was_there_is_shut_and_swept(tmp_path, kind, mode):
    """What shadows of sensitive candidates hold is as secret as they are; and a run that was killed leaves its ledgers."""
    (tmp_path / "here").mkdir(mode=0o755)
    shadows = few(tmp_path / "here", dataset=candidates(kind=kind))
    prepare_shadows(shadows, CPU)
    assert (tmp_path / "here").stat().st_mode & 0o777 == mode
    (tmp_path / "here" / "tmp12").mkdir()
    prepare_shadows(shadows, CPU)
    assert not (tmp_path / "here" / "tmp12").exists()


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path):
    for wrong in ({"num_shadows": 5}, {"epochs": 0}, {"observations": ("losses",)}):
        with pytest.raises(SettingError):
            few(tmp_path / "new", **wrong)
    for wrong in (
        {"method": "merf", "settings": {}},
        {"method": "mref"},
        {"settings": {"step": 3}},
    ):
        with pytest.raises(SettingError):
            prepare_shadows(few(tmp_path / "new", **wrong), CPU)
    assert not (tmp_path / "new").exists()


def test_nothing_is_observed_before_all_are_prepared(tmp_path):
    with pytest.raises(Killed):
        prepare_shadows(few(tmp_path, settings=DM | {"steps": 1}), CPU, killing(8))
    done = ShadowStore(tmp_path).count_completed()
    assert 0 < done < 6
    with pytest.raises(ReleaseError, match=f"{6 - done} of 6 shadows"):
        ShadowStore(tmp_path).load_observation("loss")
    with pytest.raises(ReleaseError, match="no folder of shadows"):
        ShadowStore(tmp_path / "nowhere").load_observation("loss")


def test_processes_prepare_the_same(tmp_path):
    settings = DM | {"steps": 2}
    prepare_shadows(few(tmp_path / "one", settings=settings, shadows_per_batch=2), CPU)
    words = []
    prepared = prepare_shadows(
        few(tmp_path / "two", settings=settings, shadows_per_batch=2),
        CPU,
        lambda *word, **facts: words.append(word),
        num_workers=2,
    )
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert prepared.count_completed() == 6
    assert ("shadows", 6, 6) in words
    assert not (tmp_path / "two" / "candidates.safetensors").exists()


def test_a_worker_tells_what_is_wrong(tmp_path):
    one = Sensitive(
        np.zeros((4, 1, 8, 8), np.uint8), np.array([0, 0, 0, 1]), Spec((1, 8, 8), 2), name="few"
    )
    with pytest.raises(DataError, match="has no member in one of the sets"):
        prepare_shadows(
            few(tmp_path / "here", dataset=one, num_shadows=2, settings=DM | {"init": "random"}),
            CPU,
        )
    with pytest.raises(Exception, match="has no member in one of the sets"):
        prepare_shadows(
            few(tmp_path / "beside", dataset=one, num_shadows=2, settings=DM | {"init": "random"}),
            CPU,
            num_workers=2,
        )


def test_a_private_method_keeps_its_guarantee_and_needs_no_ledger_afterwards(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "home"))
    settings = {"num_features": 16, "steps": 4, "hidden_dim": 8}
    shadows = few(
        tmp_path / "shadows",
        method="merf",
        settings=settings,
        epsilon=2.0,
        num_shadows=2,
        num_samples=30,
        dataset=candidates(kind=Public),
    )
    prepared = prepare_shadows(shadows, CPU)
    for shadow in range(2):
        guarantee = prepared.load_release(shadow).guarantee
        assert isinstance(guarantee, Guarantee)
        assert guarantee.epsilon == pytest.approx(2.0, rel=1e-3)
    assert prepared.publishable
    assert not (tmp_path / "home").exists()
    assert not [each for each in (tmp_path / "shadows").iterdir() if each.name.startswith("tmp")]


def test_a_real_subset_beside_others_is_that_of_the_method_and_shows_who_is_in_it(
    tmp_path, monkeypatch
):
    settings = {"images_per_class": 3}
    beside = prepare_shadows(few(tmp_path / "beside", method="real-subset", settings=settings), CPU)
    for name in (
        "privot.attacks.shadows.train.PARALLEL_METHODS",
        "privot.attacks.shadows.config.PARALLEL_METHODS",
    ):
        monkeypatch.setattr(name, ())
    alone = prepare_shadows(few(tmp_path / "alone", method="real-subset", settings=settings), CPU)
    for shadow in range(6):
        one, two = (each.load_release(shadow).artifact.tensors for each in (beside, alone))
        assert all(torch.equal(one[name], two[name]) for name in ("images", "labels"))
        assert beside.load_release(shadow).guarantee == alone.load_release(shadow).guarantee
    np.testing.assert_allclose(
        beside.load_observation("confidence"),
        alone.load_observation("confidence"),
        rtol=1e-4,
        atol=1e-5,
    )
    published = beside.load_observation("pixels") == 0
    assert (published.sum(1) == 9).all()
    assert not (published & ~beside.load_membership()).any()
    assert ((beside.load_observation("features") == 0) == published).all()
    monkeypatch.undo()
    shadows = few(tmp_path / "beside", method="real-subset", settings=settings)
    assert [sorted(releases.find_initial_candidates(shadows, each)) for each in range(6)] == [
        np.flatnonzero(row).tolist() for row in published
    ]
    with pytest.raises(SettingError, match="do not start from candidates"):
        releases.find_initial_candidates(few(tmp_path / "beside"), 0)


def test_sets_that_begin_from_real_images_stay_near_them(tmp_path):
    shadows = few(
        tmp_path,
        settings=DM | {"init": "real", "learning_rate": 1e-3, "steps": 1},
        num_shadows=2,
        observations=("pixels",),
    )
    found = prepare_shadows(shadows, CPU).load_observation("pixels")
    members = balanced_membership(60, 2, torch.Generator().manual_seed(0))
    for shadow in range(2):
        begun = releases.find_initial_candidates(shadows, shadow)
        assert members[shadow, begun].all()
        assert sorted(begun) == sorted(np.argsort(found[shadow])[-6:])


def side_by_side(
    augment,
    members,
    shape=(1, 8, 8),
    sets=2,
    portion=None,
    per_class=2,
    sizes=(7, 4, 9),
    batch=3,
    device="cpu",
):
    count = sum(sizes)
    spec = Spec(shape, len(sizes))
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    records = Records(torch.rand(count, *shape, generator=seeded(1)).to(device), labels.to(device))
    begun = torch.rand(sets, len(sizes) * per_class, *shape, generator=seeded(2)).to(device)
    streams = Streams(0, Runtime(device, portion))
    members = members.to(device)
    return records, ParallelDistributionMatching(
        ClassPool(records, len(sizes)),
        members,
        begun,
        spec,
        streams,
        learning_rate=0.5,
        batch_per_class=batch,
        augment=augment,
        net_width=4,
        net_depth=3,
    )


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("portion", [None, 6])
def test_each_set_beside_others_descends_as_the_method_would(augment, portion):
    """On the same draws, the gradient is that of the method's own distance, with the set's own records alone."""
    members = balanced_membership(20, 2, torch.Generator().manual_seed(3))
    members = torch.from_numpy(np.concatenate([members, np.ones((1, 20), bool)]))
    _, beside = side_by_side(augment, members, sets=3, portion=portion)
    begin = beside.pixels.pixels.detach().clone()
    beside._seed_phase(0)
    if augment:
        beside.augmentations.refill_if_empty()
    beside.step()
    beside._seed_phase(0)
    initialize_weights(beside.net, beside.rng)
    real, weight = beside.sample_records()
    drawn = None
    if augment:
        beside.augmentations.refill_if_empty()
        drawn = beside.augmentations.next_params()
        real = apply_augmentations(
            real, drawn.select(torch.arange(3).repeat_interleave(weight.shape[2]))
        )
    assert (weight > 0).sum() > 10
    for place, (start, found) in enumerate(
        zip(begin.chunk(3), beside.pixels.momentum_buffer.chunk(3), strict=True)
    ):
        free = start.clone().requires_grad_()
        shown = (
            apply_augmentations(free, drawn.select(torch.arange(3).repeat_interleave(2)))
            if drawn
            else free
        )
        assert (weight[:, place].sum(1) > 0.999).all()
        [wanted] = torch.autograd.grad(
            compute_class_mean_distance(beside.net, real, weight[:, place], shown, 1000), free
        )
        assert wanted.abs().max() > 1e-4
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    moved = (begin - 0.5 * beside.pixels.momentum_buffer).clamp(
        beside.pixels.min_value, beside.pixels.max_value
    )
    torch.testing.assert_close(beside.pixels.pixels.detach(), moved)


def test_a_record_moves_the_sets_that_it_is_a_member_of_and_no_other():
    members = torch.from_numpy(balanced_membership(20, 4, torch.Generator().manual_seed(0)))
    ends = []
    for changed in (False, True):
        records, beside = side_by_side(True, members, sets=4)
        if changed:
            records.images[5] = 1 - records.images[5]  # the pool holds these very records
        ends.append(beside.run(10, ignore_progress))
    differ = (ends[0] != ends[1]).flatten(1).any(1)
    assert differ.tolist() == members[:, 5].tolist()


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: a step is captured on one alone"
)
def test_a_captured_step_draws_what_an_eager_one_does(monkeypatch):
    """In every leg: its seed reaches the graph that was captured in an earlier one. And a run goes on from any of them."""
    members = torch.from_numpy(balanced_membership(20, 4, torch.Generator().manual_seed(0)))
    ends = []
    states = []
    for warm in (cuda_graphs.WARMUP_CALLS, 10**9):
        monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", warm)
        _, beside = side_by_side(True, members, (1, 28, 28), 4, portion=13, device="cuda")
        ends.append(
            beside.run(
                3 * NUM_PHASES,
                ignore_progress,
                save_state=lambda state: states.append(
                    {key: value.clone() for key, value in state.items()}
                ),
            )
        )
    _, again = side_by_side(True, members, (1, 28, 28), 4, portion=13, device="cuda")
    begun = unstandardize_images(again.pixels.pixels).view_as(ends[0])
    ends.append(again.run(3 * NUM_PHASES, ignore_progress, states[NUM_PHASES // 2]))
    moved = (ends[1] - begun).abs().mean()
    assert moved > 0.01
    for end in (
        ends[0],
        ends[2],
    ):  # half precision and the order of sums; other draws end as far away as they moved, or farther
        assert (end - ends[1]).abs().mean() < 0.3 * moved


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_observes_what_a_cpu_does(tmp_path):
    found = [
        prepare_shadows(
            few(tmp_path / device, method="real-subset", settings={"images_per_class": 3}),
            Runtime(device),
        )
        for device in ("cpu", "cuda")
    ]
    for name, bound in (
        ("pixels", 1e-4),
        ("features", 0.05),
        ("confidence", 0.3),
    ):  # bfloat16, and classifiers trained in it
        assert (
            np.abs(found[0].load_observation(name) - found[1].load_observation(name)).max() < bound
        )


def test_draws_are_of_each_class_without_repetition_and_weights_of_members_alone():
    members = torch.from_numpy(balanced_membership(20, 2, torch.Generator().manual_seed(0)))
    records, beside = side_by_side(False, members)
    seen = torch.zeros(20)
    for _ in range(200):
        real, weight = beside.sample_records()
        rows = real.flatten(1).view(3, -1, 64)
        for label in range(3):
            where = [
                int(
                    (standardize_images(records.images) == row.view(1, 8, 8))
                    .flatten(1)
                    .all(1)
                    .nonzero()[0]
                )
                for row in rows[label]
            ]
            there = [place for place in where if records.labels[place] == label]
            assert len(set(there)) == min(6, (7, 4, 9)[label])
            seen[there] += 1
            for shadow in range(2):
                own = weight[label, shadow] > 0
                wanted = [
                    bool(members[shadow, place]) and records.labels[place] == label
                    for place in where
                ]
                assert own.tolist() == wanted
                assert weight[label, shadow][own].tolist() == pytest.approx(
                    [1 / max(1, int(own.sum()))] * int(own.sum())
                )
    assert (seen[7:11] == 200).all()  # a class of 4 is drawn whole
    assert (abs(seen[:7] - 200 * 6 / 7) < 25).all()
    assert (abs(seen[11:] - 200 * 6 / 9) < 35).all()


def test_a_set_with_no_member_in_a_draw_of_a_class_waits():
    """Of a pair one is drawn; the set that holds the other has nothing to match there in this iteration."""
    members = torch.tensor([[True, False, True, False, True, True, True], [True] * 7])
    _, beside = side_by_side(False, members, sizes=(4, 3), batch=1)
    beside._seed_phase(0)
    waited = 0
    for _ in range(60):  # each time with a chance of 1 in 6
        state = beside.rng.get_state()
        initialize_weights(beside.net, beside.rng)
        _, weight = beside.sample_records()
        beside.rng.set_state(state)
        beside.pixels.momentum_buffer.zero_()
        beside.step()
        if weight[0, 0].sum() == 0:
            waited += 1
            still, moving = beside.pixels.momentum_buffer.view(2, 2, 2, 64)[0]
            assert not still.any()
            assert moving.any()
    assert waited


def test_classifiers_beside_one_another_train_as_alone():
    images = torch.rand(3, 20, 1, 8, 8, generator=seeded())
    labels = (torch.arange(60) % 4).view(3, 20)
    soft = torch.rand(3, 20, 4, generator=seeded(1)).softmax(-1)
    for recipe in (
        Recipe(
            12,
            0.02,
            batch_size=8,
            even_batches=True,
            augmentations=AUGMENTATIONS,
            weight_decay=1e-3,
            lr_milestones=(2,),
        ),
        Recipe(
            3, 0.01, batch_size=7, use_adam=True, max_shift=1, horizontal_flip=True, ema_decay=0.9
        ),
    ):
        for wanted in (labels, soft):
            nets = Ensemble(3, (1, 8, 8), 4, width=4, generator=seeded(5))
            alone = [Ensemble(1, (1, 8, 8), 4, width=4, generator=seeded(9)) for _ in range(3)]
            for place, net in enumerate(alone):
                net.load_state_dict(
                    {name: value[place : place + 1] for name, value in nets.state_dict().items()}
                )
            train_ensemble(
                nets, images, wanted, recipe, [seeded(place) for place in range(3)], signed=False
            )
            for place, net in enumerate(alone):
                train_ensemble(
                    net, images[place], wanted[place], recipe, [seeded(place)], signed=False
                )
                for name, value in net.named_parameters():
                    torch.testing.assert_close(
                        nets.get_parameter(name)[place : place + 1], value, rtol=1e-4, atol=1e-6
                    )


def test_images_of_one_net_never_reach_another():
    """With one generator for all: each batch of a net is of its own images, with their labels."""
    images = (
        torch.arange(3.0).view(3, 1, 1, 1, 1).expand(3, 12, 1, 8, 8) / 10
        + torch.rand(3, 12, 1, 1, 1, generator=seeded()) / 20
    )
    ends = []
    for other in (0.0, 0.5):
        nets = Ensemble(3, (1, 8, 8), 3, width=4, generator=seeded(5))
        changed = images.clone()
        changed[1] += other
        train_ensemble(
            nets,
            changed,
            (torch.arange(36) % 3).view(3, 12),
            Recipe(2, 0.05, batch_size=5),
            seeded(1),
        )
        ends.append(nets.head_weight.detach())
    assert [torch.equal(one, two) for one, two in zip(*ends, strict=True)] == [True, False, True]


def victims(spec=SPEC, count=2, size=9, seed=0):
    nets = Ensemble(count, spec.shape, spec.num_classes, 16, generator=seeded(seed)).requires_grad_(
        False
    )
    images = torch.rand(count, size, *spec.shape, generator=seeded(seed + 1))
    return TrainedModels(nets, images, (torch.arange(size) % spec.num_classes).expand(count, size))


def test_observations_are_what_they_say():
    for spec in (SPEC, replace(SPEC, flip_invariant=True)):
        box = candidates(31, spec)
        seen = victims(spec)
        found = observe(seen, box, runtime=Runtime("cpu", 7))
        (images, labels) = box._read_records(slice(None))
        queries = [images, images.flip(-1)] if spec.is_flip_invariant else [images]
        stated = []
        for query in queries:
            chances = (
                seen.classifiers(standardize_images(query))
                .double()
                .softmax(-1)[:, torch.arange(31), labels]
            )
            stated.append((chances / (1 - chances)).log())
        wanted = torch.stack(stated, -1) if spec.is_flip_invariant else stated[0]
        np.testing.assert_allclose(found["confidence"], wanted, rtol=1e-5, atol=1e-5)
        logits = seen.classifiers(standardize_images(images)).double()
        loss = torch.stack([-cross_entropy(each, labels, reduction="none") for each in logits])
        np.testing.assert_allclose(found["loss"], loss, rtol=1e-5, atol=1e-6)
        assert np.array_equal(found["correct"], logits.argmax(-1) == labels)
        assert found["confidence"].dtype == found["pixels"].dtype == np.float64
        for victim in range(2):
            for place in range(31):
                same = seen.images[victim, seen.labels[victim] == labels[place]]
                away = (same - images[place]).flatten(1).norm(dim=1).min()
                assert found["pixels"][victim, place] == pytest.approx(-float(away), rel=1e-5)
    assert (found["features"] < 0).all()
    assert not np.allclose(found["features"], found["pixels"])


def test_a_candidate_that_is_in_the_set_is_at_no_distance():
    rows = torch.rand(5, 64, generator=seeded())
    assert (
        compute_nearest_distances(rows, torch.zeros(5), rows.flip(0), torch.zeros(5)).tolist()
        == [0.0] * 5
    )


def test_confidence_is_not_rounded_away():
    logits = torch.tensor([[60.0, 0.0, 1.0], [-60.0, 0.0, 1.0]])
    known = logit_scaled_confidence(logits, torch.tensor([0, 0]))
    rest = np.logaddexp(0, 1)
    assert known.tolist() == pytest.approx([60 - rest, -60 - rest], rel=1e-12)


def test_a_hundred_thousand_candidates_come_in_portions(monkeypatch):
    spec = Spec((1, 2, 2), 2)
    taken = []
    take = Sensitive._read_records
    box = Sensitive(
        np.random.default_rng(0).integers(0, 256, (100_000, 1, 2, 2), np.uint8),
        np.arange(100_000) % 2,
        spec,
    )

    def spy(self, where, device="cpu"):
        taken.append(where.stop - where.start)
        return take(self, where, device)

    monkeypatch.setattr(Sensitive, "_read_records", spy)
    seen = victims(spec, size=4)
    whole = observe(seen, box, runtime=Runtime("cpu", 4000))
    assert max(taken) == 4000
    assert len(taken) == 25
    assert all(each.shape == (2, 100_000) for each in whole.values())
    monkeypatch.setattr(observation, "MAX_DISTANCES", 4000)  # a large set makes portions smaller
    part = observe(seen, box, ("pixels",), Runtime("cpu", 4000))
    assert max(taken[25:]) == 1000
    np.testing.assert_allclose(part["pixels"], whole["pixels"], rtol=1e-6)
