"""Marks on the secret side, searched for in bytes: as numbers, text, in images and archives."""

import base64
import binascii
import contextlib
import io
import itertools
import re
import zipfile

import numpy as np
from PIL import Image

DTYPES = ("<f4", ">f4", "<f8", ">f8", "<f2", "<i4", "<i8", "<i2", "u1")
RUN = 4  # so many numbers in a row are no accident; of bytes, twice as many
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
CODED = re.compile(rb"[A-Za-z0-9+/_-]{32,}={0,2}")


class Marks:
    """``levels`` {name: integers 0 to 255}, ``values`` {name: floats}, ``words`` {name: text}."""

    def __init__(self, levels=(), values=(), words=()):
        self.words = {
            name: [text.encode(), text.encode("utf-16-le"), text.encode().hex().encode()]
            for name, text in dict(words).items()
        }
        self.needles = {}
        self.runs = {}
        for name, own in dict(levels).items():
            own = np.asarray(own, np.float64).ravel()
            for start in range(len(own) - RUN + 1):
                self.runs[tuple(map(int, own[start : start + RUN]))] = name
            for dtype, scaled in itertools.product(DTYPES, list_scales(own)):
                if np.dtype(dtype).kind == "f" or scaled is own:
                    self._add_needles(name, scaled.astype(dtype))
        for name, own in dict(values).items():
            for dtype in ("<f4", "<f8"):
                numbers = np.asarray(own, np.float64).ravel().astype(dtype)
                self._add_needles(name, numbers, only_distinct=True)
        heads = np.array([list(head[:6]) for head in self.needles], np.uint32).reshape(-1, 6)
        self._tables = []
        for offset in (0, 2, 4):
            table = np.zeros(1 << 16, bool)
            table[heads[:, offset] | heads[:, offset + 1] << 8] = True
            self._tables.append(table)

    def _add_needles(self, name, numbers, only_distinct=False):
        """Every run of these numbers, as bytes; on request none of equal or of round numbers."""
        count = RUN * (2 if numbers.itemsize == 1 else 1)
        for start in range(len(numbers) - count + 1):
            part = numbers[start : start + count]
            is_dull = len(np.unique(part)) < count or (part == np.round(part, 3)).any()
            if not (only_distinct and is_dull):
                raw = part.tobytes()
                self.needles.setdefault(raw[:8], []).append((raw, name))

    def search(self, data):
        """The names of all marks in some bytes, however they are encoded."""
        return set().union(*(self._search_plain(part) for part in decode(bytes(data))))

    def _search_plain(self, data):
        names = {name for name, ways in self.words.items() if any(way in data for way in ways)}
        if self.needles and len(data) >= 8:
            raw = np.frombuffer(data, np.uint8)
            pairs = raw[:-1].astype(np.uint16) | raw[1:].astype(np.uint16) << 8
            first, second, third = self._tables
            hits = first[pairs[:-4]] & second[pairs[2:-2]] & third[pairs[4:]]
            for start in np.flatnonzero(hits).tolist():
                for needle, name in self.needles.get(data[start : start + 8], ()):
                    if data.startswith(needle, start):
                        names.add(name)
        return names | self._search_decimals(data)

    def _search_decimals(self, data):
        """Marks written in decimals: levels, or levels over 255, in a row with their neighbours."""
        if not self.runs or not any(byte in b"0123456789" for byte in data[:4096]):
            return set()
        numbers = np.array([parse_number(text) for text in NUMBER.findall(data)])
        names = set()
        for levels in (numbers, numbers * 255, (numbers + 1) * 127.5):
            whole = levels.round()
            near = np.where(np.abs(levels - whole) < 0.2, whole, -1).astype(np.int64)
            runs = zip(*(near[start:] for start in range(RUN)), strict=False)
            names |= {self.runs[run] for run in runs if run in self.runs}
        return names


def list_scales(levels):
    """Levels as they are, in [0, 1] and in [-1, 1], the latter two in both precisions."""
    yield levels
    for dtype in (np.float32, np.float64):
        grey = levels.astype(dtype) / dtype(255)
        yield from (grey, 2 * grey - 1)


def parse_number(text):
    value = float(text)
    return value if abs(value) < 1e6 else -1.0


def decode(data, depth=3):
    """The bytes, and what they hold: levels of images, members of archives, base64 and hex."""
    yield data
    if not depth:
        return
    for match in re.finditer(b"\x89PNG\r\n", data):
        with contextlib.suppress(Exception):
            image = Image.open(io.BytesIO(data[match.start() :]))
            yield repr(image.info).encode()
            yield image.convert("L").tobytes()
    if (start := data.find(b"PK\x03\x04")) >= 0:
        with contextlib.suppress(zipfile.BadZipFile):
            archive = zipfile.ZipFile(io.BytesIO(data[start:]))
            for name in archive.namelist():
                yield name.encode()
                yield from decode(archive.read(name), depth - 1)
    for text in {match.group() for match in CODED.finditer(data)}:
        for function in (binascii.unhexlify, decode_base64):
            with contextlib.suppress(binascii.Error, ValueError):
                yield from decode(function(text), depth - 1)


def decode_base64(text):
    is_for_urls = {45, 95} & set(text)
    return base64.b64decode(text + b"=" * (-len(text) % 4), b"-_" if is_for_urls else None)
