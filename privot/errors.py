"""Errors that a user can fix: one line that says what is wrong and what to do.

The command line prints the line and exits with code 2.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class PrivotError(Exception):
    """The input, a setting, the budget or a file is wrong. Nothing is half written."""


class PrivotWarning(UserWarning):
    """A caution about a run that is allowed, such as a large epsilon."""


class DataError(PrivotError):
    """The data cannot be read, or does not fit what was declared about it."""


class SettingError(PrivotError):
    """A setting, method or data set name is unknown or out of range."""


class PlanError(PrivotError):
    """A plan has no privacy argument, or a query is not covered by its plan."""


class BudgetError(PrivotError):
    """The budget of the run or of the data set does not allow this."""


class LedgerError(PrivotError):
    """The ledger cannot be written, or was altered."""


class ReleaseError(PrivotError):
    """A release is damaged, incomplete, or does not prove what it claims."""


class QueryError(PrivotError):
    """A query failed on the secret side. Its message stays there, because it may hold data."""


class MessageError(PrivotError):
    """A received message is not of the protocol, or does not belong here."""


@contextmanager
def reraise_as(error_type: type[PrivotError], message: str) -> Iterator[None]:
    """Turn any error that broken or hostile input causes into one line.

    Args:
        error_type: The type to raise. A `PrivotError` passes unchanged.
        message: The line. The type of the original error is appended; its text is dropped.
    """
    try:
        yield
    except PrivotError:
        raise
    except Exception as error:
        raise error_type(f"{message} ({type(error).__name__})") from None
