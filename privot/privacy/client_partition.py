"""The division of a data set among simulated clients, by a secret order of its records."""

from __future__ import annotations

import fcntl

from torch import Tensor

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom
from privot.privacy.shard_checkpoint import read_verified, write_shard_checkpoint


def client_partition(dataset: Sensitive, client_index: int, ledger: Ledger) -> Sensitive:
    """Give the records of one client of a data set; their number is not public.

    Args:
        dataset: The whole data set.
        client_index: The client, from 0.
        ledger: The data set's own ledger. Where the clients of the records are not known, records
            are divided by a secret order that is stored beside it, so that every process sees the
            same partition.

    Returns:
        The records of this client.

    Raises:
        SettingError: If there is no such client.

    >>> import tempfile
    >>> from privot.data import load_dataset
    >>> digits = load_dataset("digits", num_clients=5)
    >>> part = client_partition(digits, 0, Ledger(tempfile.mkdtemp() + "/digits.jsonl"))
    >>> part.name, part.spec.size
    ('digits/client 0 of 5', None)
    """
    num_clients = dataset.spec.num_clients or 1
    if not 0 <= client_index < num_clients:
        raise SettingError(
            f"Client {client_index} does not exist: there are {num_clients}, counted from 0."
        )
    client_ids = dataset._client_ids
    if client_ids is None:
        order = load_client_order(ledger, dataset._count_records())
        client_ids = dataset._assign_clients(order.numpy())
    is_of_client = client_ids == client_index
    spec = Spec(
        dataset.spec.shape, dataset.spec.num_classes, flip_invariant=dataset.spec.flip_invariant
    )
    return Sensitive(
        dataset._images[is_of_client],
        dataset._labels[is_of_client],
        spec,
        name=f"{dataset.name}/client {client_index} of {num_clients}",
    )


def load_client_order(ledger: Ledger, num_records: int) -> Tensor:
    """Give the secret order by which the records of a data set are divided among clients.

    privacy: all clients, in whatever process, must see one partition, or a record would have
    several clients. The partition must not depend on the order of a file. So a uniform permutation
    is drawn once for a data set and stored beside the data set's own ledger.

    Args:
        ledger: The data set's own ledger.
        num_records: The number of records. If it has changed since the last call, a new order is
            drawn.

    Returns:
        A permutation, int64 [records].
    """
    file = ledger.path.with_name(f"{ledger.path.name}.dealt.safetensors")
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two processes that start together, one draws
        if file.exists():
            order = read_verified(file)["order"]
            if len(order) == num_records:
                return order
        order = SecretRandom().permutation(num_records)
        write_shard_checkpoint(file, {"order": order})
    return order
