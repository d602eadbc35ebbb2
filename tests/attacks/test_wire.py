"""What a server's record gives away: as owners send it no more than the mean image, raw gradients the images; missing noise shows."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from privot.attacks.inversion.simulated_clients import imitated
from privot.attacks.inversion.transcript import tapped
from privot.attacks.inversion.transcript_attack import (
    ADDED,
    GRADIENTS,
    LEARNED,
    MEAN,
    ROOM,
    SLOPES,
    Wire,
    bounded,
)
from privot.cli.invert import _held
from privot.components.client_critics import beginning
from privot.data import load
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import DataError, SettingError
from privot.federated.client import Owner
from privot.federated.messages import Answer, Terms, pack, unpack
from privot.federated.server import Server
from privot.federated.transcript import SEEN, Recorder, read
from privot.methods import make
from privot.nets.functional_critic import Critic
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget
from privot.privacy.shard_checkpoint import dealing_order
from privot.runtime import Runtime, Streams
from privot.synthesis import ledger_path

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 8, 8)
CLASSES = 10
RUN = "0123456789abcdef" * 2
NAME = "ward 0"
# An owner of one record a class, whose critic learns for long: nobody is easier to invert.
TINY = {
    "rounds": 4,
    "lessons": 20,
    "warm": 2,
    "critic_batch": 10,
    "critic_rate": 8e-3,
    "width": 4,
    "detail": 1.0,
    "channels": 4,
    "code": 4,
    "records": 10,
}


def one_of_each():
    records = load("digits")._take(slice(None))
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
    plan = make("federated-gs-wgan", settings).plan(Spec(SHAPE, CLASSES, owners=1))
    noise = plan.calibrated(Budget(epsilon, 1.15e-3)).stages[0].noise if noise is None else noise
    agreed = Terms(RUN, make("federated-gs-wgan", settings | {"noise": noise}), SHAPE, CLASSES, 1)
    owner = Owner(
        box or one_of_each(),
        Budget(math.inf),
        Ledger(folder / "x.jsonl"),
        folder / "run",
        Runtime("cpu"),
    )
    server = Server(agreed, [NAME], Streams(0, Runtime("cpu")), record=folder / "wire")
    server.accept(NAME, owner.reply(server.offers()[NAME]))
    while not server.done:
        server.take(NAME, owner.reply(server.ask()[NAME]))
        server.close()
    server.finish()
    return folder / "wire"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("wire"))


@pytest.fixture(scope="module")
def overheard(record):
    return Wire(shadows=40, checked=2).run(
        tapped(record), one_of_each(), load("digits", "test"), Runtime("cpu")
    )


def test_what_is_read_off_a_record_is_what_was_sent(record):
    heard = tapped(record)
    sent = [unpack(each.message) for each in read(record) if each.way == SEEN]
    answers = [each for each in sent if isinstance(each, Answer)]
    assert (heard.name, len(answers)) == (NAME, TINY["rounds"])
    assert torch.equal(heard.values, torch.stack([each.values for each in answers]))
    assert heard.images.shape == (TINY["rounds"], CLASSES, 1, *SHAPE)
    assert heard.bytes[1] == sum(len(each.message) for each in read(record) if each.way == SEEN)


def test_raw_gradients_give_images_back(overheard, trust):
    """In the weights, as federated learning has it, and slopes before clip and noise: the attack that follows is no weak one."""
    assert overheard.tiers[GRADIENTS]["psnr"] >= 20
    assert overheard.tiers[GRADIENTS]["leaked"] == 1
    assert overheard.tiers[SLOPES]["psnr"] >= overheard.tiers[MEAN]["psnr"] + 4
    trust("F3", "dB of images from raw gradients", round(overheard.tiers[GRADIENTS]["psnr"], 1))


def test_answers_as_shipped_give_no_more_than_the_mean_image(overheard, trust):
    assert overheard.gain <= ROOM
    for attack in (ADDED, LEARNED):
        assert overheard.tiers[attack]["psnr"] <= overheard.tiers[MEAN]["psnr"] + 1
        assert overheard.tiers[attack]["leaked"] == 0
    assert "no proof" in overheard.sentence
    assert overheard.publishable is False
    assert overheard.strip().shape == (6, 2, *SHAPE)
    assert len(overheard.heads()) == 6
    trust("F3", "dB beyond the mean image from answers as shipped", round(overheard.gain, 2))


def test_an_owner_without_noise_is_caught(tmp_path):
    """A planted bug: slopes of norm 1, but next to nothing added."""
    found = Wire(shadows=25, checked=1).run(
        tapped(recorded(tmp_path, noise=1e-3, rounds=3)),
        one_of_each(),
        load("digits", "test"),
        Runtime("cpu"),
    )
    assert found.gain > 3
    assert "these answers tell" in found.sentence


def test_imitated_owners_say_what_an_owner_says(record):
    """In direction, of the same records: draws differ."""
    heard = tapped(record)
    own = one_of_each()._take(slice(None))
    found = [
        imitated(heard.terms, heard.images, own.images[None], own.labels[None], seeded(seed))[0][0]
        for seed in (0, 1)
    ]
    one, two = (bounded(heard.terms, slopes)[-1] for slopes in found)
    assert not torch.equal(one, two)
    assert torch.allclose(one.flatten(2).norm(dim=2), torch.ones(CLASSES, 1), atol=1e-3)
    assert torch.cosine_similarity(one.flatten(2), two.flatten(2), 2).mean() > 0.7


def test_each_imitation_has_draws_of_its_own(record):
    """As owners have, so that what an attacker learns from many is not the luck of one."""
    heard = tapped(record)
    own = one_of_each()._take(slice(None))
    images = own.images[None].expand(2, -1, -1, -1, -1)
    labels = own.labels.expand(2, -1)
    found, _ = imitated(heard.terms, heard.images[:1], images, labels, seeded())
    one, two = bounded(heard.terms, found)[:, 0]
    assert not torch.allclose(one, two, atol=1e-3)


def test_imitations_move_what_they_learn_from_as_owners_do(record, monkeypatch):
    heard = tapped(record)
    own = one_of_each()._take(slice(None))
    moving = dataclasses.replace(
        heard.terms, settings=dataclasses.replace(heard.terms.settings, shift=1)
    )
    still, _ = imitated(
        moving, heard.images[:1], own.images[None], own.labels[None], seeded()
    )  # 8 pixels are too few to be moved
    monkeypatch.setattr(
        "privot.attacks.inversion.simulated_clients.farthest", lambda shift, shape: shift
    )
    (same, _), (moved, _) = (
        imitated(terms, heard.images[:1], own.images[None], own.labels[None], seeded())
        for terms in (heard.terms, moving)
    )
    assert torch.equal(same, still)
    assert not torch.equal(moved, still)
    assert moved.isfinite().all()


def test_imitations_begin_where_owners_begin(record):
    """The first weights of a critic are public, so an imitation of the same records differs from the owner by its draws alone."""
    heard = tapped(record)
    own = one_of_each()._take(slice(None))
    images = own.images[None].expand(2, -1, -1, -1, -1)
    labels = own.labels.expand(2, -1)
    still = dataclasses.replace(
        heard.terms,
        settings=dataclasses.replace(heard.terms.settings, critic_rate=1e-30, warm=0, lessons=1),
    )
    for seed in range(2):
        _, state = imitated(still, heard.images[:1], images, labels, seeded(seed))
        first, _ = Critic(SHAPE, CLASSES, TINY["width"]).begin(1, beginning())
        assert torch.allclose(state["weights"], first.expand(2, -1), rtol=0, atol=1e-20)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# What else may be in a record


def test_lies_in_a_record_are_passed_over(record, tmp_path):
    heard = tapped(record)
    path = tmp_path / "wire"
    path.write_bytes(record.read_bytes())
    with Recorder(path) as more:
        more.seen(NAME, b"no message")
        more.seen(
            NAME, pack(Answer(RUN, 0, heard.values[1]))
        )  # another word on a round that was answered
        more.seen(NAME, pack(Answer(RUN, 9, heard.values[1])))  # on one that nobody asked
        more.seen(NAME, pack(Answer("f" * 32, 1, heard.values[1])))
        more.sent("ward 1", b"")
    assert torch.equal(tapped(path).values, heard.values)


def test_a_record_is_refused_where_it_has_nothing_of_the_owner(record, tmp_path):
    with pytest.raises(DataError, match=r"no answer of nobody .* messages of ward 0"):
        tapped(record, "nobody")
    Recorder(tmp_path / "empty").close()
    with pytest.raises(DataError, match="no answer of any owner"):
        tapped(tmp_path / "empty")
    with pytest.raises(DataError, match="these records are others"):
        Wire().run(
            tapped(record),
            Sensitive(np.zeros((4, 1, 4, 4)), np.zeros(4, int), Spec((1, 4, 4), 10)),
            load("digits"),
        )


def test_settings_out_of_range_are_refused():
    for wrong in ({"shadows": 4}, {"images": 0}, {"checked": 0}, {"attack": "dgl"}):
        with pytest.raises(SettingError):
            Wire(**wrong)


# The command line


def test_the_verb_reads_a_record(privot, tmp_path):
    (folder := tmp_path / "kept").mkdir()
    record = recorded(folder, rounds=1, lessons=1)
    own = one_of_each()._take(slice(None))
    np.savez(tmp_path / "own.npz", images=own.images.numpy(), labels=own.labels.numpy())
    words = ("invert", "--data", "own.npz", "--wire", record, "--shadows", "5", "--checked", "1")
    code, _, err = privot(*words)
    assert code == 2
    assert "--aside" in err
    code, out, err = privot(*words, "--aside", "digits", "--out", "found")
    assert (code, "owner's own" in err) == (0, True)
    for part in (
        MEAN,
        LEARNED,
        GRADIENTS,
        "no attack came 1 dB above the mean image",
        "bytes to ward 0",
    ):
        assert part in " ".join(out.split())
    facts = json.loads((tmp_path / "found" / "inversion.json").read_text())
    assert facts["gain"] <= 1
    assert facts["publishable"] is False
    assert (tmp_path / "found" / "page.html").stat().st_mode & 0o777 == 0o600


def test_options_of_a_record_need_one(privot):
    code, _, err = privot("invert", "--data", "digits", "--owner", "ward 1")
    assert (code, "--wire" in err) == (2, True)


def test_of_a_built_in_the_owner_has_its_own_part(record, tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path))
    heard = tapped(record)
    dealt = dataclasses.replace(
        heard, name="owner 2", terms=dataclasses.replace(heard.terms, owners=5)
    )
    records = load("digits")._take(slice(None))
    order = dealing_order(Ledger(ledger_path("digits")), len(records.labels))
    own = order[2::5].sort().values
    assert torch.equal(_held("digits", dealt, False)._take(slice(None)).images, records.images[own])
    with pytest.raises(SettingError, match="which records has 'the clinic'"):
        _held("digits", dataclasses.replace(dealt, name="the clinic"), False)
