"""The command that creates keys for a trial: federate keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from privot.cli.console import print_json, print_line
from privot.cli.federate import federate_app
from privot.cli.options import Json

DEFAULT_CLIENT_NAMES = [f"hospital-{number}" for number in range(1, 6)]
DEFAULT_SERVER_HOSTS = ["localhost", "127.0.0.1", "::1"]


@federate_app.command("keys")
def _keys_command(
    out: Annotated[Path, typer.Option(help="The new folder for the keys.")],
    client_names: Annotated[
        list[str] | None,
        typer.Option(
            "--client", help="Name of a client; may be repeated; five hospitals if not given."
        ),
    ] = None,
    server_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            help="Host name or address of the server; may be repeated; this machine if not given.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create certificates and keys for a trial.

    In a real federation every party creates its own keys and sends only public keys.
    """
    from privot.federated.flower.keys import (
        CA_FILE,
        NODE_KEYS_FILE,
        SERVER_KEY_FILE,
        make_keys,
    )

    paths = make_keys(
        out, client_names or DEFAULT_CLIENT_NAMES, server_hosts or DEFAULT_SERVER_HOSTS
    )
    if as_json:
        return print_json({name: str(path) for name, path in paths.items()})
    print_line(f"server     --tls {out} --client-keys {out / NODE_KEYS_FILE}")
    for name in paths:
        if name.endswith(".key") and name != SERVER_KEY_FILE:
            print_line(f"client     --ca {out / CA_FILE} --key {out / name}")
