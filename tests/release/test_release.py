"""A release on disk: it comes back as it was, every altered byte is noticed, and nothing hostile in it runs, hangs or crashes."""

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


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A generator and a set, saved."""
    root = tmp_path_factory.mktemp("releases")
    synthesize(
        "digits", "merf", 5.0, settings=QUICK, out=root / "generator", ledger=root / "digits.jsonl"
    )
    small_set().save(root / "set")
    return root


def small_set(plan=None):
    plan = plan or Plan((Stage("means", "sum", 4.0, 3),), Neighbours.ADD_REMOVE)
    facts = {"method": "by hand", "plan": plan.to_json(), "event": str(plan.event())}
    images = torch.rand(7, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    product = Artifact.from_images(images, torch.tensor([0, 1, 2, 0, 1, 2, 0], dtype=torch.int32))
    return Release(product, Guarantee.from_plan(plan, 1e-5), Spec((1, 4, 4), 3), facts)


@pytest.fixture(params=["generator", "set"])
def saved(request, folders, tmp_path):
    """One of them, to be spoilt."""
    shutil.copytree(folders / request.param, tmp_path / "release")
    return tmp_path / "release"


def sign(folder, edit=None):
    """Do what a forger does: edit the manifest, then write digests that fit."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {
        "tensors.safetensors": hashlib.sha256(
            (folder / "tensors.safetensors").read_bytes()
        ).hexdigest()
    }
    if edit:
        edit(manifest)
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    (folder / "manifest.sha256").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")


# There and back


def test_a_release_comes_back_as_it_was(saved):
    release = Release.load(saved)
    again = Release.load(release.save(saved.with_name("again")))
    assert again.build_manifest() == release.build_manifest()
    for seed in (0, 1):
        images, labels = release.sample(25, seed=seed)
        assert images.shape == (25, *release.spec.shape)
        assert 0 <= images.min() < images.max() <= 1
        assert labels.tolist() == [place % release.spec.num_classes for place in range(25)]
        assert torch.equal(images, again.sample(25, seed=seed)[0])
    for name in FILES:
        assert (saved / name).read_bytes() == (saved.with_name("again") / name).read_bytes()
    assert sorted(each.name for each in saved.iterdir()) == sorted(FILES)


def test_folders_above_a_release_are_made(tmp_path):
    assert Release.load(small_set().save(tmp_path / "this" / "year" / "out")).spec == Spec(
        (1, 4, 4), 3
    )


