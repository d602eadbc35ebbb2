"""What every method promises by being in the folder: found by listing it, so a new one is held to this without an edit."""

import dataclasses
import functools
import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from contract.record_replay import run, watched
from support.tiny_settings import (
    NUM_CLASSES,
    SHAPE,
    choose_epsilon,
    choose_spec,
    choose_tiny_settings,
    has_no_mechanism,
    is_local,
    make_method_input,
    make_records,
    seal_records,
)

import privot.baselines
import privot.methods
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import BudgetError, SettingError
from privot.methods import list_methods, make_method
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget, Plan
from privot.release import Release
from privot.release.verify import verify
from privot.runtime import Runtime, Streams
from privot.synthesis import synthesize
from privot.synthesis.preflight import resolve_plan

HEADINGS = ("Released", "Bound", "Cost", "Departs", "Notation")
DOCS = Path(__file__).parents[2] / "docs" / "methods"

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")
every_method = pytest.mark.parametrize("name", sorted(list_methods()))


# Names of files, where they are not the name of the method.
FILES = {
    "federated-average-gan": "fedavg_gan",
    "kernel-points": "kip",
    "merf": "dp_merf",
    "merf-ae": "dp_merf_ae",
    "real-subset": "random_subset",
}


def test_a_method_is_a_file():
    files = {
        package.__name__: {module.name for module in pkgutil.iter_modules(package.__path__)}
        for package in (privot.methods, privot.baselines)
    }
    found = {folder: set() for folder in files}
    for name, kind in list_methods().items():
        folder, _, file = kind.__module__.rpartition(".")
        found[folder].add(file)
        assert file == FILES.get(name, name.replace("-", "_"))
    assert found["privot.methods"] == files["privot.methods"]
    without = files["privot.baselines"] - found["privot.baselines"]  # what baselines share
    assert not any(
        hasattr(importlib.import_module(f"privot.baselines.{file}"), "METHOD") for file in without
    )


@every_method
def test_frozen_settings(name):
    kind = list_methods()[name]
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    first = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kind(), first, None)
    with pytest.raises(TypeError):
        kind(1)  # settings have names: an order of them would be one more thing to keep


@every_method
def test_facts_about_itself(name):
    kind = list_methods()[name]
    for fact in ("name", "title", "trusted_party", "guarantee_summary"):
        text = getattr(kind, fact)
        assert isinstance(text, str)
        assert text
        assert "\n" not in text
        assert fact not in {each.name for each in dataclasses.fields(kind)}
    assert list(inspect.signature(kind.plan).parameters) == ["self", "spec"]
    assert list(inspect.signature(kind.fit).parameters) == ["self", "gate", "streams", "progress"]


@every_method
def test_docstring_has_its_headings(name):
    text = importlib.import_module(list_methods()[name].__module__).__doc__
    found = re.findall(r"^\*\*(\w+)\*\*", text, re.MULTILINE)
    assert tuple(found) == HEADINGS
    for part in re.split(r"^\*\*\w+\*\*", text, flags=re.MULTILINE)[1:]:
        assert part.strip()


@every_method
def test_citation_is_bibtex(name):
    text = list_methods()[name].citation
    for entry in re.split(r"\n(?=@)", text.strip()):
        assert re.match(r"@\w+\{[^\s,{}]+,\n", entry)
        assert entry.count("{") == entry.count("}")
        assert entry.endswith("}")
        for field in ("title", "author", "year"):
            # A long value goes over several lines.
            assert re.search(rf"^\s*{field}\s*=\s*\{{[^=]+\}},?$", entry, re.MULTILINE), field


@every_method
def test_a_page_carries_the_argument(name):
    assert (DOCS / f"{name}.md").is_file()


@every_method
def test_settings_make_the_round_trip(name):
    for method in (make_method(name), make_method(name, choose_tiny_settings(name))):
        settings = dataclasses.asdict(method)
        assert make_method(name, settings) == method
        assert make_method(name, json.loads(json.dumps(settings))) == method  # through a manifest
        words = {
            key: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for key, value in settings.items()
        }
        assert make_method(name, words) == method  # through a command line


@every_method
def test_an_unknown_setting_is_an_error(name):
    known = dataclasses.fields(list_methods()[name])[0].name
    with pytest.raises(SettingError, match=f"did you mean '{known}'"):
        make_method(name, {known + "s": 1})


@every_method
def test_planning_reads_nothing(name, monkeypatch):
    method = make_method(name, choose_tiny_settings(name))
    spec = choose_spec(method)
    first = method.plan(spec)
    method.forecast(spec, first)  # what is imported at the first use is read here

    def never(*args, **more):
        raise AssertionError("a record was touched")

    for way in ("_read_records", "_count_records", "_shard_record_indices"):
        monkeypatch.setattr(Sensitive, way, never)
    monkeypatch.setattr("builtins.open", never)
    with watched() as events:
        plan = method.plan(spec)
        forecast = method.forecast(spec, plan)
    assert events == []
    assert plan == first
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    json.dumps(forecast)


