"""Messages: one way to write each, and whatever is not written so is refused, whoever wrote it."""

import contextlib
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from support.federation import RUN, images, plausible, terms
from support.hostile_payloads import build_frame, split_frame

from privot.errors import MessageError
from privot.federated import Answer, Refusal, Request, pack_message, unpack_message
from privot.privacy.accounting import Neighbours

MESSAGES = {
    "terms": terms(),
    "request": Request(RUN, 0, images(terms())),
    "answer": plausible(terms(), 2),
    "refusal": Refusal(RUN, -1, "the budget does not cover it"),
}
every = pytest.mark.parametrize("name", MESSAGES)


@every
def test_what_is_packed_comes_back_to_the_byte(name):
    raw = pack_message(MESSAGES[name])
    assert pack_message(unpack_message(raw)) == raw
    assert type(unpack_message(raw)) is type(MESSAGES[name])


def test_tensors_come_back_to_the_bit_from_few_bytes_in_the_safetensors_format():
    numbers = torch.tensor([0.0, -0.0, 1e-45, -1.1754944e-38, 3.4e38, 0.1]).view(1, 1, 1, 2, 3)
    unpacked = unpack_message(pack_message(Answer(RUN, 0, numbers))).gradients
    assert unpacked.numpy().tobytes() == numbers.numpy().tobytes()
    strided = torch.arange(24.0).view(1, 1, 2, 3, 4).transpose(3, 4)
    assert torch.equal(unpack_message(pack_message(Answer(RUN, 0, strided))).gradients, strided)
    request = MESSAGES["request"]
    assert torch.equal(load(pack_message(request))["images"], request.images)
    assert len(pack_message(plausible(terms(shape=(1, 28, 28), classes=62), 0))) < 1.5e5


def test_terms_say_what_one_owner_is_asked():
    plan = unpack_message(pack_message(terms(owners=300, rounds=7, noise_multiplier=3.0))).plan()
    assert [(stage.steps, stage.noise_multiplier) for stage in plan.stages] == [(70, 3.0)]
    assert plan.neighbours is Neighbours.CLIENT


@every
@settings(max_examples=30)
@given(data=st.data())
def test_no_changed_byte_passes_unnoticed(name, data):
    """Of a message with any of its bytes changed: refused, or one that says so to the byte, never the old message."""
    raw = bytearray(pack_message(MESSAGES[name]))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MessageError):
        assert pack_message(unpack_message(bytes(raw))) == bytes(raw)


@settings(max_examples=200)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=200).map(build_frame),
        st.text('[]{}",:0123456789einfNa ').map(lambda text: build_frame(text.encode())),
    )
)
def test_strangers_bytes_are_refused(raw):
    with pytest.raises(MessageError):
        unpack_message(raw)


@every
def test_a_message_cut_anywhere_is_refused(name):
    raw = pack_message(MESSAGES[name])
    for end in range(0, len(raw), max(1, len(raw) // 97)):
        with pytest.raises(MessageError):
            unpack_message(raw[:end])


@every
@pytest.mark.parametrize(
    "extra", [{"count": "7"}, {"weight": "1e9"}, {"": ""}, {"reason": "more"}, {"terms": "{}"}]
)
def test_nothing_more_can_be_said(name, extra):
    head, data = split_frame(pack_message(MESSAGES[name]))
    head["__metadata__"] |= {
        key: value for key, value in extra.items() if key not in head["__metadata__"]
    } or {"note": "x"}
    with pytest.raises(MessageError):
        unpack_message(build_frame(head, data))


@every
def test_blanks_and_order_cannot_carry_a_word(name):
    head, data = split_frame(pack_message(MESSAGES[name]))
    for text in (
        json.dumps(head),
        json.dumps(head, separators=(",", ":"), sort_keys=True) + " " * 16,
        json.dumps(dict(reversed(head.items())), separators=(",", ":")),
    ):
        with pytest.raises(MessageError, match=r"one allowed encoding|no message"):
            unpack_message(build_frame(text.encode(), data))


def edit_terms(**change):
    """Terms whose JSON was changed by hand."""
    head, _ = split_frame(pack_message(terms()))
    fields = json.loads(head["__metadata__"]["terms"])
    for key, value in change.items():
        (fields if key in fields else fields["settings"])[key] = value
    head["__metadata__"]["terms"] = json.dumps(fields, separators=(",", ":"), sort_keys=True)
    text = json.dumps(head, separators=(",", ":"), sort_keys=True).encode()
    return build_frame(text + b" " * (-len(text) % 8))


def test_terms_that_cannot_be_are_refused():
    assert unpack_message(edit_terms(noise_multiplier=9.0)).settings.noise_multiplier == 9.0
    wrong = {
        "noise_multiplier": (None, math.nan, math.inf, -1.0, "3", True, [1.0], 10**400),
        "rounds": (0, -3, 1.5, "many"),
        "shape": ([1, 8], [1, 8, 10**9], "abc", [1.0, 8, 8], [True, 8, 8]),
        "num_classes": (0, 10**12),
        "num_clients": (0, -1, None, True),
        "settings": ({}, None),
        "batch_per_class": (0,),
        "critic_channels": (0,),
        "critic_learning_rate": (math.nan,),
        "unit": ("nobody",),
        "generator": ("pickle",),
        "bribe": (1,),
        "frequency_fraction": (0.0,),
        "ema_decay": (1.0,),
        "pretrain": ("/etc/passwd",),
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(MessageError):
                unpack_message(edit_terms(**{name: value}))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Answer, (RUN, 0, torch.zeros(1, 1, 1, 4, 4, dtype=torch.float64))),
        (Answer, (RUN, 0, torch.zeros(1, 1, 4, 4))),
        (Answer, (RUN, 0, torch.zeros(0, 1, 1, 4, 4))),
        (Answer, (RUN, -1, torch.zeros(1, 1, 1, 4, 4))),
        (Answer, ("short", 0, torch.zeros(1, 1, 1, 4, 4))),
        (Request, (RUN, 0, torch.zeros(1, 1, 1, 4, 4))),
        (Request, (RUN, True, torch.zeros(1, 1, 1, 4, 4, dtype=torch.uint8))),
        (Refusal, (RUN, 0, "")),
        (Refusal, (RUN, 0, "\x1b[2J")),
        (Refusal, (RUN, 0, "x" * 201)),
        (Refusal, (RUN, -2, "no")),
    ],
)
def test_a_message_that_cannot_be_is_refused(kind, fields):
    with pytest.raises(MessageError):
        kind(*fields)


def test_the_size_is_checked_before_the_bytes_are_read():
    class Untouchable(bytes):
        def __getitem__(self, key):
            raise AssertionError("it was read")

    with pytest.raises(MessageError, match="at most"):
        unpack_message(Untouchable(101), max_bytes=100)
    with pytest.raises(MessageError):
        unpack_message(build_frame(b"{}", length=2**63 - 1))
