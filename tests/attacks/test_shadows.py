"""Shadows: the same numbers however they are prepared, and little lost by an interruption."""

import fcntl
import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.seeding import seed_generator
from torch.nn.functional import cross_entropy

from privot.attacks.membership.lira import balanced_membership
from privot.attacks.shadows import observe as observation
from privot.attacks.shadows import releases, workers
from privot.attacks.shadows.config import ShadowConfig
from privot.attacks.shadows.observe import TrainedModels, compute_nearest_distances, observe
from privot.attacks.shadows.runner import prepare_shadows
from privot.attacks.shadows.store import ShadowStore
from privot.baselines.condensation import ClassPool, standardize_images, unstandardize_images
from privot.baselines.feature_means import compute_class_mean_distance
from privot.baselines.parallel_matching import NUM_PHASES, ParallelDistributionMatching
from privot.data.dataset import Public, Records, Sensitive
from privot.data.spec import Spec
from privot.errors import PrivotError, ReleaseError, SettingError
from privot.nets.augment import AUGMENTATIONS, apply_augmentations
from privot.nets.ensemble import Ensemble
from privot.nets.generators.conv import initialize_weights
from privot.nets.training import Recipe, train_ensemble
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.runtime import Runtime, Streams, cuda_graphs, ignore_progress

pytestmark = pytest.mark.usefixtures("one_thread")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CPU = Runtime("cpu")
SPEC = Spec((1, 8, 8), 3)
SMALL = {"images_per_class": 2, "net_width": 4}
MATCHING = SMALL | {"batch_per_class": 8, "learning_rate": 1.0}
SHORT = MATCHING | {"steps": 2}
LONG = MATCHING | {"steps": NUM_PHASES}
KERNEL_POINTS = SMALL | {"batch_size": 8, "steps": 2, "num_networks": 2}


def draw_members(count, shadows, seed=0):
    return torch.from_numpy(balanced_membership(count, shadows, seed_generator(seed)))


def make_candidates(count=60, spec=SPEC, kind=Sensitive, seed=0):
    images = np.random.default_rng(seed).random((count, *spec.shape), np.float32)
    return kind(images, np.arange(count) % spec.num_classes, spec, name="candidates")


def make_config(folder, **more):
    facts = {"dataset": make_candidates(), "settings": SHORT, "num_shadows": 6, "epochs": 2}
    return ShadowConfig(**{"folder": folder, "shadows_per_batch": 4, **facts, **more})


def read_shadows(folder):
    return {path.name: path.read_bytes() for path in folder.glob("shadow-*.npz")}


class Killed(Exception):
    """A stand-in for the end of the process."""


def kill_after(count, steps=None):
    """A progress callback that ends the run at its n-th call."""
    steps = [] if steps is None else steps

    def progress(stage, step, of, **facts):
        steps.append((stage, step))
        if len(steps) == count:
            raise Killed

    return progress


