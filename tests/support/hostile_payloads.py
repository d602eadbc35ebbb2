"""What a hostile owner may send in the place of its answer: each a function of what it could know, to bytes, or to several messages.

`HOSTILE` by name: (payload, words of the reason that must be given, whether it is a lie).
"""

import json
from dataclasses import replace

import torch
from support.federation import OTHER, plausible

from privot.federated import Refusal, Request, pack_message
from privot.privacy.noise import MAX_NORMAL

PICKLE = b"\x80\x04\x95\x1d\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."  # runs a command


def build_frame(head, data=b"", length=None):
    text = (
        head
        if isinstance(head, bytes)
        else json.dumps(head, separators=(",", ":"), sort_keys=True).encode()
    )
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def split_frame(raw):
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def honest(terms, number):
    return pack_message(plausible(terms, number, seed=7))


def values(change):
    def payload(terms, number):
        answer = plausible(terms, number, seed=7)
        return pack_message(replace(answer, gradients=change(answer.gradients.clone())))

    return payload


def head(change, data=None):
    """The header of an honest answer, changed in place."""

    def payload(terms, number):
        found, own = split_frame(honest(terms, number))
        change(found)
        return build_frame(found, own if data is None else data)

    return payload


def put(place, value):
    def change(tensor):
        tensor.view(-1)[place] = value
        return tensor

    return values(change)


def steep(factor):
    """A slope that is longer than any honest one, by a factor."""

    def payload(terms, number):
        answer = plausible(terms, number)
        numbers = answer.gradients[0, 0].numel()
        one = torch.zeros_like(answer.gradients)
        one[3, 0] = factor * (
            1 / numbers**0.5 + MAX_NORMAL * 2 * terms.settings.noise_multiplier
        )  # of norm factor * longest
        return pack_message(replace(answer, gradients=one))

    return payload


def forged(dtype, size):
    def change(found):
        count = found["gradients"]["data_offsets"][1] // 4
        found["gradients"] |= {"dtype": dtype, "data_offsets": [0, count * size]}

    def payload(terms, number):
        return head(change, b"\0" * (plausible(terms, number).gradients.numel() * size))(
            terms, number
        )

    return payload


HOSTILE_PAYLOADS = {
    "vanishes": (lambda terms, number: (), "did not answer", False),
    "answers twice": (lambda terms, number: (honest(terms, number),) * 2, "twice", False),
    "answers twice, otherwise": (
        lambda terms, number: (
            honest(terms, number),
            pack_message(plausible(terms, number, seed=8)),
        ),
        "two different answers",
        True,
    ),
    "NaN": (put(5, float("nan")), "not finite", True),
    "infinite": (put(0, float("inf")), "not finite", True),
    "minus infinite": (put(-1, -float("inf")), "not finite", True),
    "huge norm": (values(lambda tensor: tensor * 1e30), "norm", True),
    "largest float": (put(9, torch.finfo(torch.float32).max), "norm", True),
    "a norm just too large": (steep(1.001), "norm", True),
    "fewer classes": (values(lambda tensor: tensor[:-1]), "shape", True),
    "transposed": (values(lambda tensor: tensor.transpose(0, 1)), "shape", True),
    "more rows": (values(lambda tensor: tensor.repeat(1, 2, 1, 1, 1)), "shape", True),
    "float16": (forged("F16", 2), "F32", True),
    "float64": (forged("F64", 8), "F32", True),
    "next round": (lambda terms, number: pack_message(plausible(terms, number + 1)), "round", True),
    "a round that never was": (
        lambda terms, number: pack_message(plausible(terms, 10**8)),
        "round",
        True,
    ),
    "another run": (
        lambda terms, number: pack_message(replace(plausible(terms, number), run_id=OTHER)),
        "another run",
        True,
    ),
    "lies about its count": (
        head(lambda found: found["__metadata__"].update(count="1000000")),
        "additional content",
        True,
    ),
    "a weight in a tensor": (
        head(
            lambda found: found.update(weight={"dtype": "F32", "shape": [], "data_offsets": [0, 0]})
        ),
        "additional content",
        True,
    ),
    "truncated": (lambda terms, number: honest(terms, number)[:-7], "as many", True),
    "truncated in its header": (
        lambda terms, number: honest(terms, number)[:40],
        "cut short",
        True,
    ),
    "goes on after the end": (lambda terms, number: honest(terms, number) + b"\0", "as many", True),
    "a header of 2^62 bytes": (
        lambda terms, number: build_frame(b"{}", length=2**62),
        "header",
        True,
    ),
    "a header of all it sends": (lambda terms, number: build_frame(b" " * 9000), "", True),
    "too much": (lambda terms, number: bytes(1 << 22), "bytes", True),
    "deep JSON": (lambda terms, number: build_frame(b"[" * 1500), "no message", True),
    "a number of many digits": (lambda terms, number: build_frame(b"1" * 1600), "no message", True),
    "a shape that overflows": (
        head(lambda found: found["gradients"].update(shape=[2**40, 2**40, 1, 1, 1])),
        "as many",
        True,
    ),
    "a shape below zero": (
        head(lambda found: found["gradients"].update(shape=[-10, -1, 1, 4, 4])),
        "five axes",
        True,
    ),
    "a field twice": (
        lambda terms, number: (
            honest(terms, number)
            .replace(b'"round":', b'"kind":"answer","round":')
            .replace(b"  ", b"")
        ),
        "",
        True,
    ),
    "a round in words": (
        head(lambda found: found["__metadata__"].update(round="one")),
        "no message",
        True,
    ),
    "a run in capitals": (
        head(lambda found: found["__metadata__"].update(run_id="A" * 32)),
        "hexadecimal",
        True,
    ),
    "another version": (
        head(lambda found: found["__metadata__"].update(format="privot federated 1")),
        "version",
        True,
    ),
    "another kind": (head(lambda found: found["__metadata__"].update(kind="update")), "kind", True),
    "a request": (
        lambda terms, number: pack_message(
            Request(terms.run_id, number, torch.zeros(1, 1, 1, 8, 8, dtype=torch.uint8))
        ),
        "request",
        True,
    ),
    "the terms": (lambda terms, number: pack_message(terms), "terms", True),
    "a refusal that rings": (
        lambda terms, number: pack_message(Refusal(terms.run_id, number, "x" * 8)).replace(
            b"x" * 8, b"\\u0007xx"
        ),
        "refusal",
        True,
    ),
    "empty": (lambda terms, number: b"", "cut short", True),
    "eight zeros": (lambda terms, number: bytes(8), "cut short", True),
    "pickle": (lambda terms, number: PICKLE, "", True),
    "no bytes at all": (lambda terms, number: "an answer", "bytes", True),
    "noise": (lambda terms, number: bytes(range(256)) * 4, "", True),
}
