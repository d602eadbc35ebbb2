"""The privacy statement in plain words. It says no more than docs/promise.md."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from privot.data.spec import Spec
from privot.privacy.guarantee import LARGE_EPSILON, Guarantee, NoGuarantee
from privot.report.formatting import (
    clean_text,
    format_odds,
    format_percent,
    format_rounded_up,
)

NEIGHBOURS_TEXT = {
    "replace": (
        "Two datasets are neighbours if one record of the first is replaced by another record in "
        "the second. Both have the same number of records."
    ),
    "add-remove": (
        "Two datasets are neighbours if one of them has one record more than the other."
    ),
    "client": (
        "Two datasets are neighbours if one client holds other records in the second, perhaps more "
        "or fewer. The clients are the same."
    ),
    "local": (
        "Every record is protected on its own, before it leaves its owner. The promise compares "
        "any record with any other record in its place."
    ),
}
NO_GUARANTEE_TEXT = (
    "This release carries no proof of privacy. Treat it like the records it was made from."
)
LARGE_EPSILON_TEXT = (
    f"An epsilon above {LARGE_EPSILON:g} promises little by itself. Read the curve of attack power "
    "below before you rely on it."
)
MAX_EXPONENT = 700  # exp of more overflows
MAX_SHOWN_FACTOR = 1e6


def format_guarantee(guarantee: Guarantee | NoGuarantee) -> str:
    """Format a guarantee as one line.

    >>> format_guarantee(NoGuarantee("no noise was added"))
    'No guarantee: no noise was added'
    """
    if isinstance(guarantee, NoGuarantee):
        return f"No guarantee: {clean_text(guarantee.reason, 300)}"
    epsilon = format_rounded_up(guarantee.epsilon)
    delta = format_rounded_up(guarantee.delta)
    unit = clean_text(guarantee.unit, 40)
    return f"(epsilon {epsilon}, delta {delta})-differential privacy of {unit}"


def build_statement(guarantee: Guarantee | NoGuarantee, spec: Spec) -> dict[str, Any]:
    """State what is promised and what is not.

    Args:
        guarantee: The guarantee.
        spec: What the data owner declared public.

    Returns:
        Sentences: ``promise``, ``neighbours``, ``checks`` and ``not_covered``.
    """
    if isinstance(guarantee, NoGuarantee):
        return {
            "promise": [
                NO_GUARANTEE_TEXT,
                f"The reason: {clean_text(guarantee.reason, 300)}.",
            ],
            "neighbours": "",
            "checks": [],
            "not_covered": [],
        }
    neighbours = NEIGHBOURS_TEXT[guarantee.neighbours]
    if spec.class_sizes is not None:
        neighbours += " Class sizes are declared, so a neighbour keeps the label."
    return {
        "promise": _state_promise(guarantee),
        "neighbours": neighbours,
        "checks": [
            f"Accountant: {clean_text(guarantee.accountant, 60)}. Epsilon was computed from the "
            "events that ran, and again for this page.",
            f"Check by the looser Renyi accountant: {format_rounded_up(guarantee.renyi_epsilon)}.",
        ],
        "not_covered": _list_exclusions(guarantee, spec),
    }


def _state_promise(guarantee: Guarantee) -> list[str]:
    """State what the guarantee means: for probabilities and for attacks."""
    factor = math.exp(min(guarantee.epsilon, MAX_EXPONENT))
    if factor < MAX_SHOWN_FACTOR:
        times = f"{format_rounded_up(factor, 3)} times"
    else:
        times = "more than a million times"
    delta = ""
    if guarantee.delta:
        delta = f", plus {format_rounded_up(guarantee.delta)} ({format_odds(guarantee.delta)})"
    if guarantee.neighbours == "local":
        attack = "test whether a given record was sent"
        targets = "the cases in which it was sent"
    elif guarantee.neighbours == "client":
        attack = "test whether a client holds given records"
        targets = "the clients that do"
    else:
        attack = "membership attack"
        targets = "the records that were used"
    false_positive_rates = _join_words(map(format_percent, map(float, guarantee.max_tpr)))
    true_positive_rates = _join_words(map(format_percent, guarantee.max_tpr.values()))
    promise = [
        f"The unit of privacy is {clean_text(guarantee.unit, 40)}.",
        f"Every event that can be observed in this release has at most {times} (e to the power "
        f"epsilon) the probability that it would have on a neighbouring dataset{delta}.",
        f"At false-positive rates of {false_positive_rates}, no {attack} finds more than "
        f"{true_positive_rates} of {targets}.",
    ]
    if guarantee.epsilon > LARGE_EPSILON:
        promise.append(LARGE_EPSILON_TEXT)
    return promise


def _join_words(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _list_declared_facts(spec: Spec) -> str:
    """List what the data owner declared public."""
    facts = ["the image shape", "the number of classes"]
    if spec.class_names:
        facts.append("the names of the classes")
    if spec.size is not None:
        facts.append("the number of records")
    if spec.class_sizes is not None:
        facts.append("the number of records of each class")
    if spec.num_clients is not None:
        facts.append("the number of clients")
    return ", ".join(facts)


def _list_exclusions(guarantee: Guarantee, spec: Spec) -> list[str]:
    """List what the guarantee does not cover."""
    exclusions = [
        "Facts about the population. What is true with or without any one record may be learned, "
        "also about people who are in the data."
    ]
    if guarantee.unit == "one record":
        exclusions.append(
            f"People with several records: the unit is {clean_text(guarantee.unit, 40)}."
        )
    if guarantee.neighbours == "local":
        exclusions.append(
            "Whether the senders used the channel that they declare. A server only has their word "
            "and their ledgers."
        )
    return [
        *exclusions,
        f"What the owner declared public: {_list_declared_facts(spec)}. Declared numbers are "
        "constants of the promise, even where a neighbour has one record more or less.",
        "Other releases of the same data. Its ledger counts those that used the ledger, and "
        "nothing counts the others. A copy of the data under another name or path has its own "
        "ledger.",
        "Side knowledge. The promise limits what this release adds, not what was known before.",
        "Choices that a person made after looking at the data, such as tuned settings.",
        "Whether the public data of a method contains sensitive records. The two are compared by "
        "name and path only.",
        "Whether loading succeeded. If a file is refused, its owner sees the refusal, and nothing "
        "is released.",
        "Metrics on sensitive data. They are for the owner, not for publication. A metric that was "
        "measured through the gate has its own epsilon, on the data it was measured on.",
        "Running time, memory use and power, and anyone who can read the process or edit the "
        "ledger and its backups.",
    ]