def test_a_run_leaves_what_attacks_need(tmp_path):
    steps = []
    prepared = prepare_shadows(make_config(tmp_path, settings=LONG), CPU, kill_after(-1, steps))
    assert [step for stage, step in steps if stage == "shadows"] == list(range(7))
    members = prepared.load_membership()
    assert members.shape == (6, 60)
    assert (members.sum(0) == 3).all()
    for name in observation.OBSERVATIONS:
        values = prepared.load_observation(name)
        assert isinstance(values, np.memmap)
        assert (values.shape, values.dtype) == ((6, 60), np.float64)
        for shadow in range(6):
            file = np.load(prepared.observation_path(shadow), allow_pickle=False)
            assert np.array_equal(values[shadow], file[name])
        assert np.isfinite(values).all()
        assert len(np.unique(values, axis=0)) == 6
    assert np.array_equal(prepared.load_fact("records"), members.sum(1))
    accuracies = prepared.load_fact("accuracy_out")
    assert ((accuracies >= 0) & (accuracies <= 1)).all()
    assert isinstance(prepared.load_release(3).guarantee, NoGuarantee)
    assert not prepared.publishable
    assert not [*tmp_path.glob("*.part"), *tmp_path.glob("state*")]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["method"], plan["settings"]["steps"]) == ("distribution-matching", NUM_PHASES)
    assert len(plan["candidates"]["digest"]) == 64
    with pytest.raises(SettingError, match="was not observed"):
        prepared.load_observation("gradient")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param("distribution-matching", LONG, marks=pytest.mark.slow),
        ("kernel-points", KERNEL_POINTS),
    ],
)
def test_a_run_interrupted_anywhere_ends_with_the_same_bytes(
    tmp_path, method, settings, monkeypatch
):
    """No completed shadow is repeated; of those made one by one, one a kill is restarted."""
    counts = {"num_shadows": 4, "shadows_per_batch": 2}
    whole = make_config(tmp_path / "whole", method=method, settings=settings, **counts)
    steps = []
    prepare_shadows(whole, CPU, kill_after(-1, steps))
    expected = read_shadows(whole.folder)
    assert len(expected) == 4
    seeds = []
    synthesize = releases.synthesize

    def spy(*given, **more):
        seeds.append(more["seed"])
        return synthesize(*given, **more)

    monkeypatch.setattr(releases, "synthesize", spy)
    broken = replace(whole, folder=tmp_path / "broken")
    kills = 0
    for after in range(3, 10 * len(steps), max(1, len(steps) // 4)):
        before = read_shadows(broken.folder)
        stamps = {path: path.stat().st_mtime_ns for path in broken.folder.glob("shadow*.npz")}
        try:
            prepare_shadows(broken, CPU, kill_after(after))
            break
        except Killed:
            kills += 1
        assert before.items() <= read_shadows(broken.folder).items()
        assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert kills >= 3
    assert read_shadows(broken.folder) == expected
    assert len(seeds) <= (4 + kills if method == "kernel-points" else 0)


def test_the_state_of_a_batch_is_saved_after_each_phase(tmp_path):
    config = make_config(tmp_path / "broken", num_shadows=2, settings=LONG)
    for calls in (12, 2):  # the second call is the phase that was interrupted, and none before it
        steps = []
        with pytest.raises(Killed):
            prepare_shadows(config, CPU, kill_after(calls, steps))
        assert steps[-1] == ("matching the means", 11)
    prepare_shadows(config, CPU)
    prepare_shadows(replace(config, folder=tmp_path / "whole"), CPU)
    assert read_shadows(tmp_path / "broken") == read_shadows(tmp_path / "whole")


def test_a_folder_has_one_plan_is_private_and_is_swept(tmp_path):
    """Shadows are as secret as their candidates; and a killed run leaves its ledgers."""
    folder = tmp_path / "here"
    folder.mkdir(mode=0o755)
    config = make_config(folder, num_shadows=2)
    prepare_shadows(config, CPU)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "tmp12").mkdir()
    prepare_shadows(config, CPU, kill_after(2))  # nothing is left to do
    assert not (folder / "tmp12").exists()
    for words, change in {
        "epochs": {"epochs": 3},
        "seed": {"seed": 1},
        "num_shadows": {"num_shadows": 4},
        "settings": {"settings": SHORT | {"learning_rate": 2.0}},
        "observations": {"observations": ("loss",)},
        "candidates": {"dataset": make_candidates(seed=1)},
        "public": {"dataset": make_candidates(kind=Public)},
    }.items():
        with pytest.raises(SettingError, match=f"another plan .*{words}.* differ"):
            prepare_shadows(replace(config, **change), CPU)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(SettingError, match=r"something else .mine.txt"):
        prepare_shadows(replace(config, folder=tmp_path / "other"), CPU)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["mine.txt"]
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SettingError, match="another run uses this folder"):
            prepare_shadows(config, CPU)


