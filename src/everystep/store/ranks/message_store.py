"""Small messages between the ranks of a torch.distributed world, over the process group's store.

Owns the access to the store: keys and bytes, time-outs, and the error when the store is gone. It never uses a
collective, so any thread may send and wait while the training's thread is inside one.

A client of the store serves one call at a time, and some of its calls have no time-out: a host that stopped
without closing its connections would block a caller forever. So each call runs on a connection
with its own thread. Callers wait for it as long as they said. A connection that does not answer is abandoned,
and threads that call at the same time use different ones.

Connections outlive the `MessageStore` that needed them; the next one over the same store uses them again.
TCPStore looks up the name of every host that connects, and all its clients wait for the name server (5 s if
one packet is lost). So a process connects once or twice, not for every save.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

from everystep.engine import forks
from everystep.engine.threads import Latch, start_thread
from everystep.errors import RankFailed

MAX_KEY_LENGTH: Final = 4096
MAX_MESSAGE_NBYTES: Final = (8 << 20) - 16
"""TCPStore drops a connection over which more is sent, or a key of more than 8 KiB."""

ANSWER_SECONDS: Final = 30.0
"""How long a store may take for a call that does not wait. It answers in microseconds, unless a client
connects (see above)."""

_COMPRESSED_FROM: Final = 1 << 14
_MAX_WAIT_SECONDS: Final = 7 * 86_400.0
_KEYS_AT_ONCE: Final = 1024
_IDLE_CONNECTIONS: Final = 2
_PLAIN, _DEFLATED = b"\0", b"\1"
_NOTHING = b"\2"
"""No message begins with it."""
_T = TypeVar("_T")


class MessageTimeout(TimeoutError):
    """No rank posted that in time. The caller knows which rank should have, and raises `RankTimeout`."""


class MessageStore:
    """Messages under keys. The process group's store keeps them until they are forgotten.

    All keys get `prefix`. Any thread may call any method.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._connections = _Connections(store)
        self._prefix = prefix

    @property
    def store(self) -> Any:
        """The process group's store that keeps them; None after `close`."""
        return self._connections.store

    def under(self, prefix: str) -> MessageStore:
        """The same with a longer prefix, over the same connections: they are closed together."""
        made = object.__new__(MessageStore)
        made._connections = self._connections
        made._prefix = f"{self._prefix}/{prefix}"
        return made

    def post(self, key: str, data: bytes) -> None:
        """Leave a message, in place of one that is there already."""
        name, framed = self._name(key), _frame(data)
        self._call(lambda store: store.set(name, framed))

    def has(self, key: str) -> bool:
        """Whether there is a message."""
        name = self._name(key)
        return bool(self._call(lambda store: store.check([name])))

    def read(self, key: str, timeout: float) -> bytes:
        """The message, as soon as there is one; `MessageTimeout` when none comes in that many seconds."""
        name = self._name(key)

        def look(store: Any) -> Any:
            end = time.monotonic() + timeout
            found = None
            while found is None and _wait(store, [name], end - time.monotonic()):
                found = _peek(store, name)  # it may have been removed just now
            return found

        found = self._call(look, timeout)
        if found is None:
            raise MessageTimeout(f"nothing under {key!r} within {timeout:g} s")
        return _unframe(found, key)

    def collect(self, keys: Sequence[str], timeout: float) -> dict[str, bytes]:
        """All these messages as soon as they are there; after that many seconds, those that are."""
        names = [self._name(key) for key in keys]
        if not names:
            return {}

        def look(store: Any) -> dict[str, Any]:
            end = time.monotonic() + timeout
            found: dict[str, Any] = {}
            for at in range(0, len(names), _KEYS_AT_ONCE):
                part = names[at : at + _KEYS_AT_ONCE]
                if timeout > 0 and _wait(store, part, end - time.monotonic()):
                    found.update(zip(part, _get(store, part), strict=True))
                else:  # any may be removed at this moment, and `get` would wait for it
                    peeked = {name: _peek(store, name) for name in part}
                    found.update({name: value for name, value in peeked.items() if value is not None})
            return found

        found = self._call(look, timeout)
        return {
            key: _unframe(found[name], key) for key, name in zip(keys, names, strict=True) if name in found
        }

    def count(self, key: str, amount: int = 1) -> int:
        """Add to a number that starts as 0; what it is now. Such a key holds no message."""
        name = self._name(key)
        return int(self._call(lambda store: store.add(name, amount)))

    def forget(self, keys: Iterable[str]) -> bool:
        """Remove messages and numbers; False when this kind of store cannot, and keeps them."""
        names = [self._name(key) for key in keys]

        def remove(store: Any) -> bool:
            for name in names:
                try:
                    store.delete_key(name)
                except RuntimeError as error:
                    if not _lacks(error):
                        raise
                    return False
            return True

        return not names or self._call(remove)

    def close(self) -> None:
        """No more calls. Those that are under way come to their end."""
        self._connections.close()

    def _name(self, key: str) -> str:
        name = f"{self._prefix}/{key}"
        if len(name) > MAX_KEY_LENGTH:
            raise ValueError(f"a key of {len(name)} characters: {name[:80]}...")
        return name

    def _call(self, function: Callable[[Any], _T], timeout: float = 0.0) -> _T:
        return self._connections.call(function, _bounded(timeout) + ANSWER_SECONDS)