@every_method
def test_the_plan_fits_its_budget(name):
    method = make_method(
        name,
        {
            key: value
            for key, value in choose_tiny_settings(name).items()
            if key != "noise_multiplier"
        },
    )
    if is_local(method):
        pytest.skip("its clients have their own")
    if has_no_mechanism(method):
        with pytest.raises(SettingError, match="cannot stay within a budget"):
            resolve_plan(choose_spec(method), method, Budget(2.0))
        return
    plan, wall = resolve_plan(choose_spec(method), method, Budget(2.0))
    assert 1.98 < plan.cost().epsilon(wall.delta) <= 2.0


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Of a method by name, made once: (release, its folder, its ledger, what the progress was told)."""

    @functools.cache
    def of(name):
        folder = tmp_path_factory.mktemp(name)
        method = make_method(name, choose_tiny_settings(name))
        ledger = Ledger(folder / "tiny.jsonl")
        shown = []

        def progress(stage, step, of, **facts):
            shown.append((stage, step, of, facts))

        ways = {
            "out": folder / "out",
            "ledger": ledger,
            "progress": progress,
            "runtime": Runtime("cpu"),
        }
        return (
            synthesize(
                make_method_input(method, *make_records(), choose_spec(method)),
                method,
                choose_epsilon(method),
                **ways,
            ),
            folder,
            ledger,
            shown,
        )

    return of


@every_method
def test_a_release_from_end_to_end(name, released):
    method = make_method(name, choose_tiny_settings(name))
    made, folder, ledger, shown = released(name)
    proved = verify(folder / "out")
    read = Release.load(folder / "out")
    assert not (folder / "out.run").exists()
    images, labels = made.sample(2 * NUM_CLASSES)
    again, same = read.sample(2 * NUM_CLASSES)
    assert images.shape == (2 * NUM_CLASSES, *SHAPE)
    assert torch.equal(images, again)
    assert torch.equal(labels, same)
    assert sorted(set(labels.tolist())) == list(range(NUM_CLASSES))
    assert images.isfinite().all()
    assert 0 <= images.min() <= images.max() <= 1
    assert read.guarantee == made.guarantee
    assert read.metadata["settings"] == json.loads(json.dumps(dataclasses.asdict(method)))
    stages = method.plan(choose_spec(method)).stages
    if isinstance(made.guarantee, Guarantee):
        assert proved["epsilon_from_events"] == pytest.approx(made.guarantee.epsilon)
        assert ledger.compute_spent_cost().epsilon(1e-5) == pytest.approx(
            0.0 if is_local(method) else made.guarantee.epsilon
        )
        assert all(facts["epsilon"] <= made.guarantee.epsilon * (1 + 1e-9) for *_, facts in shown)
    else:
        assert isinstance(made.guarantee, NoGuarantee)
        assert not stages
        assert made.guarantee.reason
    assert shown
    assert all(0 <= step <= of for _, step, of, _ in shown)


@every_method
def test_one_more_run_is_one_more_charge(name, released):
    method = make_method(name, choose_tiny_settings(name))
    if not method.plan(spec := choose_spec(method)).stages:
        pytest.skip("no mechanism")
    ledger = Ledger(released(name)[2].path)
    once = ledger.compute_spent_cost().epsilon(1e-5)
    ledger.set_limit(Budget(once * 1.01))
    lines = ledger.entries()
    with pytest.raises(BudgetError):
        synthesize(
            seal_records(*make_records(), spec),
            method,
            choose_epsilon(method),
            ledger=ledger,
            runtime=Runtime("cpu"),
        )
    assert ledger.entries() == lines


@every_method
def test_the_public_half_replays(name, tmp_path):
    # On one machine, given the same answers: three runs, bit by bit the same release, however often the clock lets them keep what they
    # have come to. (The side doors replay it on twelve more data sets.)
    method = make_method(name, choose_tiny_settings(name))
    spec = choose_spec(method)
    if not method.plan(spec).stages:
        pytest.skip("no mechanism")
    first = run(method, *make_records(), spec, tmp_path / "run")
    for due in (True, False):
        with mock.patch.object(Streams, "is_checkpoint_due", lambda *_, due=due: due):
            again = run(method, *make_records(), spec, tmp_path / "run", results=first.results)
        assert again.release == first.release
        assert first.release
    other = run(method, *make_records(), spec, tmp_path / "run")
    assert (
        other.release != first.release
    )  # the noise is in it: without the answers nobody can replay a run


def test_methods_are_plain_about_wrong_names():
    with pytest.raises(SettingError, match="did you mean 'merf'"):
        make_method("mref")
    with pytest.raises(SettingError):
        resolve_plan(Spec(SHAPE, NUM_CLASSES), make_method("merf"), None)


@every_method
def test_declared_class_sizes_are_used(name, tmp_path):
    """A run with declared sizes must not fail after it was paid for."""
    images, labels = make_records()
    sizes = tuple(int((labels == each).sum()) for each in range(NUM_CLASSES))
    method = make_method(name, choose_tiny_settings(name))
    box = make_method_input(
        method,
        images,
        labels,
        dataclasses.replace(choose_spec(method), size=len(labels), class_sizes=sizes),
    )
    release = synthesize(box, method, choose_epsilon(method), ledger=tmp_path / "book.jsonl")
    assert release.sample(NUM_CLASSES)[0].isfinite().all()
