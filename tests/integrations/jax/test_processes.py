"""`integrations.jax.processes` without JAX: its store on top of a stand-in for the coordination service."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from everystep.store.ranks.meeting import meeting_for
from everystep.store.ranks.transport import Ranks, join

SOURCE = Path(__file__).parents[3] / "src" / "everystep" / "integrations" / "jax" / "processes.py"


class JaxRuntimeError(RuntimeError):
    pass


class Client:
    """The key-value store of the coordination service, as far as it is used."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._changed:
            assert allow_overwrite or key not in self.entries
            self.entries[key] = value
            self._changed.notify_all()

    def key_value_try_get_bytes(self, key: str) -> bytes:
        if key not in self.entries:
            raise JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
        return self.entries[key]

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.entries, timeout_in_ms / 1000):
                raise JaxRuntimeError("DEADLINE_EXCEEDED: timed out")
            return self.entries[key]

    def key_value_increment(self, key: str, increment: int) -> int:
        with self._changed:
            found = int(self.entries.get(key, b"0")) + increment
            self.entries[key] = str(found).encode()
            self._changed.notify_all()
            return found

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.entries.pop(key, None)


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    state = SimpleNamespace(client=Client())
    found = ModuleType("jax")
    vars(found).update(
        errors=SimpleNamespace(JaxRuntimeError=JaxRuntimeError),
        process_count=lambda: 2,
        process_index=lambda: 0,
    )
    inner = ModuleType("jax._src")
    vars(inner).update(distributed=SimpleNamespace(global_state=state))
    monkeypatch.setitem(sys.modules, "jax", found)
    monkeypatch.setitem(sys.modules, "jax._src", inner)
    return found


@pytest.fixture
def processes(jax: Any) -> Any:
    spec = spec_from_file_location("jax_processes_under_test", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_processes_talk_over_the_coordination_service_and_leave_nothing_in_it(processes: Any) -> None:
    group = processes.process_group()
    assert (group.rank, group.world) == (0, 2)
    assert processes.process_group().store is group.store  # connections to it are kept
    heard: list[Any] = []

    def take_part(ranks: Ranks, name: bytes) -> None:
        transport = join(ranks)
        assert transport is not None
        with meeting_for(transport, "test", 30) as meeting:
            heard.append(meeting.exchange(name))
        transport.close()

    thread = threading.Thread(target=take_part, args=(Ranks(1, 2, group.store), b"one"))
    thread.start()
    take_part(group, b"zero")
    thread.join(30)
    assert heard == [{b"zero": (0,), b"one": (1,)}] * 2
    left = [key for key in group.store._client.entries if "/at/" not in key]
    assert left == []


def test_the_store_waits_for_all_keys_within_one_time(processes: Any) -> None:
    store = processes.process_group().store
    store.set("a", b"1")
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.get("b") is None
    with pytest.raises(RuntimeError, match="DEADLINE"):
        store.wait(["a", "b", "c"], timedelta(seconds=0.05))


def test_other_errors_of_the_service_are_not_taken_for_an_absent_key(processes: Any) -> None:
    store = processes.process_group().store

    def unavailable(key: str) -> bytes:
        raise JaxRuntimeError("UNAVAILABLE: the coordinator is gone")

    store._client.key_value_try_get_bytes = unavailable
    with pytest.raises(JaxRuntimeError, match="UNAVAILABLE"):
        store.check(["a"])


def test_one_process_needs_no_group_and_several_need_the_service(processes: Any, jax: Any) -> None:
    processes.distributed.global_state.client = None
    with pytest.raises(RuntimeError, match=r"jax\.distributed\.initialize was not called"):
        processes.process_group()
    jax.process_count = lambda: 1
    assert processes.process_group() == "none"