class _Connections:
    """The connections of some `MessageStore`: as many as there are calls at the same time."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._pool = _pool_of(store)
        self._lock = threading.Lock()
        self._closed = False
        self._lost = ""

    def call(self, function: Callable[[Any], _T], seconds: float) -> _T:
        with self._lock:
            if self._closed:
                raise RuntimeError("the message store is closed")
            if self._lost:
                # Hosts do not come back, and trying to connect to one takes long.
                raise _unreachable(self._lost)
            store = self.store
        connection = self._pool.take()
        try:
            result = connection.call(store, function, seconds)
        except _Lost as error:
            connection.close()
            self._lost = str(error)
            raise _unreachable(self._lost) from error.__cause__
        except BaseException:
            connection.close()
            raise
        self._pool.keep(connection)
        return result

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.store = None


class _Pool:
    """The connections to one store that are not in use; a few are kept for as long as the store is there."""

    def __init__(self) -> None:
        self.forks = forks()
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._closed = False

    def take(self) -> _Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Connection()

    def keep(self, connection: _Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


_pools: MutableMapping[Any, _Pool] = weakref.WeakKeyDictionary()
_pools_lock = threading.Lock()


def _pool_of(store: Any) -> _Pool:
    with _pools_lock:
        pool = _pools.get(store)
        if pool is None or pool.forks != forks():  # the threads of a parent do not live in its child
            pool = _pools[store] = _Pool()
            weakref.finalize(store, pool.close)
        return pool


class _Connection:
    """A connection to the store, and the thread that speaks over it.

    It holds on to its own connection, not to the store: that must go when the process group does, as its port
    is to be free then.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Any, Callable[[Any], Any], _Answer] | None] = queue.SimpleQueue()
        # A daemon: it may be stuck in a call that never returns.
        start_thread(self._speak, "everystep-messages", daemon=True)

    def call(self, store: Any, function: Callable[[Any], _T], seconds: float) -> _T:
        """The function's result. Whatever goes wrong in it is the store's failure."""
        answer = _Answer()
        self._jobs.put((store, function, answer))
        if not answer.there.wait(seconds):
            raise _unreachable(f"it did not answer for {seconds:.0f} s")
        if answer.error is not None:
            if isinstance(answer.error, (RuntimeError, OSError, ValueError)):
                raise _Lost(str(answer.error).split("\n")[0][:200]) from answer.error
            raise answer.error
        result: _T = answer.result
        return result

    def close(self) -> None:
        """No more calls; the thread ends after the one that is under way."""
        self._jobs.put(None)

    def _speak(self) -> None:
        connection: Any = None
        while (job := self._jobs.get()) is not None:
            store, function, answer = job
            try:
                if connection is None:
                    connection = _connect(store)
                answer.result = function(connection)
            except BaseException as error:  # told to the thread that asked
                answer.error = error
            if connection is store:
                connection = None
            answer.there.set()
            del job, store, function, answer


class _Lost(Exception):
    """A connection failed."""


class _Answer:
    def __init__(self) -> None:
        self.there = Latch()
        self.result: Any = None
        self.error: BaseException | None = None


def _connect(store: Any) -> Any:
    """A connection of our own; the store itself if it has no such thing."""
    try:
        return store.clone()
    except AttributeError:
        return store
    except RuntimeError as error:
        if not _lacks(error):
            raise
        return store


def _lacks(error: RuntimeError) -> bool:
    """Whether it says that this kind of store cannot do such a thing (stores written in Python may not)."""
    return isinstance(error, NotImplementedError) or "pure virtual" in str(error)


def _wait(store: Any, names: Sequence[str], timeout: float) -> bool:
    """Whether all these keys are there, waiting that long for them."""
    if timeout <= 0:
        return bool(store.check(names))
    try:
        # A time-out of zero would mean for ever.
        store.wait(names, timedelta(seconds=max(0.001, _bounded(timeout))))
    except RuntimeError:
        # Time-outs have no type of their own, in some stores not even a known text. One that still answers
        # has timed out.
        return bool(store.check(names))
    return True


def _peek(store: Any, name: str) -> Any:
    """What is there; None when nothing is. (`get` would wait for it.)"""
    try:
        found = store.compare_set(name, _NOTHING, _NOTHING)
    except RuntimeError as error:
        if not _lacks(error):
            raise
        return store.get(name)
    return None if bytes(found) == _NOTHING else found


def _get(store: Any, names: Sequence[str]) -> Sequence[Any]:
    if len(names) > 1 and store.has_extended_api():
        found: Sequence[Any] = store.multi_get(names)
        return found
    return [store.get(name) for name in names]


def _bounded(timeout: float) -> float:
    """Stores count milliseconds in numbers that overflow; no call waits longer than this."""
    return min(max(0.0, timeout), _MAX_WAIT_SECONDS)


def _frame(data: bytes) -> bytes:
    """Never empty: an empty value is none to some stores."""
    framed = _PLAIN + data
    if len(data) >= _COMPRESSED_FROM:
        framed = min(framed, _DEFLATED + zlib.compress(data, 1), key=len)
    if len(framed) > MAX_MESSAGE_NBYTES:
        raise ValueError(
            f"a message of {len(framed):,} bytes is too large: the process group's store takes "
            f"{MAX_MESSAGE_NBYTES:,}"
        )
    return framed


def _unframe(framed: bytes, key: str) -> bytes:
    try:
        if framed[:1] == _DEFLATED:
            return zlib.decompress(framed[1:])
        if framed[:1] == _PLAIN:
            return bytes(framed[1:])
    except zlib.error as error:
        raise RankFailed(f"cannot decode the message {key!r}: {error}") from error
    raise RankFailed(f"cannot decode the message {key!r}: it begins with {framed[:8]!r}")


def _unreachable(reason: str) -> RankFailed:
    return RankFailed(
        "the process group's store cannot be reached: its host (rank 0 or the launcher) has ended or is "
        f"disconnected ({reason})"
    )
