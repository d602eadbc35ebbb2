"""What a hostile owner may send instead of its answer: each a function of what it could know, to bytes, or to several messages.

`HOSTILE_PAYLOADS` by name: (payload, words of the reason that must be given, whether it is a lie).
"""

import json
from dataclasses import replace

import torch
from support.federation import OTHER, plausible

from privot.federated import Refusal, Request, pack_message
from privot.privacy.noise import MAX_NORMAL

PICKLE = b"\x80\x04\x95\x1d\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."  # runs a command


def build_frame(head, data=b"", length=None):
    text = head
    if not isinstance(head, bytes):
        text = json.dumps(head, separators=(",", ":"), sort_keys=True).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def split_frame(raw):
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def honest(terms, number):
    return pack_message(plausible(terms, number, seed=7))


def send(raw):
    """The same bytes whatever the terms are."""
    return lambda terms, number: raw


def edit_bytes(change):
    return lambda terms, number: change(honest(terms, number))


def edit_values(change):
    def payload(terms, number):
        answer = plausible(terms, number, seed=7)
        return pack_message(replace(answer, gradients=change(answer.gradients.clone())))

    return payload


def edit_header(change, data=None):
    """The header of an honest answer, changed in place."""

    def payload(terms, number):
        head, own = split_frame(honest(terms, number))
        change(head)
        return build_frame(head, own if data is None else data)

    return payload


def set_metadata(**fields):
    return edit_header(lambda head: head["__metadata__"].update(fields))


def set_shape(*shape):
    return edit_header(lambda head: head["gradients"].update(shape=shape))


def set_value(index, value):
    def change(tensor):
        tensor.view(-1)[index] = value
        return tensor

    return edit_values(change)


def exceed_norm(factor):
    """A gradient that is longer than any honest one, by a factor."""

    def payload(terms, number):
        answer = plausible(terms, number)
        noise = MAX_NORMAL * 2 * terms.settings.noise_multiplier
        gradients = torch.zeros_like(answer.gradients)
        gradients[3, 0] = factor * (1 / gradients[0, 0].numel() ** 0.5 + noise)
        return pack_message(replace(answer, gradients=gradients))

    return payload


def forge_dtype(dtype, size):
    def change(head):
        count = head["gradients"]["data_offsets"][1] // 4
        head["gradients"] |= {"dtype": dtype, "data_offsets": [0, count * size]}

    def payload(terms, number):
        data = b"\0" * (plausible(terms, number).gradients.numel() * size)
        return edit_header(change, data)(terms, number)

    return payload


def answer_twice(terms, number):
    return (honest(terms, number),) * 2


def answer_twice_differently(terms, number):
    return honest(terms, number), pack_message(plausible(terms, number, seed=8))


def answer_another_run(terms, number):
    return pack_message(replace(plausible(terms, number), run_id=OTHER))


def add_tensor(head):
    head.update(weight={"dtype": "F32", "shape": [], "data_offsets": [0, 0]})


def repeat_field(raw):
    return raw.replace(b'"round":', b'"kind":"answer","round":').replace(b"  ", b"")


def send_request(terms, number):
    images = torch.zeros(1, 1, 1, 8, 8, dtype=torch.uint8)
    return pack_message(Request(terms.run_id, number, images))


def ring(terms, number):
    raw = pack_message(Refusal(terms.run_id, number, "x" * 8))
    return raw.replace(b"x" * 8, b"\\u0007xx")


MISTAKES = {
    "vanishes": (send(()), "did not answer"),
    "answers twice": (answer_twice, "twice"),
}
LIES = {
    "answers twice, otherwise": (answer_twice_differently, "two different answers"),
    "NaN": (set_value(5, float("nan")), "not finite"),
    "infinite": (set_value(0, float("inf")), "not finite"),
    "minus infinite": (set_value(-1, -float("inf")), "not finite"),
    "huge norm": (edit_values(lambda tensor: tensor * 1e30), "norm"),
    "largest float": (set_value(9, torch.finfo(torch.float32).max), "norm"),
    "a norm just too large": (exceed_norm(1.001), "norm"),
    "fewer classes": (edit_values(lambda tensor: tensor[:-1]), "shape"),
    "transposed": (edit_values(lambda tensor: tensor.transpose(0, 1)), "shape"),
    "more rows": (edit_values(lambda tensor: tensor.repeat(1, 2, 1, 1, 1)), "shape"),
    "float16": (forge_dtype("F16", 2), "F32"),
    "float64": (forge_dtype("F64", 8), "F32"),
    "next round": (lambda terms, number: pack_message(plausible(terms, number + 1)), "round"),
    "a round that never was": (lambda terms, _: pack_message(plausible(terms, 10**8)), "round"),
    "another run": (answer_another_run, "another run"),
    "lies about its count": (set_metadata(count="1000000"), "additional content"),
    "a weight in a tensor": (edit_header(add_tensor), "additional content"),
    "truncated": (edit_bytes(lambda raw: raw[:-7]), "as many"),
    "truncated in its header": (edit_bytes(lambda raw: raw[:40]), "cut short"),
    "goes on after the end": (edit_bytes(lambda raw: raw + b"\0"), "as many"),
    "a header of 2^62 bytes": (send(build_frame(b"{}", length=2**62)), "header"),
    "a header of all it sends": (send(build_frame(b" " * 9000)), ""),
    "too much": (send(bytes(1 << 22)), "bytes"),
    "deep JSON": (send(build_frame(b"[" * 1500)), "no message"),
    "a number of many digits": (send(build_frame(b"1" * 1600)), "no message"),
    "a shape that overflows": (set_shape(2**40, 2**40, 1, 1, 1), "as many"),
    "a shape below zero": (set_shape(-10, -1, 1, 4, 4), "five axes"),
    "a field twice": (edit_bytes(repeat_field), ""),
    "a round in words": (set_metadata(round="one"), "no message"),
    "a run in capitals": (set_metadata(run_id="A" * 32), "hexadecimal"),
    "another version": (set_metadata(format="privot federated 1"), "version"),
    "another kind": (set_metadata(kind="update"), "kind"),
    "a request": (send_request, "request"),
    "the terms": (lambda terms, _: pack_message(terms), "terms"),
    "a refusal that rings": (ring, "refusal"),
    "empty": (send(b""), "cut short"),
    "eight zeros": (send(bytes(8)), "cut short"),
    "pickle": (send(PICKLE), ""),
    "no bytes at all": (send("an answer"), "bytes"),
    "noise": (send(bytes(range(256)) * 4), ""),
}
HOSTILE_PAYLOADS = {
    name: (*payload, name in LIES) for name, payload in {**MISTAKES, **LIES}.items()
}
