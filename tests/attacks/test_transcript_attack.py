"""What a server's record gives away: as owners send it no more than the mean image, raw gradients the images; missing noise shows."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from privot.attacks.inversion.simulated_clients import simulate_clients
from privot.attacks.inversion.transcript import read_client_transcript
from privot.attacks.inversion.transcript_attack import TranscriptAttack
from privot.attacks.inversion.transcript_result import (
    LINEAR_ESTIMATE,
    MEAN_IMAGE,
    MIN_PSNR_GAIN,
    RAW_INPUT_GRADIENT,
    RAW_WEIGHT_GRADIENT,
    SUMMED_GRADIENTS,
)
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
RUN = "0123456789abcdef" * 2
NAME = "ward 0"
# An owner of one record a class, whose critic learns for long: nobody is easier to invert.
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


def one_of_each():
    records = load_dataset("digits")._read_records(slice(None))
    where = [int((records.labels == label).nonzero()[3]) for label in range(CLASSES)]
    return Sensitive(
        records.images[where].numpy(),
        records.labels[where].numpy(),
        Spec(SHAPE, CLASSES),
        name=NAME,
    )


def recorded(folder, noise=None, epsilon=60.0, box=None, **settings):
    """The record of a run with one owner."""
    settings = {**TINY, **settings}
    plan = make_method("federated-gs-wgan", settings).plan(Spec(SHAPE, CLASSES, num_clients=1))
    noise = (
        plan.calibrate(Budget(epsilon, 1.15e-3)).stages[0].noise_multiplier
        if noise is None
        else noise
    )
    agreed = Terms(
        RUN,
        make_method("federated-gs-wgan", settings | {"noise_multiplier": noise}),
        SHAPE,
        CLASSES,
        1,
    )
    owner = Client(
        box or one_of_each(),
        Budget(math.inf),
        Ledger(folder / "x.jsonl"),
        folder / "run",
        Runtime("cpu"),
    )
    server = Server(agreed, [NAME], Streams(0, Runtime("cpu")), transcript_path=folder / "wire")
    server.receive_consent(NAME, owner.reply(server.pack_offers()[NAME]))
    while not server.is_finished:
        server.receive(NAME, owner.reply(server.pack_requests()[NAME]))
        server.end_round()
    server.build_release()
    return folder / "wire"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("wire"))


@pytest.fixture(scope="module")
def overheard(record):
    return TranscriptAttack(num_simulated_clients=40, num_checked=2).run(
        read_client_transcript(record),
        one_of_each(),
        load_dataset("digits", "test"),
        Runtime("cpu"),
    )


def test_what_is_read_off_a_record_is_what_was_sent(record):
    heard = read_client_transcript(record)
    sent = [
        unpack_message(each.message)
        for each in read_transcript(record)
        if each.direction == RECEIVED_FROM_CLIENT
    ]
    answers = [each for each in sent if isinstance(each, Answer)]
    assert (heard.client_name, len(answers)) == (NAME, TINY["rounds"])
    assert torch.equal(heard.values, torch.stack([each.gradients for each in answers]))
    assert heard.images.shape == (TINY["rounds"], CLASSES, 1, *SHAPE)
    assert heard.traffic_bytes[1] == sum(
        len(each.message)
        for each in read_transcript(record)
        if each.direction == RECEIVED_FROM_CLIENT
    )


def test_raw_gradients_give_images_back(overheard, trust):
    """In the weights, as federated learning has it, and slopes before clip and noise: the attack that follows is no weak one."""
    assert overheard.tiers[RAW_WEIGHT_GRADIENT]["psnr"] >= 20
    assert overheard.tiers[RAW_WEIGHT_GRADIENT]["leak_rate"] == 1
    assert overheard.tiers[RAW_INPUT_GRADIENT]["psnr"] >= overheard.tiers[MEAN_IMAGE]["psnr"] + 4
    trust(
        "F3",
        "dB of images from raw gradients",
        round(overheard.tiers[RAW_WEIGHT_GRADIENT]["psnr"], 1),
    )


def test_answers_as_shipped_give_no_more_than_the_mean_image(overheard, trust):
    assert overheard.psnr_gain <= MIN_PSNR_GAIN
    for attack in (SUMMED_GRADIENTS, LINEAR_ESTIMATE):
        assert overheard.tiers[attack]["psnr"] <= overheard.tiers[MEAN_IMAGE]["psnr"] + 1
        assert overheard.tiers[attack]["leak_rate"] == 0
    assert "no proof" in overheard.summary
    assert overheard.publishable is False
    assert overheard.stack_snapshots().shape == (6, 2, *SHAPE)
    assert len(overheard.list_column_titles()) == 6
    trust("F3", "dB beyond the mean image from answers as shipped", round(overheard.psnr_gain, 2))


def test_an_owner_without_noise_is_caught(tmp_path):
    """A planted bug: slopes of norm 1, but next to nothing added."""
    found = TranscriptAttack(num_simulated_clients=25, num_checked=1).run(
        read_client_transcript(recorded(tmp_path, noise=1e-3, rounds=3)),
        one_of_each(),
        load_dataset("digits", "test"),
        Runtime("cpu"),
    )
    assert found.psnr_gain > 3
    assert "these gradients leak" in found.summary


def test_imitated_owners_say_what_an_owner_says(record):
    """In direction, of the same records: draws differ."""
    heard = read_client_transcript(record)
    own = one_of_each()._read_records(slice(None))
    found = [
        simulate_clients(
            heard.terms, heard.images, own.images[None], own.labels[None], seeded(seed)
        )[0][0]
        for seed in (0, 1)
    ]
    one, two = (clip_input_gradients(heard.terms, slopes)[-1] for slopes in found)
    assert not torch.equal(one, two)
    assert torch.allclose(one.flatten(2).norm(dim=2), torch.ones(CLASSES, 1), atol=1e-3)
    assert torch.cosine_similarity(one.flatten(2), two.flatten(2), 2).mean() > 0.7


def test_each_imitation_has_draws_of_its_own(record):
    """As owners have, so that what an attacker learns from many is not the luck of one."""
    heard = read_client_transcript(record)
    own = one_of_each()._read_records(slice(None))
    images = own.images[None].expand(2, -1, -1, -1, -1)
    labels = own.labels.expand(2, -1)
    found, _ = simulate_clients(heard.terms, heard.images[:1], images, labels, seeded())
    one, two = clip_input_gradients(heard.terms, found)[:, 0]
    assert not torch.allclose(one, two, atol=1e-3)


def test_imitations_move_what_they_learn_from_as_owners_do(record, monkeypatch):
    heard = read_client_transcript(record)
    own = one_of_each()._read_records(slice(None))
    moving = dataclasses.replace(
        heard.terms, settings=dataclasses.replace(heard.terms.settings, max_shift=1)
    )
    still, _ = simulate_clients(
        moving, heard.images[:1], own.images[None], own.labels[None], seeded()
    )  # 8 pixels are too few to be moved
    monkeypatch.setattr(
        "privot.attacks.inversion.simulated_clients.limit_shift", lambda shift, shape: shift
    )
    (same, _), (moved, _) = (
        simulate_clients(terms, heard.images[:1], own.images[None], own.labels[None], seeded())
        for terms in (heard.terms, moving)
    )
    assert torch.equal(same, still)
    assert not torch.equal(moved, still)
    assert moved.isfinite().all()


def test_imitations_begin_where_owners_begin(record):
    """The first weights of a critic are public, so an imitation of the same records differs from the owner by its draws alone."""
    heard = read_client_transcript(record)
    own = one_of_each()._read_records(slice(None))
    images = own.images[None].expand(2, -1, -1, -1, -1)
    labels = own.labels.expand(2, -1)
    still = dataclasses.replace(
        heard.terms,
        settings=dataclasses.replace(
            heard.terms.settings, critic_learning_rate=1e-30, warmup_rounds=0, critic_steps=1
        ),
    )
    for seed in range(2):
        _, state = simulate_clients(still, heard.images[:1], images, labels, seeded(seed))
        first, _ = Critic(SHAPE, CLASSES, TINY["critic_channels"]).init_weights(
            1, build_shared_init_rng()
        )
        assert torch.allclose(state["weights"], first.expand(2, -1), rtol=0, atol=1e-20)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# What else may be in a record


def test_lies_in_a_record_are_passed_over(record, tmp_path):
    heard = read_client_transcript(record)
    path = tmp_path / "wire"
    path.write_bytes(record.read_bytes())
    with TranscriptWriter(path) as more:
        more.record_received(NAME, b"no message")
        more.record_received(
            NAME, pack_message(Answer(RUN, 0, heard.values[1]))
        )  # another word on a round that was answered
        more.record_received(
            NAME, pack_message(Answer(RUN, 9, heard.values[1]))
        )  # on one that nobody asked
        more.record_received(NAME, pack_message(Answer("f" * 32, 1, heard.values[1])))
        more.record_sent("ward 1", b"")
    assert torch.equal(read_client_transcript(path).values, heard.values)


def test_a_record_is_refused_where_it_has_nothing_of_the_owner(record, tmp_path):
    with pytest.raises(DataError, match=r"no answer of nobody.* messages of ward 0"):
        read_client_transcript(record, "nobody")
    TranscriptWriter(tmp_path / "empty").close()
    with pytest.raises(DataError, match="no answer of any client"):
        read_client_transcript(tmp_path / "empty")
    with pytest.raises(DataError, match="Give the records that were used in the run"):
        TranscriptAttack().run(
            read_client_transcript(record),
            Sensitive(np.zeros((4, 1, 4, 4)), np.zeros(4, int), Spec((1, 4, 4), 10)),
            load_dataset("digits"),
        )


def test_settings_out_of_range_are_refused():
    for wrong in (
        {"num_simulated_clients": 4},
        {"num_images": 0},
        {"num_checked": 0},
        {"attack": "dgl"},
    ):
        with pytest.raises(SettingError):
            TranscriptAttack(**wrong)


# The command line


def test_the_verb_reads_a_record(privot, tmp_path):
    (folder := tmp_path / "kept").mkdir()
    record = recorded(folder, rounds=1, critic_steps=1)
    own = one_of_each()._read_records(slice(None))
    np.savez(tmp_path / "own.npz", images=own.images.numpy(), labels=own.labels.numpy())
    words = (
        "invert",
        "--data",
        "own.npz",
        "--transcript",
        record,
        "--shadows",
        "5",
        "--checked",
        "1",
    )
    code, _, err = privot(*words)
    assert code == 2
    assert "--holdout" in err
    code, out, err = privot(*words, "--holdout", "digits", "--out", "found")
    assert (code, "for the data owner alone" in " ".join(err.split())) == (0, True)
    for part in (
        MEAN_IMAGE,
        LINEAR_ESTIMATE,
        RAW_WEIGHT_GRADIENT,
        "no attack exceeds the mean image by 1 dB",
        "bytes to ward 0",
    ):
        assert part in " ".join(out.split())
    facts = json.loads((tmp_path / "found" / "inversion.json").read_text())
    assert facts["psnr_gain"] <= 1
    assert facts["publishable"] is False
    assert (tmp_path / "found" / "page.html").stat().st_mode & 0o777 == 0o600


def test_options_of_a_record_need_one(privot):
    code, _, err = privot("invert", "--data", "digits", "--client", "ward 1")
    assert (code, "--transcript" in err) == (2, True)


def test_of_a_built_in_the_owner_has_its_own_part(record, tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path))
    heard = read_client_transcript(record)
    dealt = dataclasses.replace(
        heard, client_name="owner 2", terms=dataclasses.replace(heard.terms, num_clients=5)
    )
    records = load_dataset("digits")._read_records(slice(None))
    order = load_client_order(Ledger(ledger_path("digits")), len(records.labels))
    own = order[2::5].sort().values
    assert torch.equal(
        load_builtin_partition("digits", dealt, False)._read_records(slice(None)).images,
        records.images[own],
    )
    with pytest.raises(SettingError, match="the partition of client 'the clinic' is unknown"):
        load_builtin_partition(
            "digits", dataclasses.replace(dealt, client_name="the clinic"), False
        )
