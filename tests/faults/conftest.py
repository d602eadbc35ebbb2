import pytest
from forks import Forks


@pytest.fixture(scope="session")
def forks():
    warm = Forks()
    yield warm
    warm.close()
