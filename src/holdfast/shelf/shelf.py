"""`Shelf`: named arrays and values in a mapped file, and transactions over them.

Owns names, who may change what and when, and shadow copies. A change goes this way:

1. A transaction belongs to the thread that began it. There is one at a time; a second one is an error.
2. An assignment stores the bytes at once, in space that no committed state uses (`NativeShelf.put`).
3. `writable`, and reading what was assigned in the same transaction, makes a shadow copy in ordinary memory.
   Shadow copies are stored when the transaction ends: whatever was done to them by then counts.
4. The end of the block commits (`NativeShelf.commit`, whose protocol is in ``native/src/shelf.hpp``). An
   exception rolls back: nothing of it was ever visible.

Arrays that are read outside of a transaction lie on the mapping and are read-only. They keep their bytes
while they live: space is used again only when no array and no reader needs it.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np

from holdfast import engine
from holdfast.errors import (
    CorruptCheckpoint,
    CorruptShelf,
    SaveFailed,
    ShelfClosed,
    ShelfFull,
    StorageFull,
    TransactionError,
)
from holdfast.paths import local_path
from holdfast.shelf import entries
from holdfast.shelf.naming import require_attribute, to_key
from holdfast.shelf.opening import open_core, open_shelves
from holdfast.shelf.sizes import to_nbytes
from holdfast.shelf.transaction import Transaction
from holdfast.shelf.usage import ShelfWarning, Usage

_S = TypeVar("_S", bound="Shelf")


class Shelf:
    """A file of named arrays and values that a crash cannot tear.

    `size` is what the file may grow to, as a number of bytes or as text ("64MiB"): 64 MiB for a new shelf,
    and what it had for an old one. ``mode="r"`` reads the last committed state; `refresh` goes on to a newer
    one. A shelf has one writer at a time, and any number of readers. `verify`: check the checksums of an
    entry when this process reads it for the first time.

    >>> import numpy as np, tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "fit.shelf")
    >>> with Shelf(path, size="1MiB") as shelf:
    ...     shelf.centers = np.zeros((2, 3))
    ...     with shelf.transaction():
    ...         shelf.writable("centers")[0] = 1.0
    ...         shelf["n_iter"] = 3
    >>> with Shelf(path, mode="r") as shelf:
    ...     sorted(shelf), shelf.n_iter, shelf.centers[:, 0].tolist()
    (['centers', 'n_iter'], 3, [1.0, 0.0])
    """

    __slots__ = (
        "__weakref__",
        "_checked",
        "_core",
        "_lock",
        "_owner",
        "_path",
        "_shadows",
        "_transaction",
        "_verify",
        "_writable",
    )

    _checked: dict[str, tuple[int, int]]
    _core: engine.NativeShelf | None
    _lock: threading.Lock
    _owner: int
    _path: str
    _shadows: dict[str, Any]
    _transaction: Transaction | None
    _verify: bool
    _writable: bool

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int | str | None = None,
        *,
        mode: Literal["r", "w"] = "w",
        verify: bool = True,
        _medium: str = "",
    ) -> None:
        if mode not in ("r", "w"):
            raise ValueError(f"mode must be 'r' or 'w', not {mode!r}")
        local_path(path)
        where = os.fspath(path)
        limit = None if size is None else to_nbytes(size)
        _set(self, "_core", None)
        _set(self, "_path", where)
        _set(self, "_writable", mode == "w")
        _set(self, "_verify", verify)
        _set(self, "_transaction", None)
        _set(self, "_owner", 0)
        _set(self, "_lock", threading.Lock())
        _set(self, "_shadows", {})
        # What this process has verified: name -> (offset, generation) of its data.
        _set(self, "_checked", {})
        core = open_core(where, mode == "w", limit, _medium)
        if core.warning:
            warnings.warn(
                f"the newest commit of the shelf {where} is not complete or is damaged ({core.warning}); "
                "the one before it is used",
                ShelfWarning,
                stacklevel=2,
            )
        _set(self, "_core", core)
        open_shelves.add(self)

    # --- reading

    def __getitem__(self, name: str) -> Any:
        """The value, or the array on the mapping. In the transaction that changed it, the shadow copy."""
        core = self._opened()
        key = to_key(name)
        if self._transaction is not None and self._owner == threading.get_ident():
            shadow = self._shadows.get(name)
            if shadow is not None:
                return shadow
            changed, found = core.changed(key)
            if changed:
                if found is None:
                    raise KeyError(name)
                return self._read_back(name, key, found)
        found = core.find(key)
        if found is None:
            raise KeyError(name)
        return self._decode(name, key, found)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the shelf {self._path} has no entry {name!r}") from None

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a name, or `default` if the shelf does not have it."""
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not name:
            return False
        core = self._opened()
        key = name.encode("utf-8", "surrogatepass")
        if self._transaction is not None and self._owner == threading.get_ident():
            changed, found = core.changed(key)
            if changed:
                return found is not None
        return core.has(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names()) if self._transaction is not None else self._opened().usage()[0]

    def __bool__(self) -> bool:
        return True  # an empty shelf is one, too

    def keys(self) -> list[str]:
        return self._names()

    def _names(self) -> list[str]:
        core = self._opened()
        found = {self._text(name) for name in core.names()}
        if self._transaction is not None and self._owner == threading.get_ident():
            found = (found - self._transaction.removed) | self._transaction.assigned
        return sorted(found)

    def _text(self, name: bytes) -> str:
        try:
            return name.decode()
        except UnicodeDecodeError:
            raise CorruptShelf("a name is not text", path=self._path) from None

    def _read_back(self, name: str, key: bytes, found: tuple[int, bytes, int, int, int]) -> Any:
        """What this transaction has assigned: an array comes as its shadow copy."""
        kind, meta, nbytes, _, _ = found
        data = np.empty(nbytes, np.uint8)
        self._opened().copy_changed(key, data.ctypes.data)
        if kind == entries.VALUE:
            return entries.decode_value(meta)
        if kind == entries.ARRAY:
            shadow = entries.decode_array(entries.array_meta(meta, nbytes), data)
            if isinstance(shadow, np.ndarray):
                shadow.flags.writeable = True
            self._shadows[name] = shadow
            return shadow
        fixed = data.view()
        fixed.flags.writeable = False
        return entries.decode_packed(meta, fixed, lambda: data)

    def _decode(self, name: str, key: bytes, found: tuple[int, bytes, int, int, int]) -> Any:
        kind, meta, nbytes, offset, born = found
        core = self._opened()
        if nbytes and self._verify and self._checked.get(name) != (offset, born):
            damage = core.damage(key)
            if damage:
                raise CorruptShelf(damage, path=self._path, name=name)
            self._checked[name] = (offset, born)
        try:
            if kind == entries.VALUE and not nbytes:
                return entries.decode_value(meta)
            if kind == entries.ARRAY:
                array = entries.array_meta(meta, nbytes)
                if not nbytes:
                    return entries.decode_array(array, _NO_BYTES)
                # Torch has no read-only tensors: what is done to this one stays in it.
                data = core.own_view(key) if array.framework == "torch" else core.view(key)
                return entries.decode_array(array, data)
            if kind == entries.PACKED and nbytes:
                return entries.decode_packed(meta, core.view(key), lambda: core.own_view(key))
        except (entries.Malformed, CorruptCheckpoint) as error:
            reason = getattr(error, "reason", str(error))
            raise CorruptShelf(reason, path=self._path, name=name) from None
        raise CorruptShelf(f"it is of an unknown kind, {kind}", path=self._path, name=name)

    # --- changing

    def __setitem__(self, name: str, value: Any) -> None:
        key = to_key(name)
        transaction = self._transaction
        if transaction is None:
            with self.transaction() as transaction:
                self._put(name, key, value, transaction)
        else:
            self._require_owner()
            self._put(name, key, value, transaction)

    def __setattr__(self, name: str, value: Any) -> None:
        require_attribute(name, _RESERVED)
        self[name] = value

    def __delitem__(self, name: str) -> None:
        key = to_key(name)
        if self._transaction is None:
            with self.transaction():
                del self[name]
            return
        self._require_owner()
        if name not in self:
            raise KeyError(name)
        self._opened().remove(key)
        self._transaction.assigned.discard(name)
        self._transaction.removed.add(name)
        self._shadows.pop(name, None)

    def __delattr__(self, name: str) -> None:
        require_attribute(name, _RESERVED)
        try:
            del self[name]
        except KeyError:
            raise AttributeError(f"the shelf {self._path} has no entry {name!r}") from None

    def transaction(self) -> Transaction:
        """A block in which any number of changes become durable together, or not at all.

        Raises `TransactionError` if one is under way, in this thread or another.
        """
        return Transaction(self)

    def writable(self, name: str) -> Any:
        """A copy of an array that can be changed in place; the end of the transaction stores it."""
        transaction = self._transaction
        if transaction is None:
            raise TransactionError(
                f"writable({name!r}) gives a copy that the end of a transaction stores: "
                "call it inside of `with shelf.transaction():`"
            )
        self._require_owner()
        array = self[name]
        if not isinstance(array, np.ndarray) and not entries.is_tensor(array):
            raise TypeError(
                f"the entry {name!r} is no array but of type {type(array).__name__}: "
                "it is not changed in place, but assigned"
            )
        if self._shadows.get(name) is not array:
            array = entries.copy_of(array)
            self._shadows[name] = array
            transaction.assigned.add(name)
            transaction.removed.discard(name)
        return array

    def _put(self, name: str, key: bytes, value: Any, transaction: Transaction) -> None:
        if self._shadows:
            if self._shadows.get(name) is value:
                return  # shelf.a += 1: the shadow copy itself
            self._shadows.pop(name, None)
        core = self._opened()
        try:
            if type(value) is np.ndarray and value.flags.c_contiguous:
                core.put_buffer(key, entries.ARRAY, entries.numpy_meta(value), value)
            else:
                text = entries.scalar_text(value)
                if text is not None:
                    core.put(key, entries.VALUE, text, 0, 0)
                else:
                    self._put_other(core, key, value)
        except engine.NativeShelfFull as error:
            raise self._full(error) from None
        except OSError as error:
            raise self._failed(error) from error
        transaction.assigned.add(name)
        transaction.removed.discard(name)

    def _put_other(self, core: engine.NativeShelf, key: bytes, value: Any) -> None:
        made = entries.encode(value)
        if isinstance(made.data, bytes):
            core.put_buffer(key, made.kind, made.meta, made.data)
        else:
            core.put(key, made.kind, made.meta, made.data.address, made.data.nbytes)

    # --- transactions, as `Transaction` drives them

    def _begin(self, transaction: Transaction) -> None:
        core = self._opened()
        if not self._writable:
            raise TransactionError(f"the shelf {self._path} was opened for reading; open it without mode='r'")
        if not self._lock.acquire(blocking=False):
            mine = self._owner == threading.get_ident()
            raise TransactionError(
                f"a transaction on the shelf {self._path} is already under way "
                + (
                    "in this thread; put the changes into one block"
                    if mine
                    else "in another thread; wait for it"
                )
            )
        if core.failure:
            self._lock.release()
            raise SaveFailed(
                f"an earlier commit to the shelf {self._path} failed ({core.failure}), and whether it is on "
                "the medium is not known. Close the shelf and open it again: it then has that commit, "
                "or the one before"
            )
        _set(self, "_transaction", transaction)
        _set(self, "_owner", threading.get_ident())

    def _commit(self, transaction: Transaction) -> None:
        core = self._opened()
        try:
            for name in list(self._shadows):
                shadow = self._shadows.pop(name)
                self._put(name, to_key(name), shadow, transaction)
            core.commit()
        except engine.NativeShelfFull as error:
            raise self._full(error) from None
        except (ShelfFull, SaveFailed):
            raise
        except OSError as error:
            raise self._failed(error) from error
        finally:
            self._end()

    def _end(self) -> None:
        """Whatever was not committed is undone."""
        core = self._core
        if core is not None:
            core.rollback()
        self._shadows.clear()
        _set(self, "_transaction", None)
        _set(self, "_owner", 0)
        self._lock.release()

    def _full(self, error: Exception) -> ShelfFull:
        full = ShelfFull(
            f"the shelf {self._path} is full: {error}. The last commit is as it was. Open it with a larger "
            "size, delete entries, or let go of arrays that were read before"
        )
        full.errno = errno.ENOSPC
        return full

    def _failed(self, cause: OSError) -> SaveFailed:
        """The typed error of a store or sync that failed."""
        core = self._core
        unknown = core is not None and core.failure
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        failed = (StorageFull if full and not unknown else SaveFailed)(
            f"a change to the shelf {self._path} failed: {cause.strerror or cause}. "
            + (
                "Whether it is on the medium is not known: open the shelf again, it then has this change or "
                "the commit before"
                if unknown
                else "The last commit is as it was"
            )
        )
        failed.errno = cause.errno
        return failed

    def _require_owner(self) -> None:
        if self._owner != threading.get_ident():
            raise TransactionError(
                f"another thread has a transaction on the shelf {self._path} under way; wait for it"
            )

    # --- the whole

    @property
    def path(self) -> str:
        return self._path

    @property
    def medium(self) -> str:
        """ "page cache" (synced files), "memory" (tmpfs: lost with the machine) or "persistent memory"."""
        return self._opened().medium

    @property
    def usage(self) -> Usage:
        return Usage(*self._opened().usage())

    @property
    def generation(self) -> int:
        """The number of the commit that is read."""
        return self._opened().usage()[5]

    def refresh(self) -> bool:
        """For a reader: go on to the last committed state. Whether there was a newer one.

        Arrays that were read before keep what they hold.
        """
        core = self._opened()
        if self._writable:
            return False  # it always has the last state: its own
        try:
            return core.refresh()
        except engine.NativeShelfDamaged as error:
            raise CorruptShelf(str(error), path=self._path) from None

    def verify(self) -> list[CorruptShelf]:
        """Reads every byte; the errors of all damaged entries."""
        core = self._opened()
        found = []
        for key in core.names():
            name = self._text(key)
            entry = core.find(key)
            assert entry is not None
            try:
                self._checked.pop(name, None)
                self._decode(name, key, entry)
            except CorruptShelf as error:
                found.append(error)
        return found

    def close(self) -> None:
        """Arrays that were read stay valid. What a transaction under way has changed is undone."""
        core = self._core
        if core is None:
            return
        if self._transaction is not None:
            self._require_owner()
            self._end()
        _set(self, "_core", None)
        open_shelves.discard(self)
        core.close()

    def _abandon(self) -> None:
        """In a forked child: the shelf is the parent's."""
        core = self._core
        if core is not None:
            core.abandon()
            _set(self, "_core", None)

    def _opened(self) -> engine.NativeShelf:
        core = self._core
        if core is None:
            raise ShelfClosed(f"the shelf {self._path} is closed")
        return core

    def __enter__(self: _S) -> _S:
        self._opened()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        core = self._core
        if core is None:
            return f"<Shelf {self._path!r}, closed>"
        return f"<Shelf {self._path!r}, {len(core.names())} entries, {core.medium}>"

    def __dir__(self) -> list[str]:
        names = [name for name in self._names() if name.isidentifier()] if self._core is not None else []
        return [*object.__dir__(self), *names]

    def __reduce__(self) -> Any:
        raise TypeError("a shelf cannot be pickled: send its path, and open it there with mode='r'")


_set = object.__setattr__
_NO_BYTES = np.empty(0, np.uint8)
_RESERVED = frozenset(name for name in dir(Shelf) if not name.startswith("_"))
