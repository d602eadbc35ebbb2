"""What a server's record reveals: answers no more than the mean image, raw gradients the images."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.seeding import seed_generator

from privot.attacks.inversion import transcript_result as tiers
from privot.attacks.inversion.simulated_clients import simulate_clients
from privot.attacks.inversion.transcript import read_client_transcript
from privot.attacks.inversion.transcript_attack import TranscriptAttack
from privot.attacks.inversion.transcript_statistics import clip_input_gradients
from privot.cli.invert_transcript import load_builtin_partition
from privot.components.client_critics import build_shared_init_rng
from privot.data import load_dataset
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import DataError, SettingError
from privot.federated.client import Client
from privot.federated.messages import Answer, Terms, pack_message, unpack_message
from privot.federated.server import Server
from privot.federated.transcript import RECEIVED_FROM_CLIENT, TranscriptWriter, read_transcript
from privot.methods import make_method
from privot.nets.functional_critic import Critic
from privot.privacy.client_partition import load_client_order
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import ledger_path
from privot.privacy.plan import Budget
from privot.runtime import Runtime, Streams

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 8, 8)
CLASSES = 10
CPU = Runtime("cpu")
RUN = "0123456789abcdef" * 2
NAME = "ward 0"
# A client of one record a class, whose critic trains for long: nobody is easier to invert.
TINY = {
    "rounds": 4,
    "critic_steps": 20,
    "warmup_rounds": 2,
    "critic_batch_size": 10,
    "critic_learning_rate": 8e-3,
    "critic_channels": 4,
    "frequency_fraction": 1.0,
    "generator_channels": 4,
    "latent_dim": 4,
    "records_per_critic": 10,
}


def select_one_of_each():
    records = load_dataset("digits")._read_records(slice(None))
    which = [int((records.labels == label).nonzero()[3]) for label in range(CLASSES)]
    images, labels = (part[which].numpy() for part in records)
    return Sensitive(images, labels, Spec(SHAPE, CLASSES), name=NAME)


def record_run(folder, noise=None, **settings):
    """The record of a run with one client, at an epsilon of 60 unless the noise is given."""
    settings = {**TINY, **settings}
    if noise is None:
        plan = make_method("federated-gs-wgan", settings).plan(Spec(SHAPE, CLASSES, num_clients=1))
        noise = plan.calibrate(Budget(60.0, 1.15e-3)).stages[0].noise_multiplier
    method = make_method("federated-gs-wgan", settings | {"noise_multiplier": noise})
    ledger = Ledger(folder / "x.jsonl")
    client = Client(select_one_of_each(), Budget(math.inf), ledger, folder / "run", CPU)
    terms = Terms(RUN, method, SHAPE, CLASSES, 1)
    server = Server(terms, [NAME], Streams(0, CPU), transcript_path=folder / "wire")
    server.receive_consent(NAME, client.reply(server.pack_offers()[NAME]))
    while not server.is_finished:
        server.receive(NAME, client.reply(server.pack_requests()[NAME]))
        server.end_round()
    server.build_release()
    return folder / "wire"


def run_attack(record, **settings):
    transcript = read_client_transcript(record)
    holdout = load_dataset("digits", "test")
    return TranscriptAttack(**settings).run(transcript, select_one_of_each(), holdout, CPU)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("wire"))


@pytest.fixture(scope="module")
def transcript(record):
    return read_client_transcript(record)


@pytest.fixture(scope="module")
def result(record):
    return run_attack(record, num_simulated_clients=25, num_checked=2)


def test_a_record_is_read_as_it_was_sent(record, transcript):
    messages = [
        entry.message
        for entry in read_transcript(record)
        if entry.direction == RECEIVED_FROM_CLIENT
    ]
    answers = [answer for answer in map(unpack_message, messages) if isinstance(answer, Answer)]
    assert (transcript.client_name, len(answers)) == (NAME, TINY["rounds"])
    gradients = torch.stack([answer.gradients for answer in answers])
    assert torch.equal(transcript.values, gradients)
    assert transcript.images.shape == (TINY["rounds"], CLASSES, 1, *SHAPE)
    assert transcript.traffic_bytes[1] == sum(map(len, messages))


def test_raw_gradients_give_images_back(result, trust):
    """Before clip and noise, as in plain federated learning: the attack is no weak one."""
    raw = result.tiers[tiers.RAW_WEIGHT_GRADIENT]
    assert raw["psnr"] >= 20
    assert raw["leak_rate"] == 1
    mean = result.tiers[tiers.MEAN_IMAGE]["psnr"]
    assert result.tiers[tiers.RAW_INPUT_GRADIENT]["psnr"] >= mean + 4
    trust("F3", "dB of images from raw gradients", round(raw["psnr"], 1))


def test_answers_as_shipped_give_no_more_than_the_mean_image(result, trust):
    assert result.psnr_gain <= tiers.MIN_PSNR_GAIN
    for attack in (tiers.SUMMED_GRADIENTS, tiers.LINEAR_ESTIMATE):
        assert result.tiers[attack]["psnr"] <= result.tiers[tiers.MEAN_IMAGE]["psnr"] + 1
        assert result.tiers[attack]["leak_rate"] == 0
    assert "no proof" in result.summary
    assert result.publishable is False
    assert result.stack_snapshots().shape == (6, 2, *SHAPE)
    assert len(result.list_column_titles()) == 6
    trust("F3", "dB beyond the mean image from answers as shipped", round(result.psnr_gain, 2))


@pytest.mark.slow
def test_a_client_without_noise_is_caught(tmp_path):
    """A planted bug: gradients of norm 1, but next to nothing added."""
    record = record_run(tmp_path, noise=1e-3, rounds=3)
    result = run_attack(record, num_simulated_clients=25, num_checked=1)
    assert result.psnr_gain > 3
    assert "these gradients leak" in result.summary


# Simulated clients


def simulate(transcript, terms=None, count=1, rounds=1, seed=0):
    """Of the same records, in the first rounds: gradients and the last state."""
    own = select_one_of_each()._read_records(slice(None))
    images = own.images[None].expand(count, -1, -1, -1, -1)
    labels = own.labels.expand(count, -1)
    terms = terms or transcript.terms
    return simulate_clients(terms, transcript.images[:rounds], images, labels, seed_generator(seed))


def change_settings(terms, **changes):
    return replace(terms, settings=replace(terms.settings, **changes))


def test_simulated_clients_answer_as_a_client_does_with_draws_of_their_own(transcript):
    """So that what an attacker learns from many is not the luck of one."""
    gradients = [simulate(transcript, rounds=2, seed=seed)[0][0] for seed in (0, 1)]
    one, two = (clip_input_gradients(transcript.terms, rows)[-1] for rows in gradients)
    assert not torch.equal(one, two)
    assert torch.allclose(one.flatten(2).norm(dim=2), torch.ones(CLASSES, 1), atol=1e-3)
    assert torch.cosine_similarity(one.flatten(2), two.flatten(2), 2).mean() > 0.7
    together, _ = simulate(transcript, count=2)
    one, two = clip_input_gradients(transcript.terms, together)[:, 0]
    assert not torch.allclose(one, two, atol=1e-3)


def test_simulated_clients_augment_as_clients_do(transcript, monkeypatch):
    moving = change_settings(transcript.terms, max_shift=1)
    same, _ = simulate(transcript)
    still, _ = simulate(transcript, moving)  # 8 pixels are too few to be moved
    monkeypatch.setattr(
        "privot.attacks.inversion.simulated_clients.limit_shift", lambda shift, shape: shift
    )
    moved, _ = simulate(transcript, moving)
    assert torch.equal(same, still)
    assert not torch.equal(moved, still)
    assert moved.isfinite().all()


def test_simulated_clients_start_where_clients_start(transcript):
    """The first weights of a critic are public: a simulation differs by its draws alone."""
    frozen = {"critic_learning_rate": 1e-30, "warmup_rounds": 0, "critic_steps": 1}
    terms = change_settings(transcript.terms, **frozen)
    critic = Critic(SHAPE, CLASSES, TINY["critic_channels"])
    first, _ = critic.init_weights(1, build_shared_init_rng())
    for seed in range(2):
        _, state = simulate(transcript, terms, count=2, seed=seed)
        assert torch.allclose(state["weights"], first.expand(2, -1), rtol=0, atol=1e-20)


# What else may be in a record


def test_lies_in_a_record_are_ignored(record, transcript, tmp_path):
    path = tmp_path / "wire"
    path.write_bytes(record.read_bytes())
    gradients = transcript.values[1]
    with TranscriptWriter(path) as more:
        more.record_received(NAME, b"no message")
        for run, number in ((RUN, 0), (RUN, 9), ("f" * 32, 1)):  # answered, not asked, another run
            more.record_received(NAME, pack_message(Answer(run, number, gradients)))
        more.record_sent("ward 1", b"")
    assert torch.equal(read_client_transcript(path).values, transcript.values)


def test_a_record_with_nothing_of_the_client_is_refused(record, transcript, tmp_path):
    with pytest.raises(DataError, match=r"no answer of nobody.* messages of ward 0"):
        read_client_transcript(record, "nobody")
    TranscriptWriter(tmp_path / "empty").close()
    with pytest.raises(DataError, match="no answer of any client"):
        read_client_transcript(tmp_path / "empty")
    other = Sensitive(np.zeros((4, 1, 4, 4)), np.zeros(4, int), Spec((1, 4, 4), 10))
    with pytest.raises(DataError, match="Give the records that were used in the run"):
        TranscriptAttack().run(transcript, other, load_dataset("digits"))


@pytest.mark.parametrize(
    "wrong",
    [{"num_simulated_clients": 4}, {"num_images": 0}, {"num_checked": 0}, {"attack": "dgl"}],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(SettingError):
        TranscriptAttack(**wrong)


# The command line


def test_the_verb_reads_a_record(privot, tmp_path):
    (folder := tmp_path / "run").mkdir()
    record = record_run(folder, rounds=1, critic_steps=1)
    images, labels = select_one_of_each()._read_records(slice(None))
    np.savez(tmp_path / "own.npz", images=images.numpy(), labels=labels.numpy())
    words = ("invert", "--data", "own.npz", "--transcript", record, "--shadows", 5, "--checked", 1)
    code, _, err = privot(*words)
    assert (code, "--holdout" in err) == (2, True)
    code, out, err = privot(*words, "--holdout", "digits", "--out", "out")
    assert (code, "for the data owner alone" in " ".join(err.split())) == (0, True)
    shown = " ".join(out.split())
    assert "no attack exceeds the mean image by 1 dB" in shown
    assert "bytes to ward 0" in shown
    for tier in (tiers.MEAN_IMAGE, tiers.LINEAR_ESTIMATE, tiers.RAW_WEIGHT_GRADIENT):
        assert tier in shown
    facts = json.loads((tmp_path / "out" / "inversion.json").read_text())
    assert facts["psnr_gain"] <= 1
    assert facts["publishable"] is False
    assert (tmp_path / "out" / "page.html").stat().st_mode & 0o777 == 0o600
    code, _, err = privot("invert", "--data", "digits", "--client", "ward 1")
    assert (code, "--transcript" in err) == (2, True)


def test_a_client_of_a_built_in_has_its_own_part(transcript, tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path))
    terms = replace(transcript.terms, num_clients=5)
    dealt = replace(transcript, client_name="owner 2", terms=terms)
    records = load_dataset("digits")._read_records(slice(None))
    order = load_client_order(Ledger(ledger_path("digits")), len(records.labels))
    own = load_builtin_partition("digits", dealt, False)._read_records(slice(None))
    assert torch.equal(own.images, records.images[order[2::5].sort().values])
    with pytest.raises(SettingError, match="the partition of client 'the clinic' is unknown"):
        load_builtin_partition("digits", replace(dealt, client_name="the clinic"), False)
