"""A federation from the command line without Flower's processes: the verbs, owners, gates and ledgers are the real ones."""

from privot.federated import Server, Terms
from privot.methods import make_method
from privot.runtime import Runtime, Streams

TINY_FEDERATION = {
    "rounds": 2,
    "critic_steps": 1,
    "warmup_rounds": 1,
    "critic_batch_size": 4,
    "critic_channels": 4,
    "generator_channels": 4,
    "latent_dim": 4,
    "records_per_critic": 16,
}
TINY_ARGUMENTS = tuple(
    word for key, value in TINY_FEDERATION.items() for word in ("--set", f"{key}={value}")
)


def run_rounds(server, owners, rounds=None):
    """Ask the owners, ``{name: object with reply}``, for consent and then for so many rounds."""
    for name, offer in server.pack_offers().items():
        if name in owners:
            server.receive_consent(name, owners[name].reply(offer))
    while not server.is_finished and (rounds is None or server.round < rounds):
        for name, request in server.pack_requests().items():
            if name in owners:
                server.receive(name, owners[name].reply(request))
        server.end_round()


def simulate_here(monkeypatch, rounds=None):
    """Let `privot federate simulate` play its owners in this process; ``rounds``: and stop after so many."""
    from privot.errors import ReleaseError
    from privot.federated.flower import simulation
    from privot.federated.flower.server_app import Traffic

    def run(cast, server, **_):
        clients = {
            name: cast.build_client(number) for number, name in enumerate(server.client_names)
        }
        run_rounds(server, clients, rounds)
        if not server.is_finished:
            raise ReleaseError("stopped")
        cast.end_unfinished_clients()
        return Traffic()

    monkeypatch.setattr(simulation, "simulate_federation", run)


def serve_here(monkeypatch, owners, run="0123456789abcdef" * 2, shape=(1, 8, 8), classes=3):
    """Let `privot federate client` meet a server in this process, which asks it for all rounds of a run of so many owners."""
    from privot.federated.flower import client_app, supernode

    terms = Terms(
        run,
        make_method("federated-gs-wgan", TINY_FEDERATION | {"noise_multiplier": 8.0}),
        shape,
        classes,
        owners,
    )

    def serve(owner, *_, **__):
        names = [f"owner {number}" for number in range(owners)]
        run_rounds(Server(terms, names, Streams(0, Runtime("cpu"))), {names[0]: owner})

    monkeypatch.setattr(client_app, "build_client_app", lambda owner_of, *_: owner_of(None))
    monkeypatch.setattr(supernode, "run_client_node", serve)
    return terms