def test_seeds_replay_and_differ(folders):
    release = Release.load(folders / "generator")
    one, two, other = (release.sample(10, seed=seed)[0] for seed in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


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
    release = small_set()
    images, labels = release.sample(9)
    own = release.artifact.tensors
    for label in range(3):
        mine = own["images"][own["labels"] == label]
        assert torch.equal(images[labels == label], mine[torch.arange(3) % len(mine)])
    with pytest.raises(ReleaseError, match="class 3"):
        replace(release, spec=Spec((1, 4, 4), 4)).sample(4)


def test_verify_proves_the_claim_again(folders, tmp_path):
    sampled = Plan(
        (Stage("flow", "sum", 2.0, 40, Poisson(0.01)), Stage("means", "sum", 9.0)),
        Neighbours.ADD_REMOVE,
    )
    small_set(sampled).save(tmp_path / "sampled")
    for place in (folders / "generator", folders / "set", tmp_path / "sampled"):
        result = verify(place)
        assert result["digests"] == "ok"
        assert result["epsilon_from_events"] == pytest.approx(
            result["guarantee"]["epsilon"], rel=1e-6
        )
    assert verify(folders / "generator")["guarantee"]["epsilon"] == pytest.approx(5, rel=1e-6)


def test_a_release_without_a_guarantee_says_so(tmp_path):
    synthesize(
        "digits",
        "merf",
        Budget(math.inf),
        settings=QUICK,
        out=tmp_path / "open",
        ledger=tmp_path / "a.jsonl",
    )
    synthesize(
        "digits",
        "merf",
        5.0,
        settings=QUICK,
        out=tmp_path / "seeded",
        ledger=tmp_path / "a.jsonl",
        insecure_seed=1,
    )
    for name in ("open", "seeded"):
        assert isinstance(Release.load(tmp_path / name).guarantee, NoGuarantee)
        result = verify(tmp_path / name)
        assert "epsilon_from_events" not in result
        assert result["guarantee"]["reason"]


def test_a_smaller_spread_draws_less_varied_images_of_the_same_generator(folders):
    release = Release.load(folders / "generator")
    labels = torch.zeros(200, dtype=torch.int64)
    whole, narrow, hardly = (
        release.sample(200, labels, latent_scale=spread)[0].std(0) for spread in (1.0, 0.5, 1e-6)
    )
    assert narrow.mean() < 0.8 * whole.mean()
    assert hardly.max() < 1e-4, "one image a class is left"
    assert torch.equal(release.sample(5)[0], release.sample(5, latent_scale=1.0)[0])
    for place, spread in (
        ("generator", 0.0),
        ("generator", 1.1),
        ("generator", math.nan),
        ("set", 0.5),
    ):
        with pytest.raises(ReleaseError, match="latent_scale"):
            Release.load(folders / place).sample(3, latent_scale=spread)


def test_a_generator_that_diverged_is_not_sampled(folders):
    release = Release.load(folders / "generator")
    for tensor in release.artifact.tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(math.nan)
    with pytest.raises(ReleaseError, match="diverged"):
        release.sample(3)


# Writing


@pytest.mark.parametrize("there", ["folder", "file", "dangling link"])
def test_nothing_is_overwritten(folders, tmp_path, there):
    out = tmp_path / "out"
    {
        "folder": out.mkdir,
        "file": out.touch,
        "dangling link": lambda: out.symlink_to(tmp_path / "nowhere"),
    }[there]()
    with pytest.raises(ReleaseError, match="already exists"):
        Release.load(folders / "generator").save(out)
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    assert not out.is_dir() or not list(out.iterdir())


PLACES = [
    "privot.release.save",
    "pathlib.Path.write_bytes",
    "pathlib.Path.write_text",
    "pathlib.Path.replace",
    "privot.release.json.dumps",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_disk_that_fills_up_leaves_nothing(folders, tmp_path, monkeypatch, place):
    release = Release.load(folders / "generator")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(place, full)
        with pytest.raises(OSError, match="No space"):
            release.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    release.save(tmp_path / "out")
    assert verify(tmp_path / "out")


@pytest.mark.parametrize("place", PLACES)
def test_a_process_that_dies_leaves_no_half_release(folders, tmp_path, monkeypatch, place):
    release = Release.load(folders / "generator")
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(place, lambda *_, **__: os._exit(9))
        try:
            release.save(tmp_path / "out")
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (tmp_path / "out").exists()
    with pytest.raises(ReleaseError):
        Release.load(tmp_path / "out")
    release.save(tmp_path / "out")
    assert verify(tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == [
        "out"
    ]  # what the dead one left is gone too


# Altered bytes


def flipped(folder, name, offsets, generator):
    data = (folder / name).read_bytes()
    missed = []
    for offset in offsets:
        spoilt = bytearray(data)
        spoilt[offset] ^= generator.randrange(1, 256)
        (folder / name).write_bytes(spoilt)
        try:
            verify(folder)
            missed.append((name, offset))
        except ReleaseError:
            pass
    (folder / name).write_bytes(data)
    return missed


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_byte_is_noticed(saved, every):
    generator = random.Random(0)
    for name in ("manifest.json", "manifest.sha256"):
        assert flipped(saved, name, range(0, (saved / name).stat().st_size, every), generator) == []
    size = (saved / "tensors.safetensors").stat().st_size
    ends = {0, 7, 8, size - 1, size // 2}
    assert (
        flipped(
            saved,
            "tensors.safetensors",
            ends | set(generator.sample(range(size), min(size, 250 // every))),
            generator,
        )
        == []
    )
    assert verify(saved)


@pytest.mark.parametrize("ending", [b"\r", b"\r\n", b"", b"\n\n", b"\n "])
def test_not_even_the_end_of_a_line_may_change(saved, ending):
    path = saved / "manifest.sha256"
    path.write_bytes(path.read_bytes()[:-1] + ending)
    with pytest.raises(ReleaseError, match="digest"):
        verify(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_misplaced_file_is_noticed(saved, name):
    whole = (saved / name).read_bytes()
    (saved / name).unlink()
    for put in (
        lambda path: None,
        lambda path: path.mkdir(),
        lambda path: (path.rmdir(), path.touch()),
    ):
        put(saved / name)
        with pytest.raises(ReleaseError):
            verify(saved)
    (saved / name).write_bytes(whole)
    assert verify(saved)


def test_what_is_no_release(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        for look in (Release.load, verify):
            with pytest.raises(ReleaseError, match="not a valid release"):
                look(place)


# Forged manifests, with digests that fit


def put(*path):
    """An edit: all but the last are keys, the last is the value."""
    *keys, last, value = path

    def edit(manifest):
        for key in keys:
            manifest = manifest[key]
        manifest[last] = value(manifest[last]) if callable(value) else value

    return edit


def both(*edits):
    return lambda manifest: [edit(manifest) for edit in edits]


STAGE = ("plan", "stages", 0)
FORGED = {
    "epsilon halved": put("guarantee", "epsilon", lambda value: value / 2),
    "epsilon as text": put("guarantee", "epsilon", "0.1"),
    "epsilon nan": put("guarantee", "epsilon", math.nan),
    "epsilon missing": lambda manifest: manifest["guarantee"].pop("epsilon"),
    "delta smaller": put("guarantee", "delta", 1e-9),
    "delta zero": put("guarantee", "delta", 0),
    "delta negative": put("guarantee", "delta", -1),
    "delta above one": put("guarantee", "delta", 2.0),
    "delta nan": put("guarantee", "delta", math.nan),
    "delta a list": put("guarantee", "delta", [1e-5]),
    "attack power halved": put("guarantee", "max_tpr", "0.01", lambda value: value / 2),
    "attack power at one more rate": put(
        "guarantee", "max_tpr", lambda value: {**value, "0.5": 0.5}
    ),
    "attack power of nothing": put("guarantee", "max_tpr", lambda value: {**value, "x": None}),
    "attack power that poses as the epsilon": lambda manifest: (
        manifest["guarantee"]["max_tpr"].update(epsilon=manifest["guarantee"]["epsilon"]),
        manifest["guarantee"].update(epsilon=0.1),
    ),
    "attack power left out": put("guarantee", "max_tpr", lambda value: {"0.01": value["0.01"]}),
    "attack power a list": put("guarantee", "max_tpr", []),
    "attack power as text": put("guarantee", "max_tpr", "0.01", "small"),
    "neighbours of the claim": put("guarantee", "neighbours", "local"),
    "unit of the claim": put("guarantee", "unit", "one person with all their records"),
    "accountant of the claim": put("guarantee", "accountant", "a kind one"),
    "second opinion of the claim": put("guarantee", "renyi_epsilon", 0.1),
    "kind of claim": put("guarantee", "kind", "Better"),
    "one more field in the claim": lambda manifest: manifest["guarantee"].update(certified=True),
    "neighbours of the plan": put("plan", "neighbours", "local"),
    "neighbours unknown": put("plan", "neighbours", "nobody"),
    "noise of the plan": put(*STAGE, "noise_multiplier", lambda value: value * 2),
    "noise negative": put(*STAGE, "noise_multiplier", -1.0),
    "noise infinite": put(*STAGE, "noise_multiplier", math.inf),
    "steps of the plan": put(*STAGE, "steps", 5),
    "steps a fraction": put(*STAGE, "steps", 1.5),
    "sampling of the plan": put(*STAGE, "sampling", {"kind": "poisson", "sample_rate": 0.5}),
    "sampling unknown": put(*STAGE, "sampling", {"kind": "lucky"}),
    "no stages": put("plan", "stages", []),
    "no plan": put("plan", None),
    "event": put("event", "GaussianDpEvent(noise_multiplier=100.0)"),
    "event missing": lambda manifest: manifest.pop("event"),
    "event empty": put("event", []),
    "event and plan": both(
        put(*STAGE, "noise_multiplier", 50.0),
        put("event", "GaussianDpEvent(noise_multiplier=50.0)"),
    ),
    "event and plan without noise": both(
        put(*STAGE, "noise_multiplier", 0), put("event", "NonPrivateDpEvent()")
    ),
    "spec with a class less": put("spec", "num_classes", lambda value: value - 1),
    "spec with classes as a fraction": put("spec", "num_classes", float),
    "spec with a larger shape": put("spec", "shape", [1, 16, 16]),
    "spec with an absurd shape": put("spec", "shape", [1, 10**9, 10**9]),
    "spec as text": put("spec", "anything"),
    "kind of artifact": put("artifact", "kind", "program"),
    "no artifact": put("artifact", None),
    "format of tomorrow": put("format", 3),
    "a manifest that is a list": None,
    "files that leave the folder": put("files", {"../release/tensors.safetensors": "0" * 64}),
    "files that climb": lambda manifest: manifest["files"].update(
        {"../manifest.json": manifest["files"]["tensors.safetensors"]}
    ),
    "files by an absolute path": put("files", {"/etc/passwd": "0" * 64}),
    "files that are folders": put("files", {"..": "0" * 64}),
    "files with an empty name": put("files", {"": "0" * 64}),
    "files without the tensors": put("files", {}),
    "files as a list": put("files", ["tensors.safetensors"]),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_refused_though_its_digests_fit(saved, name):
    if FORGED[name] is None:
        (saved / "manifest.json").write_text("[1]")
        (saved / "manifest.sha256").write_text(hashlib.sha256(b"[1]").hexdigest() + "\n")
    else:
        sign(saved, FORGED[name])
    with pytest.raises(PrivotError):
        verify(saved)


GENERATOR = {
    "generator unknown": put("artifact", "generator_class", "os.system"),
    "generator not hashable": put("artifact", "generator_class", ["ConvGenerator"]),
    "arguments unknown": put("artifact", "generator_config", {"command": "rm"}),
    "no arguments": put("artifact", "generator_config", None),
    "hidden layer of a terabyte": put("artifact", "generator_config", "hidden_dim", 10**11),
    "hidden layer beyond all": put("artifact", "generator_config", "hidden_dim", 10**30),
    "hidden layer as text": put("artifact", "generator_config", "hidden_dim", "200"),
    "latent longer": put("artifact", "generator_config", "latent_dim", 6),
    "latent for classes": both(
        put("artifact", "generator_config", "latent_dim", 6),
        put("artifact", "generator_config", "classes", 9),
    ),
    "shape of another size": put("artifact", "generator_config", "shape", [1, 7, 7]),
    "shape of a terabyte": put("artifact", "generator_config", "shape", [1, 4096, 4096]),
    "spec with another class": put("spec", "num_classes", 11),
    "frequencies": put("artifact", "generator_config", "num_frequencies", 3),
    "a generator called a set": put("artifact", "kind", "set"),
}


@pytest.mark.parametrize("name", GENERATOR)
def test_a_forged_generator_is_refused_before_it_is_built(folders, tmp_path, name):
    shutil.copytree(folders / "generator", tmp_path / "release")
    sign(tmp_path / "release", GENERATOR[name])
    with pytest.raises(ReleaseError):
        Release.load(tmp_path / "release")


def tensors_of(folder, change):
    tensors = load_file(folder / "tensors.safetensors")
    save_file(change(dict(tensors)), folder / "tensors.safetensors")
    sign(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: {**found, "more": torch.zeros(1)},
        lambda found: dict(list(found.items())[1:]),
        lambda found: {key: value.double() for key, value in found.items()},
        lambda found: {key: value.half() for key, value in found.items()},
        lambda found: {key: value[..., None] for key, value in found.items()},
        lambda found: {f"x{key}": value for key, value in found.items()},
        lambda found: {
            "labels": torch.zeros(0, dtype=torch.int64),
            "images": torch.zeros(0, 1, 4, 4),
        },
        lambda found: {"labels": torch.tensor([3]), "images": torch.zeros(1, 1, 4, 4)},
        lambda found: {"labels": torch.tensor([-1]), "images": torch.zeros(1, 1, 4, 4)},
        lambda found: {"labels": torch.tensor([0, 1]), "images": torch.zeros(1, 1, 4, 4)},
        lambda found: {},
    ],
)
def test_tensors_that_the_manifest_does_not_describe_are_refused(saved, change):
    tensors_of(saved, change)
    with pytest.raises(ReleaseError):
        Release.load(saved)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_pickle_is_never_opened(saved, monkeypatch):
    monkeypatch.chdir(saved)
    torch.save({"images": Bomb()}, saved / "zip.bin")
    for data in (
        pickle.dumps(Bomb()),
        pickle.dumps({"images": Bomb()}, 0),
        (saved / "zip.bin").read_bytes(),
    ):
        (saved / "tensors.safetensors").write_bytes(data)
        sign(saved)
        for look in (Release.load, verify):
            with pytest.raises(ReleaseError):
                look(saved)
    assert not (saved / "executed").exists()


def test_a_manifest_too_deep_to_read_is_refused(saved):
    for text in (
        "[" * 100_000,
        '{"format": 2, "files": ' + '{"a":' * 50_000,
        '{"format": ' + "9" * 5000 + "}",
    ):
        (saved / "manifest.json").write_text(text)
        (saved / "manifest.sha256").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
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
def test_a_plan_of_extreme_numbers_ends_in_a_number_or_a_refusal(folders, tmp_path, numbers):
    """The plan and its event agree, so the accountant has to do its work on them."""
    shutil.copytree(folders / "generator", tmp_path / "release")

    def edit(manifest):
        stage = manifest["plan"]["stages"][0]
        stage.update(numbers)
        if "poisson" in str(numbers):
            manifest["plan"]["neighbours"] = "add-remove"
        with contextlib.suppress(PrivotError):  # or there is no such plan
            manifest["event"] = str(Plan.from_json(manifest["plan"]).event())

    start = time.perf_counter()
    sign(tmp_path / "release", edit)
    with pytest.raises(PrivotError):  # the claim is that of other numbers
        verify(tmp_path / "release")
    assert time.perf_counter() - start < 30


# Random mutations


def unharmed(folder, before, weights=False):
    """What a mutation that passes must not have changed: what is claimed, and that samples can be drawn."""
    release = Release.load(folder)
    now, then = (
        {**asdict(each.guarantee), "max_tpr": None, **each.guarantee.max_tpr}
        for each in (release, before)
    )
    assert now.keys() == then.keys()
    for key, value in then.items():
        assert now[key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)
    assert release.metadata["event"] == before.metadata["event"]
    if (
        release.build_manifest()["artifact"] == before.build_manifest()["artifact"]
        and release.spec == before.spec
        and not weights
    ):
        return
    images, labels = release.sample(2 * release.spec.num_classes)
    assert (
        images.shape
        == (len(labels), *release.spec.shape)
        == (2 * before.spec.num_classes, *before.spec.shape)
    )


@pytest.fixture
def nothing_runs(monkeypatch):
    """Whatever could execute foreign code is recorded; it must not even be tried."""
    tried = []
    for place in (
        "pickle.loads",
        "pickle.load",
        "pickle.Unpickler",
        "torch.load",
        "os.system",
        "subprocess.Popen",
    ):
        monkeypatch.setattr(place, lambda *_, place=place, **__: tried.append(place))
    yield
    assert tried == []


MANY = pytest.mark.parametrize(
    "count", [100, pytest.param(2400, marks=pytest.mark.slow)]
)  # of two kinds of damage to two kinds of release


@MANY
def test_random_bytes_do_no_harm(saved, nothing_runs, count, trust):
    """Mutations of each kind of release; two in three are signed again, so that the readers behind the digests see them."""
    generator = random.Random(count)
    before = Release.load(saved)
    whole = {name: (saved / name).read_bytes() for name in FILES}
    passed = 0
    for turn in range(count):
        name = generator.choice(FILES)
        (saved / name).write_bytes(corrupt_bytes(whole[name], generator))
        if turn % 3:
            text = (saved / "manifest.json").read_bytes()
            if name == "tensors.safetensors":
                sign(saved)
            elif name == "manifest.json":
                (saved / "manifest.sha256").write_text(hashlib.sha256(text).hexdigest() + "\n")
        try:
            verify(saved)
            passed += 1
            unharmed(saved, before, weights=True)
        except PrivotError:
            pass
        for each, data in whole.items():
            (saved / each).write_bytes(data)
    assert (
        passed < count / 2
    )  # a changed pixel or weight, signed again, is another release; the rest is refused
    trust(
        "R2",
        "mutated releases refused, or harmless: no code, no crash, no other claim",
        count,
        of=count,
    )


JUNK = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    1.5,
    -0.0,
    1e308,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
    10**30,
    "",
    "x",
    "0",
    "replace",
    "add-remove",
    "local",
    "Guarantee",
    "set",
    "generator",
    "../x",
    [],
    [[]],
    {},
    {"kind": "full"},
    [1, 8, 8],
    ["gaussian", 1.0],
    ["all"],
    {"a": [None]},
]


def everywhere(value, path=()):
    """Every place in a JSON value."""
    if path:
        yield path
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inside:
        yield from everywhere(each, (*path, key))


@MANY
def test_random_edits_of_the_manifest_do_no_harm(saved, nothing_runs, count, trust):
    """Edits of JSON values, with digests that fit: each is refused, or touches nothing that is claimed."""
    generator = random.Random(count)
    before = Release.load(saved)
    original = json.loads((saved / "manifest.json").read_text())
    passed = 0
    for _ in range(count):
        manifest = copy.deepcopy(original)
        for _ in range(generator.choice((1, 1, 2))):
            *keys, last = generator.choice(list(everywhere(manifest)))
            holder = manifest
            for key in keys:
                holder = holder[key]
            match generator.randrange(4):
                case 0:
                    del holder[last]
                case 1 if isinstance(holder[last], (int, float)):
                    holder[last] *= generator.choice((-1, 0.5, 2, 1 + 1e-3, 10))
                case 2 if isinstance(holder, dict):
                    holder[generator.choice(("x", "kind", "noise_multiplier", "size"))] = (
                        generator.choice(JUNK)
                    )
                case _:
                    holder[last] = copy.deepcopy(generator.choice(JUNK))
            if not manifest:
                break
        text = json.dumps(manifest)
        (saved / "manifest.json").write_text(text)
        (saved / "manifest.sha256").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
        try:
            verify(saved)
            unharmed(saved, before)
            passed += 1
        except PrivotError:
            pass
    assert 0 < passed < 0.7 * count  # seeds, settings and versions are not part of any proof
    trust(
        "R2",
        "mutated releases refused, or harmless: no code, no crash, no other claim",
        count,
        of=count,
    )


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
