"""A killed run resumes: it is charged once, repeats no answer and takes up what it had trained."""

import dataclasses
import itertools

import pytest
import torch
from support.tiny_settings import choose_spec, choose_tiny_settings, make_records, seal_records

from privot.methods import make_method
from privot.nets.ema import EmaTrainer
from privot.privacy import accounting, answers
from privot.privacy import secret_side as secret_side_module
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.release.verify import verify
from privot.runtime import Runtime, Streams
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

GAN = "training generator and critic"
GENERATOR = "training the generator"
AUTOENCODER = "training the autoencoder"
PARTICLES = "moving the particles"
LEARNED = "autoencoder_dim=4 autoencoder_steps=6 autoencoder_batch_size=20"

# Of a stage with up to so many answers all are stored, and a resumed run repeats them from the
# first. Of more answers the public state is saved now and then.
STORED = 16
KILLED = [
    # Settings, where the run is killed, answers until then and in all, steps of the generator that
    # are restored, and the step that the resumed run reports first.
    ("dp-gan", "steps=40", GAN, 25, 25, 40, [16], 40),
    ("merf-ae", "autoencoder_steps=40", AUTOENCODER, 25, 25, 41, [], 40),
    ("merf-ae", "autoencoder_steps=16", AUTOENCODER, 16, 16, 17, [], 16),
    ("dp-sinkhorn", "steps=40", GENERATOR, 25, 25, 40, [24], 40),
    ("federated-average-gan", "rounds=40", GAN, 21, 21, 40, [20], 22),
    ("federated-gs-wgan", "rounds=40", GENERATOR, 7, 7, 40, [6], 8),
    ("gs-wgan", "steps=20 batch_size=2", GENERATOR, 13, 13, 20, [12], 14),
    ("sliced-flow", "mode=resampled steps=30 sample_size=20", PARTICLES, 20, 20, 30, [], 30),
    ("sliced-flow", f"space=public {LEARNED}", PARTICLES, 4, 2, 2, [], 4),
    ("sliced-flow", f"space=private {LEARNED}", PARTICLES, 4, 8, 8, [], 4),
    ("sliced-generator", "steps=50", GENERATOR, 25, 2, 2, [], 25),
    ("sliced-generator", "steps=50 mode=records", GENERATOR, 25, 1, 1, [], 25),
]
# Variants, whose resumption has the same code as a case above.
SLOWLY_KILLED = [
    ("dp-gan", "steps=16", GAN, 16, 16, 16, [], 16),
    ("merf-ae", "autoencoder_steps=40 steps=25", GENERATOR, 25, 41, 41, [], 25),
    ("merf-ae", "autoencoder_steps=16 steps=25", GENERATOR, 25, 17, 17, [], 25),
    ("federated-average-gan", "rounds=16", GAN, 9, 9, 16, [], 1),
    ("federated-gs-wgan", "rounds=12 clients_per_round=2", GENERATOR, 7, 7, 10, [6], 10),
    ("g-pate", "steps=20 batch_size=2", GENERATOR, 13, 13, 20, [12], 14),
    ("sliced-flow", "mode=resampled steps=16 sample_size=20", PARTICLES, 10, 10, 16, [], 10),
    ("sliced-generator", "steps=50 generator=conv", GENERATOR, 25, 2, 2, [], 25),
]


def make_tiny_method(name, words, noise_multiplier):
    settings = choose_tiny_settings(name) | {"noise_multiplier": noise_multiplier}
    if "generator_channels" in settings:
        settings["generator_channels"] = 4
    return make_method(name, settings | dict(word.split("=") for word in words.split()))


@pytest.fixture(autouse=True)
def constant_price(monkeypatch):
    """Prices of sampled answers take seconds."""
    for price in ("compute_privacy_cost", "compute_renyi_cost"):
        monkeypatch.setattr(accounting, price, lambda *_, **__: accounting._gaussian_cost(1.0))


@pytest.fixture
def noise_calls(monkeypatch):
    """One entry for each answer that was computed anew."""
    calls = []
    add_noise = secret_side_module.add_noise
    monkeypatch.setattr(
        secret_side_module, "add_noise", lambda *given: calls.append(1) or add_noise(*given)
    )
    return calls


