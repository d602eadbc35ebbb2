"""Every error a user can mend: one line that names the field or file and says what to do. The CLI exits with 2."""

from collections.abc import Iterator
from contextlib import contextmanager


class PrivotError(Exception):
    """Something in the input, the settings, the budget or the files is wrong; nothing was charged or half written."""


class PrivotWarning(UserWarning):
    """A caution about a run that is allowed, such as a large epsilon. Python callers see it as a warning."""


class DataError(PrivotError):
    """The data cannot be read or does not fit what was declared about it."""


class SettingError(PrivotError):
    """A setting, method or data set name is unknown or out of range."""


class PlanError(PrivotError):
    """A plan that has no privacy argument, or an ask that its plan does not cover."""


class BudgetError(PrivotError):
    """The budget, of the run or of the data set, does not allow this."""


class LedgerError(PrivotError):
    """The ledger cannot be written, or was altered."""


class ReleaseError(PrivotError):
    """A release is damaged, incomplete or does not prove what it claims."""


class QueryError(PrivotError):
    """A query failed on the secret side; its own words stay there, since they may carry data."""


class MessageError(PrivotError):
    """What came over a wire is not a message of the protocol, or not one that belongs here."""


@contextmanager
def refusing(kind: type[PrivotError], text: str) -> Iterator[None]:
    """Whatever a broken or hostile input provokes becomes one line of ours, which names the kind of failure but not its words."""
    try:
        yield
    except PrivotError:
        raise
    except Exception as error:
        raise kind(f"{text} ({type(error).__name__})") from None
