"""The same chance at every run of a test, so that none fails for what a change did not touch: secret noise, torch, Hypothesis.

`pytest --fresh` (`make test-slow`, `make trust`) draws from the system instead, as every run of Privot does.
"""

import contextlib
import hashlib
import os
import zlib

import hypothesis
import numpy as np
import torch

from privot.privacy import noise

hypothesis.settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("fresh", derandomize=False, deadline=None, database=None)


# Where there is no GPU to be told, `torch.manual_seed` takes a millisecond to note where it was called from, for each test and fixture.
seeded = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


class Chance:
    """Stands for the module `os` where secret noise is drawn: bytes that follow from a test's name and from how many it drew before."""

    def __init__(self):
        self.process = os.getpid()
        self.place = ""
        self.count = 0

    def urandom(self, count):
        if os.getpid() != self.process:  # a fork, else it would draw what the others draw
            return os.urandom(count)
        self.count += 1
        return hashlib.shake_256(f"{self.place} {self.count}".encode()).digest(count)

    @contextlib.contextmanager
    def at(self, place):
        """Within, chance belongs to the place; after it, goes on as it was."""
        before = (self.place, self.count)
        numbers = np.random.get_state()
        self.place = place
        self.count = 0
        with torch.random.fork_rng(devices=[]):
            seeded(zlib.crc32(place.encode()))
            np.random.seed(zlib.crc32(place.encode()))
            yield
        self.place, self.count = before
        np.random.set_state(numbers)


def begin(fresh):
    """The chance of this run: `Chance.at`, or nothing that is steady."""
    hypothesis.settings.load_profile("fresh" if fresh else "steady")
    if fresh:
        return lambda place: contextlib.nullcontext()
    noise.os = chance = Chance()
    return chance.at