def watch_restored_steps(monkeypatch):
    """The steps of generators that were restored from a checkpoint."""
    steps = []
    restore = EmaTrainer.restore

    def watched(trainer, state):
        if was_restored := restore(trainer, state):
            steps.append(trainer.steps)
        return was_restored

    monkeypatch.setattr(EmaTrainer, "restore", watched)
    return steps


@pytest.mark.parametrize(
    ("name", "words", "stage", "step", "before", "total", "restored", "resumed_at"),
    [*KILLED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOWLY_KILLED)],
)
def test_a_killed_run_resumes_and_repeats_no_answer(
    tmp_path,
    monkeypatch,
    noise_calls,
    name,
    words,
    stage,
    step,
    before,
    total,
    restored,
    resumed_at,
):
    monkeypatch.setattr(answers, "MAX_STORED_RESULTS", STORED)
    restored_steps = watch_restored_steps(monkeypatch)
    method = make_tiny_method(name, words, 3.0)
    dataset = seal_records(*make_records(), choose_spec(method))
    ledger = Ledger(tmp_path / "tiny.jsonl")
    given = {"out": tmp_path / "out", "ledger": ledger, "runtime": Runtime("cpu", 32)}

    def kill(*where, **facts):
        if where[:2] == (stage, step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(dataset, method, **given, progress=kill)
    assert len(noise_calls) == before
    if restored:
        assert (tmp_path / "out.run" / "samples.png").stat().st_size > 0
    autoencoder = Streams(0, run_folder=tmp_path / "out.run").load_checkpoint("autoencoder")
    shown = []
    changed = {"steps": 30} if name == "sliced-generator" else {}  # no query depends on it
    release = synthesize(
        dataset,
        dataclasses.replace(method, **changed),
        **given,
        resume=True,
        progress=lambda *where, **_: shown.append(where),
    )
    assert len(noise_calls) == total
    assert restored_steps == restored
    assert next(number for name, number, _ in shown if name == stage) == resumed_at
    if restored:  # critics that were warmed up stay so
        assert {name for name, *_ in shown} == {stage}
    if autoencoder is not None and stage != AUTOENCODER:  # stored answers are about this encoder
        trained, released = (
            {key[key.find("decoder.") :]: value for key, value in tensors.items()}
            for tensors in (autoencoder, release.artifact.tensors)
        )
        released = {key: value for key, value in released.items() if key.startswith("decoder.")}
        assert released
        assert all(torch.equal(released[key], trained[key]) for key in released)
    entries = ledger.entries()
    assert [entry["kind"] for entry in entries].count("reserve") == 1
    for planned in method.plan(dataset.spec).stages:
        marks = [
            (entry["first"], entry["last"])
            for entry in entries
            if entry["kind"] == "ask" and entry["stage"] == planned.name
        ]
        assert all(later[0] > earlier[1] for earlier, later in itertools.pairwise(marks))
        assert marks[-1][1] == planned.steps - 1
    assert list(tmp_path.glob("*.vault*")) == []
    assert release.sample(4)[0].isfinite().all()
    verify(tmp_path / "out")


@pytest.mark.usefixtures("array_order")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dp-gan", "steps=8 sample_rate=1"),
        ("dp-sinkhorn", "steps=8 sample_rate=1 clip_unit=record"),
        ("dp-sinkhorn", "steps=8 sample_rate=1 clip_unit=batch"),
        ("federated-average-gan", "rounds=8"),
    ],
)
def test_a_run_whose_answers_are_stored_ends_as_if_it_had_not_been_killed(
    tmp_path, monkeypatch, name, words
):
    method = make_tiny_method(name, words, 0.0)
    dataset = seal_records(*make_records(), choose_spec(method))

    def run(folder, **more):
        given = {"ledger": tmp_path / f"{folder}.jsonl", "runtime": Runtime("cpu", 32)}
        return synthesize(dataset, method, out=tmp_path / folder, **given, **more).artifact.tensors

    run_query = Gate._run_query
    calls = itertools.count(1)

    def die_at_the_fifth(*given, **more):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return run_query(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Gate, "_run_query", die_at_the_fifth)
        with pytest.raises(KeyboardInterrupt):
            run("killed")
    whole = run("whole")
    resumed = run("killed", resume=True)
    assert all(torch.equal(resumed[key], value) for key, value in whole.items())
