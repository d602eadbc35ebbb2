"""Checks that a client makes on a request before it opens its gate."""

from __future__ import annotations

from privot.errors import MessageError
from privot.federated.messages import Request, Terms
from privot.privacy.ledger import Ledger


def check_request(request: Request, terms: Terms) -> None:
    """Raise `MessageError` unless the round and the images have the form that the terms state."""
    if request.round >= terms.settings.rounds:
        raise MessageError(f"The terms have {terms.settings.rounds} rounds, counted from 0.")
    shape = [terms.num_classes, terms.settings.batch_per_class, *terms.shape]
    if list(request.images.shape) != shape:
        raise MessageError(
            f"The terms have images of shape {shape}, not {list(request.images.shape)}."
        )


def check_turn(round_number: int, last_round: int, terms: Terms) -> None:
    """Raise `MessageError` unless the client has a turn in this round.

    Args:
        round_number: The round of the request.
        last_round: The last round that the client answered, or -1.
        terms: The agreed terms.
    """
    if last_round > round_number:
        raise MessageError(f"Round {last_round} was answered already; rounds do not go back.")
    rounds_between_turns = terms.settings.count_groups(terms.num_clients)
    if last_round >= 0 and (round_number - last_round) % rounds_between_turns:
        raise MessageError(
            f"This client answered in round {last_round}, so its next turn is round "
            f"{last_round + rounds_between_turns}."
        )


def count_rows(terms: Terms) -> int:
    """Count the images of one request; the client answers one query for each of them."""
    return terms.num_classes * terms.settings.batch_per_class


def format_run_name(terms: Terms) -> str:
    """Format the name under which a ledger lists a run."""
    return f"{terms.settings.name} {terms.run_id[:8]}"


def find_first_asked_ticket(ledger: Ledger, run_name: str) -> int | None:
    """Find the charge of a run under which the first query was marked.

    Args:
        ledger: The ledger of the client.
        run_name: The name of the run, see `format_run_name`.

    Returns:
        The ticket of that charge, or None if no query of the run was marked.
    """
    entries = ledger.entries()
    run_tickets = {
        entry["n"]
        for entry in entries
        if entry["kind"] == "reserve" and entry["method"] == run_name
    }
    for entry in entries:
        if entry["kind"] == "ask" and entry["ticket"] in run_tickets:
            return int(entry["ticket"])
    return None
