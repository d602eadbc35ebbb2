"""What many tests begin with: an empty ledger and a small sealed box."""

import numpy as np
import pytest

from privot.data.records import Sensitive
from privot.data.spec import Spec
from privot.privacy.ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "box.jsonl")


@pytest.fixture
def box():
    """8 records of 1x2x2 pixels in 2 classes of 4, sizes declared."""
    images = np.random.default_rng(0).random((8, 1, 2, 2), np.float32)
    return Sensitive(images, np.arange(8) % 2, Spec((1, 2, 2), 2, 8, (4, 4)), name="box")