def test_wrong_settings_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    folder = tmp_path / "new"
    for wrong in ({"num_shadows": 5}, {"epochs": 0}, {"observations": ("losses",)}):
        with pytest.raises(SettingError):
            make_config(folder, **wrong)
    merf = {"method": "merf", "settings": {}}
    for wrong in (merf, {"method": "mref"}, {"settings": {"step": 3}}):
        with pytest.raises(SettingError):
            prepare_shadows(make_config(folder, **wrong), CPU)
    with pytest.raises(SettingError, match="Ray is not installed"):
        prepare_shadows(make_config(tmp_path / "ray"), CPU, use_ray=True)
    assert not folder.exists()


def test_nothing_is_observed_before_all_are_prepared(tmp_path):
    with pytest.raises(Killed):
        prepare_shadows(make_config(tmp_path, settings=MATCHING | {"steps": 1}), CPU, kill_after(8))
    completed = ShadowStore(tmp_path).count_completed()
    assert 0 < completed < 6
    with pytest.raises(ReleaseError, match=f"{6 - completed} of 6 shadows"):
        ShadowStore(tmp_path).load_observation("loss")
    with pytest.raises(ReleaseError, match="no folder of shadows"):
        ShadowStore(tmp_path / "nowhere").load_observation("loss")


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"num_workers": 2}, {"use_ray": True}])
def test_processes_and_a_cluster_prepare_the_same(tmp_path, how):
    if "use_ray" in how:
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'privot[ray]'")
    prepare_shadows(make_config(tmp_path / "one", shadows_per_batch=2), CPU)
    steps = []
    config = make_config(tmp_path / "two", shadows_per_batch=2)
    prepared = prepare_shadows(config, CPU, kill_after(-1, steps), **how)
    assert read_shadows(tmp_path / "one") == read_shadows(tmp_path / "two")
    assert prepared.count_completed() == 6
    assert ("shadows", 6) in steps
    assert not (tmp_path / "two" / "candidates.safetensors").exists()


def make_config_without_members(folder):
    spec = Spec((1, 8, 8), 2)
    dataset = Sensitive(np.zeros((4, 1, 8, 8), np.uint8), np.array([0, 0, 0, 1]), spec, name="few")
    return make_config(folder, dataset=dataset, num_shadows=2, settings=SHORT | {"init": "random"})


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_error_of_a_worker_is_passed_on(tmp_path, num_workers):
    config = make_config_without_members(tmp_path / "here")
    with pytest.raises(PrivotError, match="has no member in one of the sets"):
        prepare_shadows(config, CPU, num_workers=num_workers)


@pytest.mark.parametrize("make", [make_config, make_config_without_members])
def test_a_worker_prepares_the_batches_that_it_is_sent(tmp_path, monkeypatch, capsys, make):
    monkeypatch.setattr(sys, "stdin", ["0", "1"])
    config = make(tmp_path / "two")
    with config.open_store(), workers._share_candidates(config):
        workers.run_worker(str(config.folder), "cpu", "0", "1")
    first, *_, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == {"ready": True}
    if make is make_config:
        prepare_shadows(make_config(tmp_path / "one"), CPU)
        assert read_shadows(tmp_path / "one") == read_shadows(tmp_path / "two")
        assert last == {"ready": True}
    else:
        assert "has no member in one of the sets" in last["error"]


