"""Marks on the secret side, and the search for them in any bytes: as numbers of any kind, as text, in pictures, archives and codes."""

import base64
import binascii
import contextlib
import io
import itertools
import re
import zipfile

import numpy as np
from PIL import Image

KINDS = ("<f4", ">f4", "<f8", ">f8", "<f2", "<i4", "<i8", "<i2", "u1")
RUN = 4  # so many numbers in a row are no accident: of bytes, twice as many
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
CODED = re.compile(rb"[A-Za-z0-9+/_-]{32,}={0,2}")


class Marks:
    """``levels`` {name: whole numbers 0 to 255}, ``values`` {name: floats as they are}, ``words`` {name: text}."""

    def __init__(self, levels=(), values=(), words=()):
        self.words = {
            name: [text.encode(), text.encode("utf-16-le"), text.encode().hex().encode()]
            for name, text in dict(words).items()
        }
        self.needles = {}
        self.runs = {}
        for name, own in dict(levels).items():
            own = np.asarray(own, np.float64).ravel()
            for first in range(len(own) - RUN + 1):
                self.runs[tuple(int(each) for each in own[first : first + RUN])] = name
            for kind, shown in itertools.product(KINDS, _scaled(own)):
                if np.dtype(kind).kind == "f" or shown is own:
                    self._note(name, shown.astype(kind))
        for name, own in dict(values).items():
            for kind in ("<f4", "<f8"):
                self._note(name, np.asarray(own, np.float64).ravel().astype(kind), telling=True)
        heads = np.array([list(each[:6]) for each in self.needles], np.uint32).reshape(-1, 6)
        self._tables = []
        for place in (0, 2, 4):
            table = np.zeros(1 << 16, bool)
            table[heads[:, place] | heads[:, place + 1] << 8] = True
            self._tables.append(table)

    def _note(self, name, numbers, telling=False):
        """Every run of these numbers, as bytes; a dull one (few values, or whole numbers) tells nothing and is left out if asked."""
        many = RUN * (2 if numbers.itemsize == 1 else 1)
        for first in range(len(numbers) - many + 1):
            part = numbers[first : first + many]
            if telling and (len(np.unique(part)) < many or (part == np.round(part, 3)).any()):
                continue
            raw = part.tobytes()
            self.needles.setdefault(raw[:8], []).append((raw, name))

    def found(self, data):
        """The names of all marks in some bytes, however they are folded."""
        return set().union(*(self._here(each) for each in unfolded(bytes(data))))

    def _here(self, data):
        seen = {name for name, ways in self.words.items() if any(each in data for each in ways)}
        if self.needles and len(data) >= 8:
            raw = np.frombuffer(data, np.uint8)
            pairs = raw[:-1].astype(np.uint16) | raw[1:].astype(np.uint16) << 8
            places = np.flatnonzero(
                self._tables[0][pairs[:-4]]
                & self._tables[1][pairs[2:-2]]
                & self._tables[2][pairs[4:]]
            )
            for place in places.tolist():
                for whole, name in self.needles.get(data[place : place + 8], ()):
                    if data.startswith(whole, place):
                        seen.add(name)
        return seen | self._told(data)

    def _told(self, data):
        """Marks that are written out in decimals: a level, or a level over 255, in a row with its neighbours."""
        if not self.runs or sum(each in b"0123456789" for each in data[:4096]) == 0:
            return set()
        numbers = np.array([_number(each) for each in NUMBER.findall(data)])
        seen = set()
        for said in (numbers, numbers * 255, (numbers + 1) * 127.5):
            near = (
                np.where(np.abs(said - said.round()) < 0.2, said.round(), -1).astype(np.int64)
                if len(said)
                else []
            )
            seen |= {
                self.runs[run]
                for run in zip(*(near[place:] for place in range(RUN)), strict=False)
                if run in self.runs
            }
        return seen


def _scaled(levels):
    """Levels as they are, in [0, 1] and in [-1, 1], the latter in both precisions."""
    yield levels
    for kind in (np.float32, np.float64):
        grey = levels.astype(kind) / kind(255)
        yield from (grey, 2 * grey - 1)


def _number(text):
    value = float(text)
    return value if abs(value) < 1e6 else -1.0


def unfolded(data, depth=3):
    """The bytes, and what lies in them: pictures as levels, members of archives, base64 and hex decoded."""
    yield data
    if not depth:
        return
    for start in _places(data, b"\x89PNG\r\n"):
        with contextlib.suppress(Exception):
            image = Image.open(io.BytesIO(data[start:]))
            yield repr(image.info).encode()
            yield image.convert("L").tobytes()
    for start in _places(data, b"PK\x03\x04")[:1]:
        with contextlib.suppress(zipfile.BadZipFile):
            archive = zipfile.ZipFile(io.BytesIO(data[start:]))
            for name in archive.namelist():
                yield name.encode()
                yield from unfolded(archive.read(name), depth - 1)
    for coded in {each.group() for each in CODED.finditer(data)}:
        for decode in (binascii.unhexlify, _base64):
            with contextlib.suppress(binascii.Error, ValueError):
                yield from unfolded(decode(coded), depth - 1)


def _base64(text):
    return base64.b64decode(
        text + b"=" * (-len(text) % 4), altchars=b"-_" if {45, 95} & set(text) else None
    )


def _places(data, head):
    found = []
    at = data.find(head)
    while at >= 0:
        found.append(at)
        at = data.find(head, at + 1)
    return found
