"""The processes of ``jax.distributed`` as ranks that save together.

Owns the access to JAX's coordination service: its key-value store keeps the messages between ranks
(`everystep.store.ranks`). No collective is used, and nothing of torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import jax
from jax._src import distributed

from everystep.store.ranks.transport import Ranks


def process_group() -> Ranks | str:
    """All processes of ``jax.distributed``, as a Checkpointer takes them; ``"none"`` for one alone."""
    if jax.process_count() == 1:
        return "none"
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            f"JAX runs as {jax.process_count()} processes, but jax.distributed.initialize was not called: "
            "without it they cannot save together"
        )
    found = _stores.get(id(client))
    if found is None:
        _stores.clear()
        found = _stores[id(client)] = _Store(client)
    return Ranks(jax.process_index(), jax.process_count(), found)


class _Store:
    """The coordination service, with those methods of torch's stores that `MessageStore` calls."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes | None:
        """What is there now; None when nothing is."""
        try:
            found: bytes = self._client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("NOT_FOUND"):
                raise
            return None
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return all(self.get(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Raises a `RuntimeError` if they do not come in time."""
        end = time.monotonic() + timeout.total_seconds()
        for key in keys:
            left = max(1, int((end - time.monotonic()) * 1000))
            self._client.blocking_key_value_get_bytes(key, left)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        raise NotImplementedError("the coordination service has no such thing")

    def add(self, key: str, amount: int) -> int:
        return int(self._client.key_value_increment(key, amount))

    def delete_key(self, key: str) -> None:
        self._client.key_value_delete(key)

    def has_extended_api(self) -> bool:
        return False


_stores: dict[int, _Store] = {}
"""The store of the present client: connections to a store are kept by its identity."""