FAKE_WORKER = """
import json, sys
def send(**message): print(json.dumps(message), flush=True)
send(ready=True)
for line in sys.stdin:
    {answer}
    send(ready=True)
"""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("send(stage='matching', step=int(line), of=3)", None),
        ("send(error='no member')", "no member"),
        ("sys.exit(3)", "exit code 3"),
    ],
)
def test_every_batch_is_sent_to_one_worker(tmp_path, monkeypatch, answer, words):
    command = [sys.executable, "-S", "-c", FAKE_WORKER.format(answer=answer)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    monkeypatch.setattr(workers, "_start_worker", lambda *_: subprocess.Popen(command, **pipes))
    steps = []
    config = make_config(tmp_path, shadows_per_batch=2)
    with pytest.raises(PrivotError, match=words) if words else nullcontext():
        prepare_shadows(config, CPU, kill_after(-1, steps), num_workers=2)
    batches = [("matching", number) for number in range(3)]
    assert words or sorted(steps) == [*batches, ("shadows", 0)]
    assert not (tmp_path / "candidates.safetensors").exists()


def test_a_private_method_keeps_its_guarantee_and_needs_no_ledger_afterwards(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "home"))
    (folder := tmp_path / "shadows").mkdir(mode=0o755)
    settings = {"num_features": 16, "steps": 4, "hidden_dim": 8}
    config = make_config(
        folder,
        method="merf",
        settings=settings,
        epsilon=2.0,
        num_shadows=2,
        num_samples=30,
        dataset=make_candidates(kind=Public),
    )
    prepared = prepare_shadows(config, CPU)
    for shadow in range(2):
        guarantee = prepared.load_release(shadow).guarantee
        assert isinstance(guarantee, Guarantee)
        assert guarantee.epsilon == pytest.approx(2.0, rel=1e-3)
    assert prepared.publishable
    assert folder.stat().st_mode & 0o777 == 0o755  # candidates are public
    assert not (tmp_path / "home").exists()
    assert not list(folder.glob("tmp*"))


def test_real_subsets_made_in_parallel_are_those_of_the_method_and_show_who_is_in_them(
    tmp_path, monkeypatch
):
    how = {"method": "real-subset", "settings": {"images_per_class": 3}}
    config = make_config(tmp_path / "parallel", **how)
    parallel = prepare_shadows(config, CPU)
    published = parallel.load_observation("pixels") == 0
    assert [sorted(releases.find_initial_candidates(config, shadow)) for shadow in range(6)] == [
        np.flatnonzero(row).tolist() for row in published
    ]
    assert (published.sum(1) == 9).all()
    assert not (published & ~parallel.load_membership()).any()
    assert ((parallel.load_observation("features") == 0) == published).all()
    for module in ("train", "config"):
        monkeypatch.setattr(f"privot.attacks.shadows.{module}.PARALLEL_METHODS", ())
    alone = prepare_shadows(make_config(tmp_path / "alone", **how), CPU)
    for shadow in range(6):
        one, two = (store.load_release(shadow) for store in (parallel, alone))
        for name in ("images", "labels"):
            assert torch.equal(one.artifact.tensors[name], two.artifact.tensors[name])
        assert one.guarantee == two.guarantee
    confidences = (store.load_observation("confidence") for store in (parallel, alone))
    np.testing.assert_allclose(*confidences, rtol=1e-4, atol=1e-5)
    with pytest.raises(SettingError, match="do not start from candidates"):
        releases.find_initial_candidates(make_config(tmp_path), 0)


def test_sets_that_begin_from_real_images_stay_near_them(tmp_path):
    settings = MATCHING | {"init": "real", "learning_rate": 1e-3, "steps": 1}
    config = make_config(tmp_path, settings=settings, num_shadows=2, observations=("pixels",))
    pixels = prepare_shadows(config, CPU).load_observation("pixels")
    members = draw_members(60, 2)
    for shadow in range(2):
        initial = releases.find_initial_candidates(config, shadow)
        assert members[shadow, initial].all()
        assert sorted(initial) == sorted(np.argsort(pixels[shadow])[-6:])


# Sets matched in parallel


