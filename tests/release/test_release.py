"""A release on disk comes back as it was; every altered byte is noticed; nothing hostile runs."""

import contextlib
import copy
import errno
import hashlib
import json
import math
import os
import pickle
import platform
import random
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.corrupt_bytes import corrupt_bytes
from support.forged_release import DROPPED, forge_release, write_manifest

from privot.data.spec import Spec
from privot.errors import PrivotError, ReleaseError
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.privacy.plan import Budget, Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.release import Release
from privot.release.artifact import Artifact
from privot.release.verify import verify
from privot.synthesis import synthesize, versions

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")

QUICK = {"num_features": 200, "steps": 20, "hidden_dim": 16}
FILES = ("manifest.json", "manifest.sha256", "tensors.safetensors")


def train_generator(out, budget=5.0, **more):
    ledger = out.with_name("digits.jsonl")
    return synthesize("digits", "merf", budget, settings=QUICK, out=out, ledger=ledger, **more)


def make_set(plan=None):
    plan = plan or Plan((Stage("means", "sum", 4.0, 3),), Neighbours.ADD_REMOVE)
    metadata = {"method": "by hand", "plan": plan.to_json(), "event": str(plan.event())}
    images = torch.rand(7, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0], dtype=torch.int32)
    artifact = Artifact.from_images(images, labels)
    return Release(artifact, Guarantee.from_plan(plan, 1e-5), Spec((1, 4, 4), 3), metadata)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A generator and a set, saved."""
    root = tmp_path_factory.mktemp("releases")
    train_generator(root / "generator")
    make_set().save(root / "set")
    return root


@pytest.fixture
def generator(folders):
    return Release.load(folders / "generator")


@pytest.fixture(params=["generator", "set"])
def saved(request, folders, tmp_path):
    """One of them, to be spoilt."""
    return shutil.copytree(folders / request.param, tmp_path / "release")


def read_files(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


# There and back


def test_a_release_comes_back_as_it_was(saved):
    release = Release.load(saved)
    copied = release.save(saved.with_name("this") / "year" / "out")
    again = Release.load(copied)
    assert again.build_manifest() == release.build_manifest()
    images = {}
    for seed in (0, 1):
        images[seed], labels = release.sample(25, seed=seed)
        assert images[seed].shape == (25, *release.spec.shape)
        assert 0 <= images[seed].min() < images[seed].max() <= 1
        assert labels.tolist() == [index % release.spec.num_classes for index in range(25)]
        assert torch.equal(images[seed], again.sample(25, seed=seed)[0])
    is_generator = release.artifact.kind == "generator"
    assert torch.equal(images[0], images[1]) is not is_generator
    assert read_files(saved) == read_files(copied)
    assert sorted(path.name for path in saved.iterdir()) == sorted(FILES)


def test_labels_can_be_asked_for(saved):
    release = Release.load(saved)
    images, labels = release.sample(4, labels=torch.tensor([2, 2, 0, 1]))
    assert labels.tolist() == [2, 2, 0, 1]
    assert images.shape[0] == 4
    for count, wrong in ((3, [0, 1]), (1, [release.spec.num_classes]), (1, [-1])):
        with pytest.raises(ReleaseError, match="labels"):
            release.sample(count, labels=torch.tensor(wrong))
    for count in (0, -1, 10**12):
        with pytest.raises(ReleaseError, match="num_samples"):
            release.sample(count)


def test_a_set_gives_its_own_images_in_turn():
    release = make_set()
    images, labels = release.sample(9)
    own = release.artifact.tensors
    for label in range(3):
        of_class = own["images"][own["labels"] == label]
        expected = of_class[torch.arange(3) % len(of_class)]
        assert torch.equal(images[labels == label], expected)
    with pytest.raises(ReleaseError, match="class 3"):
        replace(release, spec=Spec((1, 4, 4), 4)).sample(4)


def test_verify_proves_the_claim_again(folders, tmp_path):
    stages = (Stage("flow", "sum", 2.0, 40, Poisson(0.01)), Stage("means", "sum", 9.0))
    make_set(Plan(stages, Neighbours.ADD_REMOVE)).save(tmp_path / "sampled")
    for folder in (folders / "generator", folders / "set", tmp_path / "sampled"):
        result = verify(folder)
        assert result["digests"] == "ok"
        epsilon = result["guarantee"]["epsilon"]
        assert result["epsilon_from_events"] == pytest.approx(epsilon, rel=1e-6)
    assert verify(folders / "generator")["guarantee"]["epsilon"] == pytest.approx(5, rel=1e-6)


@pytest.mark.parametrize("how", [{"budget": Budget(math.inf)}, {"insecure_seed": 1}])
def test_a_release_without_a_guarantee_says_so(tmp_path, how):
    train_generator(tmp_path / "open", **how)
    assert isinstance(Release.load(tmp_path / "open").guarantee, NoGuarantee)
    result = verify(tmp_path / "open")
    assert "epsilon_from_events" not in result
    assert result["guarantee"]["reason"]


def test_a_smaller_spread_draws_less_varied_images_of_the_same_generator(generator):
    labels = torch.zeros(200, dtype=torch.int64)
    whole, narrow, hardly = (
        generator.sample(200, labels, latent_scale=scale)[0].std(0) for scale in (1.0, 0.5, 1e-6)
    )
    assert narrow.mean() < 0.8 * whole.mean()
    assert hardly.max() < 1e-4, "one image a class is left"
    assert torch.equal(generator.sample(5)[0], generator.sample(5, latent_scale=1.0)[0])
    for release, scale in (
        (generator, 0.0),
        (generator, 1.1),
        (generator, math.nan),
        (make_set(), 0.5),
    ):
        with pytest.raises(ReleaseError, match="latent_scale"):
            release.sample(3, latent_scale=scale)


def test_a_generator_that_diverged_is_not_sampled(generator):
    for tensor in generator.artifact.tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(math.nan)
    with pytest.raises(ReleaseError, match="diverged"):
        generator.sample(3)


# Writing


@pytest.mark.parametrize(
    "occupy",
    [Path.mkdir, Path.touch, lambda out: out.symlink_to(out.with_name("nowhere"))],
    ids=["folder", "file", "dangling link"],
)
def test_nothing_is_overwritten(tmp_path, occupy):
    out = tmp_path / "out"
    occupy(out)
    with pytest.raises(ReleaseError, match="already exists"):
        make_set().save(out)
    assert list(tmp_path.rglob("*")) == [out]


every_write = pytest.mark.parametrize(
    "function",
    [
        "privot.release.save",
        "pathlib.Path.write_bytes",
        "pathlib.Path.write_text",
        "pathlib.Path.replace",
        "privot.release.json.dumps",
    ],
)


@every_write
def test_a_disk_that_fills_up_leaves_nothing(generator, tmp_path, monkeypatch, function):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(function, fail)
        with pytest.raises(OSError, match="No space"):
            generator.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert verify(generator.save(tmp_path / "out"))


@every_write
def test_a_process_that_dies_leaves_no_half_release(generator, tmp_path, monkeypatch, function):
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(function, lambda *_, **__: os._exit(9))
        try:
            generator.save(tmp_path / "out")
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (tmp_path / "out").exists()
    assert verify(generator.save(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]  # what the dead one left is gone too


# Altered bytes


def find_unnoticed_flips(folder, name, offsets, draw):
    data = (folder / name).read_bytes()
    missed = []
    for offset in offsets:
        spoilt = bytearray(data)
        spoilt[offset] ^= draw.randrange(1, 256)
        (folder / name).write_bytes(spoilt)
        with contextlib.suppress(ReleaseError):
            verify(folder)
            missed.append((name, offset))
    (folder / name).write_bytes(data)
    return missed


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_byte_is_noticed(saved, every):
    draw = random.Random(0)
    sizes = {name: (saved / name).stat().st_size for name in FILES}
    size = sizes["tensors.safetensors"]
    sampled = {0, 7, 8, size - 1, size // 2, *draw.sample(range(size), min(size, 250 // every))}
    for name in FILES:
        offsets = sampled if name == "tensors.safetensors" else range(0, sizes[name], every)
        assert find_unnoticed_flips(saved, name, offsets, draw) == []
    path = saved / "manifest.sha256"
    digest = path.read_bytes()
    for ending in (b"\r", b"\r\n", b"", b"\n\n", b"\n "):  # not even the end of a line may change
        path.write_bytes(digest[:-1] + ending)
        with pytest.raises(ReleaseError, match="digest"):
            verify(saved)
    path.write_bytes(digest)
    assert verify(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_misplaced_file_is_noticed(saved, name):
    path = saved / name
    for spoil in (Path.unlink, Path.mkdir, lambda path: (path.rmdir(), path.touch())):
        spoil(path)
        with pytest.raises(ReleaseError):
            verify(saved)


def test_what_is_no_release(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        for read in (Release.load, verify):
            with pytest.raises(ReleaseError, match="not a valid release"):
                read(path)


# Forged manifests, with digests that fit


def halve(value):
    return value / 2


def add(**more):
    return lambda value: {**value, **more}


def pose_as_epsilon(claim):
    powers = {**claim["max_tpr"], "epsilon": claim["epsilon"]}
    return {**claim, "max_tpr": powers, "epsilon": 0.1}


NOISE = "plan/stages/0/noise_multiplier"
STEPS = "plan/stages/0/steps"
SAMPLING = "plan/stages/0/sampling"
POWER = "guarantee/max_tpr"
FORGED = {
    "epsilon halved": {"guarantee/epsilon": halve},
    "epsilon missing": {"guarantee/epsilon": DROPPED},
    "delta smaller": {"guarantee/delta": 1e-9},
    "delta negative": {"guarantee/delta": -1},
    "delta nan": {"guarantee/delta": math.nan},
    "attack power halved": {f"{POWER}/0.01": halve},
    "attack power at one more rate": {POWER: lambda value: {**value, "0.5": 0.5}},
    "attack power that poses as the epsilon": {"guarantee": pose_as_epsilon},
    "attack power left out": {POWER: lambda value: {"0.01": value["0.01"]}},
    "neighbours of the claim": {"guarantee/neighbours": "local"},
    "unit of the claim": {"guarantee/unit": "one person with all their records"},
    "accountant of the claim": {"guarantee/accountant": "a kind one"},
    "second opinion of the claim": {"guarantee/renyi_epsilon": 0.1},
    "kind of claim": {"guarantee/kind": "Better"},
    "one more field in the claim": {"guarantee": add(certified=True)},
    "neighbours of the plan": {"plan/neighbours": "local"},
    "noise of the plan": {NOISE: lambda value: value * 2},
    "noise negative": {NOISE: -1.0},
    "steps of the plan": {STEPS: 5},
    "sampling of the plan": {SAMPLING: {"kind": "poisson", "sample_rate": 0.5}},
    "no plan": {"plan": None},
    "event": {"event": "GaussianDpEvent(noise_multiplier=100.0)"},
    "event missing": {"event": DROPPED},
    "event and plan": {NOISE: 50.0, "event": "GaussianDpEvent(noise_multiplier=50.0)"},
    "event and plan without noise": {NOISE: 0, "event": "NonPrivateDpEvent()"},
    "spec with a class less": {"spec/num_classes": lambda value: value - 1},
    "spec with classes as a fraction": {"spec/num_classes": float},
    "spec with a larger shape": {"spec/shape": [1, 16, 16]},
    "spec with an absurd shape": {"spec/shape": [1, 10**9, 10**9]},
    "kind of artifact": {"artifact/kind": "program"},
    "no artifact": {"artifact": None},
    "format of tomorrow": {"format": 3},
    "files that leave the folder": {"files": {"../release/tensors.safetensors": "0" * 64}},
    "files that climb": {
        "files": lambda files: {**files, "../manifest.json": files["tensors.safetensors"]}
    },
    "files by an absolute path": {"files": {"/etc/passwd": "0" * 64}},
    "files without the tensors": {"files": {}},
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_refused_though_its_digests_fit(saved, name):
    forge_release(saved, FORGED[name])
    with pytest.raises(PrivotError):
        verify(saved)


CONFIG = "artifact/generator_config"
FORGED_GENERATORS = {
    "generator unknown": {"artifact/generator_class": "os.system"},
    "generator not hashable": {"artifact/generator_class": ["ConvGenerator"]},
    "arguments unknown": {CONFIG: {"command": "rm"}},
    "no arguments": {CONFIG: None},
    "hidden layer of a terabyte": {f"{CONFIG}/hidden_dim": 10**11},
    "hidden layer beyond all": {f"{CONFIG}/hidden_dim": 10**30},
    "hidden layer as text": {f"{CONFIG}/hidden_dim": "200"},
    "latent longer": {f"{CONFIG}/latent_dim": 6},
    "latent for classes": {CONFIG: add(latent_dim=6, classes=9)},
    "shape of another size": {f"{CONFIG}/shape": [1, 7, 7]},
    "shape of a terabyte": {f"{CONFIG}/shape": [1, 4096, 4096]},
    "spec with another class": {"spec/num_classes": 11},
    "frequencies": {CONFIG: add(num_frequencies=3)},
    "a generator called a set": {"artifact/kind": "set"},
}


@pytest.mark.parametrize("name", FORGED_GENERATORS)
def test_a_forged_generator_is_refused_before_it_is_built(folders, tmp_path, name):
    shutil.copytree(folders / "generator", tmp_path / "release")
    forge_release(tmp_path / "release", FORGED_GENERATORS[name])
    with pytest.raises(ReleaseError):
        Release.load(tmp_path / "release")


def make_tensors(labels, count=1):
    return {"labels": torch.tensor(labels).long(), "images": torch.zeros(count, 1, 4, 4)}


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {**tensors, "more": torch.zeros(1)},
        lambda tensors: dict(list(tensors.items())[1:]),
        lambda tensors: {key: value.double() for key, value in tensors.items()},
        lambda tensors: {key: value.half() for key, value in tensors.items()},
        lambda tensors: {key: value[..., None] for key, value in tensors.items()},
        lambda tensors: {f"x{key}": value for key, value in tensors.items()},
        lambda tensors: make_tensors([], 0),
        lambda tensors: make_tensors([3]),
        lambda tensors: make_tensors([-1]),
        lambda tensors: make_tensors([0, 1]),
        lambda tensors: {},
    ],
)
def test_tensors_that_the_manifest_does_not_describe_are_refused(saved, change):
    path = saved / "tensors.safetensors"
    save_file(change(load_file(path)), path)
    forge_release(saved)
    with pytest.raises(ReleaseError):
        Release.load(saved)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_pickle_is_never_opened(saved, monkeypatch):
    monkeypatch.chdir(saved)
    torch.save({"images": Bomb()}, saved / "zip.bin")
    zipped = (saved / "zip.bin").read_bytes()
    for data in (pickle.dumps(Bomb()), pickle.dumps({"images": Bomb()}, 0), zipped):
        (saved / "tensors.safetensors").write_bytes(data)
        forge_release(saved)
        for read in (Release.load, verify):
            with pytest.raises(ReleaseError):
                read(saved)
    assert not (saved / "executed").exists()


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "[" * 100_000,
        '{"format": 2, "files": ' + '{"a":' * 50_000,
        '{"format": ' + "9" * 5000 + "}",
    ],
    ids=["list", "deep list", "deep object", "long number"],
)
def test_a_manifest_that_cannot_be_read_is_refused(saved, text):
    write_manifest(saved, text)
    with pytest.raises(ReleaseError):
        verify(saved)


EXTREME = [
    *({"noise_multiplier": noise} for noise in (5e-324, 1e-200, 1e-30, 1e-3, 1e200, 1.7e308)),
    *({"steps": steps} for steps in (10**3, 10**18, 10**400)),
    *({"sampling": {"kind": "poisson", "sample_rate": rate}} for rate in (5e-324, 1e-30, 1)),
    *(
        {"sampling": {"kind": "fixed", "sample_size": 1, "dataset_size": size}}
        for size in (1, 10**18, 10**400)
    ),
    {"sampling": {"kind": "shards", "num_shards": 10**400}},
]


@pytest.mark.parametrize("numbers", EXTREME, ids=lambda numbers: str(numbers)[:60])
def test_a_plan_of_extreme_numbers_ends_in_a_number_or_a_refusal(
    folders, generator, tmp_path, numbers
):
    """The plan and its event agree, so the accountant has to do its work on them."""
    shutil.copytree(folders / "generator", tmp_path / "release")
    plan = copy.deepcopy(generator.metadata["plan"])
    plan["stages"][0].update(numbers)
    if "poisson" in str(numbers):
        plan["neighbours"] = "add-remove"
    edits = {"plan": plan}
    start = time.perf_counter()
    with contextlib.suppress(PrivotError):  # or there is no such plan
        edits["event"] = str(Plan.from_json(plan).event())
    forge_release(tmp_path / "release", edits)
    with pytest.raises(PrivotError):  # the claim is that of other numbers
        verify(tmp_path / "release")
    assert time.perf_counter() - start < 30


# Random mutations


def check_unharmed(folder, before, weights=False):
    """A mutation that passes has not changed what is claimed, and samples can be drawn."""
    release = Release.load(folder)
    now, claimed = (
        {**asdict(each.guarantee), "max_tpr": None, **each.guarantee.max_tpr}
        for each in (release, before)
    )
    assert now.keys() == claimed.keys()
    for key, value in claimed.items():
        assert now[key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)
    assert release.metadata["event"] == before.metadata["event"]
    artifacts = [each.build_manifest()["artifact"] for each in (release, before)]
    if artifacts[0] != artifacts[1] or release.spec != before.spec or weights:
        images, labels = release.sample(2 * release.spec.num_classes)
        assert images.shape == (len(labels), *release.spec.shape)
        assert images.shape == (2 * before.spec.num_classes, *before.spec.shape)


@pytest.fixture
def nothing_runs(monkeypatch):
    """Whatever could execute foreign code is recorded; it must not even be tried."""
    calls = []
    for name in (
        "pickle.loads",
        "pickle.load",
        "pickle.Unpickler",
        "torch.load",
        "os.system",
        "subprocess.Popen",
    ):
        monkeypatch.setattr(name, lambda *_, name=name, **__: calls.append(name))
    yield
    assert calls == []


# of two kinds of damage to two kinds of release
many = pytest.mark.parametrize("count", [100, pytest.param(2400, marks=pytest.mark.slow)])
HARMLESS = "mutated releases refused, or harmless: no code, no crash, no other claim"


@many
def test_random_bytes_do_no_harm(saved, nothing_runs, count, trust):
    """Two in three are signed again, so that the readers behind the digests see them."""
    draw = random.Random(count)
    before = Release.load(saved)
    whole = read_files(saved)
    num_passed = 0
    for turn in range(count):
        name = draw.choice(FILES)
        (saved / name).write_bytes(corrupt_bytes(whole[name], draw))
        if turn % 3 and name == "tensors.safetensors":
            forge_release(saved)
        elif turn % 3 and name == "manifest.json":
            digest = hashlib.sha256((saved / name).read_bytes()).hexdigest()
            (saved / "manifest.sha256").write_text(digest + "\n")
        with contextlib.suppress(PrivotError):
            verify(saved)
            num_passed += 1
            check_unharmed(saved, before, weights=True)
        for file, data in whole.items():
            (saved / file).write_bytes(data)
    # A changed pixel or weight, signed again, is another release; the rest is refused.
    assert num_passed < count / 2
    trust("R2", HARMLESS, count, of=count)


JUNK = json.loads(
    """[null, true, false, 0, -1, 1, 2, 1.5, -0.0, 1e308, 5e-324, NaN, Infinity, -Infinity,
    1000000000000000000000000000000, "", "x", "0", "replace", "add-remove", "local", "Guarantee",
    "set", "generator", "../x", [], [[]], {}, {"kind": "full"}, [1, 8, 8], ["gaussian", 1.0],
    ["all"], {"a": [null]}]"""
)


def list_paths(value, path=()):
    """Every path into a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, entry in items:
        yield from list_paths(entry, (*path, key))


