"""A federation from the command line without Flower's processes: the verbs, owners, gates and ledgers are the real ones."""

from privot.federated import Server, Terms
from privot.methods import make
from privot.runtime import Runtime, Streams

TINY = {
    "rounds": 2,
    "lessons": 1,
    "warm": 1,
    "critic_batch": 4,
    "width": 4,
    "channels": 4,
    "code": 4,
    "records": 16,
}
SETS = tuple(word for key, value in TINY.items() for word in ("--set", f"{key}={value}"))


def play(server, owners, rounds=None):
    """Ask the owners, ``{name: object with reply}``, for consent and then for so many rounds."""
    for name, offer in server.offers().items():
        if name in owners:
            server.accept(name, owners[name].reply(offer))
    while not server.done and (rounds is None or server.round < rounds):
        for name, request in server.ask().items():
            if name in owners:
                server.take(name, owners[name].reply(request))
        server.close()


def simulate_here(monkeypatch, rounds=None):
    """Let `privot federate simulate` play its owners in this process; ``rounds``: and stop after so many."""
    from privot.errors import ReleaseError
    from privot.federated.flower import simulation
    from privot.federated.flower.server_app import Traffic

    def run(cast, server, **_):
        play(server, {name: cast.owner(number) for number, name in enumerate(server.names)}, rounds)
        if not server.done:
            raise ReleaseError("stopped")
        cast.over()
        return Traffic()

    monkeypatch.setattr(simulation, "simulate", run)


def serve_here(monkeypatch, owners, run="0123456789abcdef" * 2, shape=(1, 8, 8), classes=3):
    """Let `privot federate client` meet a server in this process, which asks it for all rounds of a run of so many owners."""
    from privot.federated.flower import client_app, supernode

    terms = Terms(run, make("federated-gs-wgan", TINY | {"noise": 8.0}), shape, classes, owners)

    def serve(owner, *_, **__):
        names = [f"owner {number}" for number in range(owners)]
        play(Server(terms, names, Streams(0, Runtime("cpu"))), {names[0]: owner})

    monkeypatch.setattr(client_app, "client_app", lambda owner_of, *_: owner_of(None))
    monkeypatch.setattr(supernode, "serve", serve)
    return terms