def make_matching(
    augment, members, side=8, sizes=(7, 4, 9), batch=3, device="cpu", microbatch=None
):
    """Records, and two images a class of each set that is matched to its members."""
    spec = Spec((1, side, side), len(sizes))
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    images = torch.rand(sum(sizes), *spec.shape, generator=seed_generator(1))
    records = Records(images.to(device), labels.to(device))
    initial = torch.rand(len(members), 2 * len(sizes), *spec.shape, generator=seed_generator(2))
    streams = Streams(0, Runtime(device, microbatch))
    net = {"net_width": 4, "net_depth": 3, "learning_rate": 0.5, "batch_per_class": batch}
    pool = ClassPool(records, len(sizes))
    given = (pool, members.to(device), initial.to(device), spec, streams)
    return records, ParallelDistributionMatching(*given, augment=augment, **net)


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("microbatch", [None, 6])
def test_parallel_sets_descend_as_the_method_would(augment, microbatch):
    """On the same draws the gradient is that of the method, with the set's own records alone."""
    members = torch.cat([draw_members(20, 2, 3), torch.ones(1, 20, dtype=torch.bool)])
    _, sets = make_matching(augment, members, microbatch=microbatch)
    start = sets.pixels.pixels.detach().clone()
    sets._seed_phase(0)
    if augment:
        sets.augmentations.refill_if_empty()
    sets.step()
    sets._seed_phase(0)
    initialize_weights(sets.net, sets.rng)
    real, weight = sets.sample_records()
    assert (weight > 0).sum() > 10
    params = None
    if augment:
        sets.augmentations.refill_if_empty()
        params = sets.augmentations.next_params()
        rows = torch.arange(3).repeat_interleave(weight.shape[2])
        real = apply_augmentations(real, params.select(rows))
    momentum = sets.pixels.momentum_buffer
    for number, (initial, gradient) in enumerate(
        zip(start.chunk(3), momentum.chunk(3), strict=True)
    ):
        free = initial.clone().requires_grad_()
        shown = free
        if augment:
            rows = torch.arange(3).repeat_interleave(2)
            shown = apply_augmentations(free, params.select(rows))
        own = weight[:, number]
        assert (own.sum(1) > 0.999).all()
        distance = compute_class_mean_distance(sets.net, real, own, shown, 1000)
        [expected] = torch.autograd.grad(distance, free)
        assert expected.abs().max() > 1e-4
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    moved = (start - 0.5 * momentum).clamp(sets.pixels.min_value, sets.pixels.max_value)
    torch.testing.assert_close(sets.pixels.pixels.detach(), moved)


def test_a_record_moves_the_sets_that_it_is_a_member_of_and_no_other():
    members = draw_members(20, 4)
    ends = []
    for changed in (False, True):
        records, sets = make_matching(True, members)
        if changed:
            records.images[5] = 1 - records.images[5]  # the pool holds these very records
        ends.append(sets.run(10, ignore_progress))
    differ = (ends[0] != ends[1]).flatten(1).any(1)
    assert differ.tolist() == members[:, 5].tolist()