def edit_at_random(manifest, draw):
    *keys, last = draw.choice(list(list_paths(manifest)))
    holder = manifest
    for key in keys:
        holder = holder[key]
    match draw.randrange(4):
        case 0:
            del holder[last]
        case 1 if isinstance(holder[last], (int, float)):
            holder[last] *= draw.choice((-1, 0.5, 2, 1 + 1e-3, 10))
        case 2 if isinstance(holder, dict):
            key = draw.choice(("x", "kind", "noise_multiplier", "size"))
            holder[key] = draw.choice(JUNK)
        case _:
            holder[last] = copy.deepcopy(draw.choice(JUNK))


@many
def test_random_edits_of_the_manifest_do_no_harm(saved, nothing_runs, count, trust):
    """Edits of JSON values, with digests that fit: refused, or nothing that is claimed changed."""
    draw = random.Random(count)
    before = Release.load(saved)
    original = json.loads((saved / "manifest.json").read_text())
    num_passed = 0
    for _ in range(count):
        manifest = copy.deepcopy(original)
        for _ in range(draw.choice((1, 1, 2))):
            if manifest:
                edit_at_random(manifest, draw)
        write_manifest(saved, json.dumps(manifest))
        with contextlib.suppress(PrivotError):
            verify(saved)
            check_unharmed(saved, before)
            num_passed += 1
    assert 0 < num_passed < 0.7 * count  # seeds, settings and versions are not part of any proof
    trust("R2", HARMLESS, count, of=count)


def test_versions_are_recorded_even_of_what_is_missing(monkeypatch):
    monkeypatch.setattr("privot.synthesis.versions.RECORDED_PACKAGES", ("torch", "no-such-package"))
    assert versions.get_package_versions() == {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "no-such-package": "not installed",
    }


def test_the_folder_may_be_named_in_any_way(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    odd = Path("[red] ünï\nx")
    saved.rename(odd)
    assert verify(str(odd))["digests"] == "ok"
    assert Release.load(odd).sample(1)[0].shape[0] == 1
