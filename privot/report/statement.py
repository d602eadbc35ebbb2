"""The privacy statement in plain words. It says no more than docs/promise.md."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from privot.data.spec import Spec
from privot.release import Guarantee, NoGuarantee
from privot.report.formatting import clean, percent, share, up

NEIGHBOURS = {
    "replace": "Two data sets are neighbours when one record of the first is another in the second; both have the same number of records.",
    "add-remove": "Two data sets are neighbours when one of them has one record more than the other.",
    "client": "Two data sets are neighbours when one owner holds other records, perhaps more or fewer, in the second; owners are the same.",
    "local": "Every record is protected on its own, before it meets others: the promise compares any record with any other in its place.",
}


def verdict(claim: Guarantee | NoGuarantee) -> str:
    """One line.

    >>> verdict(NoGuarantee("no noise was added"))
    'No guarantee: no noise was added'
    """
    if isinstance(claim, NoGuarantee):
        return f"No guarantee: {clean(claim.reason, 300)}"
    return f"(epsilon {up(claim.epsilon)}, delta {up(claim.delta)})-differential privacy of {clean(claim.unit, 40)}"


def statement(claim: Guarantee | NoGuarantee, spec: Spec) -> dict[str, Any]:
    """Sentences on what is promised and what is not."""
    if isinstance(claim, NoGuarantee):
        return {
            "promise": [
                "This release carries no proof of privacy. Treat it as you would treat the records it was made from.",
                f"The reason: {clean(claim.reason, 300)}.",
            ],
            "neighbours": "",
            "checks": [],
            "not_covered": [],
        }
    factor = math.exp(min(claim.epsilon, 700))
    times = f"{up(factor, 3)} times" if factor < 1e6 else "more than a million times"
    rest = f", plus {up(claim.delta)} ({share(claim.delta)})" if claim.delta else ""
    attack = "membership attack finds"
    found = "the records that were used"
    if claim.neighbours == "local":
        attack = "test whether a given record was sent finds"
        found = "the times that it was"
    elif claim.neighbours == "client":
        attack = "test whether an owner holds given records finds"
        found = "the owners that do"
    promise = [
        f"The unit of privacy is {clean(claim.unit, 40)}.",
        f"Whatever someone looks for in this release has at most {times} (e to the power epsilon) the probability that it would have on a "
        f"neighbouring data set{rest}.",
        f"At false-alarm rates of {_listed(map(percent, map(float, claim.max_tpr)))}, no {attack} more than "
        f"{_listed(map(percent, claim.max_tpr.values()))} of {found}.",
    ]
    if claim.epsilon > 10:
        promise.append(
            "An epsilon above 10 promises little by itself. Read the curve of attack power below before relying on it."
        )
    same = (
        " Class sizes are declared, so a neighbour keeps the label."
        if spec.class_sizes is not None
        else ""
    )
    return {
        "promise": promise,
        "neighbours": NEIGHBOURS[claim.neighbours] + same,
        "checks": [
            f"Accountant: {clean(claim.accountant, 60)}. Epsilon was computed from the events that ran, and once more for this page.",
            f"Check by the looser Renyi accountant: {up(claim.renyi_epsilon)}.",
        ],
        "not_covered": _outside(claim, spec),
    }


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _outside(claim: Guarantee, spec: Spec) -> list[str]:
    declared = ["the image shape", "the number of classes"]
    declared += ["the names of the classes"] if spec.class_names else []
    declared += ["the number of records"] if spec.size is not None else []
    declared += ["the number of records of each class"] if spec.class_sizes is not None else []
    declared += ["the number of owners"] if spec.owners is not None else []
    local = claim.neighbours == "local"
    word = (
        [
            "That what was sent is what its channel makes: a server has the word of those who sent it, and their ledgers."
        ]
        if local
        else []
    )
    several = (
        [f"People with several records: the unit is {clean(claim.unit, 40)}."]
        if claim.unit == "one record"
        else []
    )
    return [
        "Facts about the population: what holds with or without any one record may be learned, also about people who are in the data.",
        *several,
        *word,
        f"What the owner declared public: {', '.join(declared)}. Declared numbers are constants of the promise, also where a neighbour"
        " has one record more or less.",
        "Other releases of the same data: its ledger counts those made with it, and nobody counts the rest. A copy of the data under"
        " another name or path has a ledger of its own.",
        "Side knowledge: the promise bounds what this release adds to it, not what was known before.",
        "Choices that a person made after looking at the data, such as settings tuned on it.",
        "Whether public data that a method learned from holds sensitive records: the two are compared by name and path alone.",
        "Whether loading succeeded: a file that is refused is refused in front of its owner, and nothing is released.",
        "Numbers measured on sensitive data: they are for the owner, not for publication. One that was bought through a gate has an"
        " epsilon of its own, on the data it was measured on.",
        "Running time, memory use and power, and anyone who can read the process or edit the ledger and its backups.",
    ]