@needs_gpu
def test_a_captured_step_draws_what_an_eager_one_does(monkeypatch):
    """In every phase, by its own seed; and a run resumes from any of them."""
    how = {"side": 28, "device": "cuda", "microbatch": 13}
    members = draw_members(20, 4)
    ends = []
    states = []

    def save(state):
        states.append({key: value.clone() for key, value in state.items()})

    for warm in (cuda_graphs.WARMUP_CALLS, 10**9):
        monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", warm)
        _, sets = make_matching(True, members, **how)
        ends.append(sets.run(3 * NUM_PHASES, ignore_progress, save_state=save))
    _, again = make_matching(True, members, **how)
    initial = unstandardize_images(again.pixels.pixels).view_as(ends[0])
    ends.append(again.run(3 * NUM_PHASES, ignore_progress, states[NUM_PHASES // 2]))
    moved = (ends[1] - initial).abs().mean()
    assert moved > 0.01
    for end in (ends[0], ends[2]):  # half precision; other draws end as far away as they moved
        assert (end - ends[1]).abs().mean() < 0.3 * moved


@needs_gpu
def test_a_gpu_observes_what_a_cpu_does(tmp_path):
    how = {"method": "real-subset", "settings": {"images_per_class": 3}}
    stores = [
        prepare_shadows(make_config(tmp_path / device, **how), Runtime(device))
        for device in ("cpu", "cuda")
    ]
    # bfloat16, and classifiers trained in it
    for name, bound in (("pixels", 1e-4), ("features", 0.05), ("confidence", 0.3)):
        here, gpu = (store.load_observation(name) for store in stores)
        assert np.abs(here - gpu).max() < bound


def test_draws_are_of_each_class_without_repetition_and_weights_of_members_alone():
    members = draw_members(20, 2)
    records, sets = make_matching(False, members)
    pool = standardize_images(records.images).flatten(1)
    counts = torch.zeros(20)
    for _ in range(200):
        real, weight = sets.sample_records()
        rows = real.flatten(1).view(3, -1, 64)
        for label in range(3):
            which = (rows[label][:, None] == pool).all(2).int().argmax(1)
            is_own = records.labels[which] == label
            drawn = which[is_own]
            assert len(set(drawn.tolist())) == len(drawn) == min(6, (7, 4, 9)[label])
            counts[drawn] += 1
            expected = (members[:, which] & is_own).float()
            expected /= expected.sum(1, keepdim=True).clamp(min=1)
            torch.testing.assert_close(weight[label], expected)
    assert (counts[7:11] == 200).all()  # a class of 4 is drawn whole
    assert (abs(counts[:7] - 200 * 6 / 7) < 25).all()
    assert (abs(counts[11:] - 200 * 6 / 9) < 35).all()


def test_a_set_with_no_member_in_a_draw_of_a_class_waits():
    """Of a pair one is drawn; the set of the other has nothing to match in this iteration."""
    members = torch.tensor([[True, False, True, False, True, True, True], [True] * 7])
    _, sets = make_matching(False, members, sizes=(4, 3), batch=1)
    sets._seed_phase(0)
    waits = 0
    for _ in range(60):  # each time with a chance of 1 in 6
        state = sets.rng.get_state()
        initialize_weights(sets.net, sets.rng)
        _, weight = sets.sample_records()
        sets.rng.set_state(state)
        sets.pixels.momentum_buffer.zero_()
        sets.step()
        if weight[0, 0].sum() == 0:
            waits += 1
            still, moving = sets.pixels.momentum_buffer.view(2, 2, 2, 64)[0]
            assert not still.any()
            assert moving.any()
    assert waits


# Classifiers side by side


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_classifiers_side_by_side_train_as_alone(adam, soft):
    images = torch.rand(3, 20, 1, 8, 8, generator=seed_generator())
    labels = (torch.arange(60) % 4).view(3, 20)
    if soft:
        labels = torch.rand(3, 20, 4, generator=seed_generator(1)).softmax(-1)
    recipe = Recipe(12, 0.02, batch_size=8, even_batches=True, augmentations=AUGMENTATIONS)
    recipe = replace(recipe, weight_decay=1e-3, lr_milestones=(2,))
    if adam:
        recipe = Recipe(3, 0.01, batch_size=7, use_adam=True, max_shift=1, horizontal_flip=True)
        recipe = replace(recipe, ema_decay=0.9)
    nets = Ensemble(3, (1, 8, 8), 4, width=4, generator=seed_generator(5))
    initial = {name: value.clone() for name, value in nets.state_dict().items()}
    train_ensemble(
        nets, images, labels, recipe, [seed_generator(n) for n in range(3)], signed=False
    )
    for number in range(3):
        net = Ensemble(1, (1, 8, 8), 4, width=4, generator=seed_generator(9))
        net.load_state_dict({name: value[number][None] for name, value in initial.items()})
        own = (net, images[number], labels[number], recipe)
        train_ensemble(*own, [seed_generator(number)], signed=False)
        for name, value in net.named_parameters():
            together = nets.get_parameter(name)[number][None]
            torch.testing.assert_close(together, value, rtol=1e-4, atol=1e-6)


def test_images_of_one_net_never_reach_another():
    """With one generator for all: each batch of a net is of its own images, with their labels."""
    images = torch.rand(3, 12, 1, 1, 1, generator=seed_generator()) / 20
    images = (images + torch.arange(3).view(3, 1, 1, 1, 1) / 10).expand(3, 12, 1, 8, 8)
    labels = (torch.arange(36) % 3).view(3, 12)
    ends = []
    for other in (0.0, 0.5):
        nets = Ensemble(3, (1, 8, 8), 3, width=4, generator=seed_generator(5))
        changed = images.clone()
        changed[1] += other
        train_ensemble(nets, changed, labels, Recipe(2, 0.05, batch_size=5), seed_generator(1))
        ends.append(nets.head_weight.detach())
    assert [torch.equal(one, two) for one, two in zip(*ends, strict=True)] == [True, False, True]


# Observations


def make_victims(spec=SPEC, size=9):
    nets = Ensemble(2, spec.shape, spec.num_classes, 16, generator=seed_generator()).requires_grad_(
        False
    )
    images = torch.rand(2, size, *spec.shape, generator=seed_generator(1))
    return TrainedModels(nets, images, (torch.arange(size) % spec.num_classes).expand(2, size))


@pytest.mark.parametrize("flips", [False, True])
def test_observations_are_what_they_say(flips):
    spec = replace(SPEC, flip_invariant=True) if flips else SPEC
    dataset = make_candidates(31, spec)
    models = make_victims(spec)
    values = observe(models, dataset, runtime=Runtime("cpu", 7))
    images, labels = dataset._read_records(slice(None))
    logits = [
        models.classifiers(standardize_images(query)).double()
        for query in (images, images.flip(-1))
    ]
    chances = [rows.softmax(-1)[:, torch.arange(31), labels] for rows in logits]
    confidence = torch.stack([(chance / (1 - chance)).log() for chance in chances], -1)
    expected = confidence if flips else confidence[..., 0]
    np.testing.assert_allclose(values["confidence"], expected, rtol=1e-5, atol=1e-5)
    loss = torch.stack([-cross_entropy(rows, labels, reduction="none") for rows in logits[0]])
    np.testing.assert_allclose(values["loss"], loss, rtol=1e-5, atol=1e-6)
    assert np.array_equal(values["correct"], logits[0].argmax(-1) == labels)
    assert values["confidence"].dtype == values["pixels"].dtype == np.float64
    for victim in range(2):
        for index in range(31):
            same = models.images[victim, models.labels[victim] == labels[index]]
            distance = (same - images[index]).flatten(1).norm(dim=1).min()
            assert values["pixels"][victim, index] == pytest.approx(-float(distance), rel=1e-5)
    assert (values["features"] < 0).all()
    assert not np.allclose(values["features"], values["pixels"])


def test_a_candidate_that_is_in_the_set_has_distance_zero():
    rows = torch.rand(5, 64, generator=seed_generator())
    distances = compute_nearest_distances(rows, torch.zeros(5), rows.flip(0), torch.zeros(5))
    assert distances.tolist() == [0.0] * 5


def test_many_candidates_are_read_in_batches(monkeypatch):
    spec = Spec((1, 2, 2), 2)
    sizes = []
    read = Sensitive._read_records
    images = np.random.default_rng(0).integers(0, 256, (20_000, 1, 2, 2), np.uint8)
    dataset = Sensitive(images, np.arange(20_000) % 2, spec)

    def spy(self, where, device="cpu"):
        sizes.append(where.stop - where.start)
        return read(self, where, device)

    monkeypatch.setattr(Sensitive, "_read_records", spy)
    models = make_victims(spec, size=4)
    whole = observe(models, dataset, runtime=Runtime("cpu", 4000))
    assert sizes == [4000] * 5
    assert all(values.shape == (2, 20_000) for values in whole.values())
    monkeypatch.setattr(observation, "MAX_DISTANCES", 4000)  # a large set makes batches smaller
    part = observe(models, dataset, ("pixels",), Runtime("cpu", 4000))
    assert max(sizes[5:]) == 1000
    np.testing.assert_allclose(part["pixels"], whole["pixels"], rtol=1e-6)
