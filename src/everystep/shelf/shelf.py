"""`Shelf`: named arrays and values in a mapped file, and transactions over them.

Owns names, who may change what and when, and shadow copies. A change goes this way:

1. A transaction belongs to the thread that began it. There is one at a time; a second one is an error. Its
   block is native code (`NativeTransaction`): a signal handler that raises cannot leave it half begun or half
   ended.
2. An assignment stores the bytes at once, in space that no committed state uses (`NativeShelf.put`).
3. `writable`, and reading what was assigned in the same transaction, makes a shadow copy in ordinary memory.
   Shadow copies are stored when the transaction ends: whatever was done to them by then counts.
4. The end of the block commits (`NativeShelf.commit`, whose protocol is in ``native/src/shelf.hpp``). An
   exception rolls back: nothing of it was ever visible.
5. A change that fails, or is refused, leaves its entry as it was before that change, shadow copy included.

Arrays that are read outside of a transaction lie on the mapping and are read-only. They keep their bytes
while they live: space is used again only when no array and no reader needs it. `NativeShelf.read` finds an
entry and pins its bytes in one call, so that type and bytes are of one commit, whatever other threads do.
"""

from __future__ import annotations

import errno
import os
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np

from everystep import engine
from everystep.errors import (
    CorruptCheckpoint,
    CorruptShelf,
    ReadFailed,
    SaveFailed,
    ShelfClosed,
    ShelfFull,
    StorageFull,
    TransactionError,
)
from everystep.paths import local_path
from everystep.shelf import entries
from everystep.shelf.entries import require_attribute, to_key
from everystep.shelf.opening import open_core
from everystep.shelf.sizes import ShelfWarning, Usage, to_nbytes
from everystep.store.read.read_errors import read_error

_S = TypeVar("_S", bound="Shelf")


class Shelf:
    """A file of named arrays and values that a crash cannot tear.

    A shelf has one writer at a time, and any number of readers.

    Args:
        path: The file. It is made if it does not exist, unless `mode` is ``"r"``.
        size: What the file may grow to: a number of bytes, or text such as ``"64MiB"``. None: 64 MiB for a
            new shelf, and the size that an existing one was given.
        mode: ``"w"`` reads and writes. ``"r"`` reads the last committed state; `refresh` goes on to a newer
            one.
        verify: Check the checksums of an entry when this process first reads it.

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

    __slots__ = ("__weakref__", "_core", "_path", "_verify", "_writable")

    _core: engine.NativeShelf | None
    _path: str
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
        core = open_core(where, mode == "w", limit, _medium)
        try:
            if limit is not None and self._writable:
                core.set_limit(limit)
            if core.warning:
                warnings.warn(
                    f"the newest commit of the shelf {where} is not complete or is damaged ({core.warning}); "
                    "the one before it is used",
                    ShelfWarning,
                    stacklevel=2,
                )
            _set(self, "_core", core)
            _open_shelves.add(self)
        except BaseException:
            core.close()  # the error's traceback keeps it alive, and with it the lock
            raise

    # --- reading

    def __getitem__(self, name: str) -> Any:
        """The value, or the array on the mapping. In the transaction that changed it, the shadow copy."""
        core = self._opened()
        key = to_key(name)
        transaction = core.mine()
        if transaction is not None:
            shadow = transaction.shadows.get(key, _ABSENT)
            if shadow is not _ABSENT:
                return shadow
            changed = core.changed(key)
            if changed is not None:
                if not changed:
                    raise KeyError(name)
                return self._read_back(key, changed, transaction.shadows)
        kind, meta, _, pin = self._entry(core, name, key)
        return self._decode(name, kind, meta, pin, again=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the shelf {self._path} has no entry {name!r}") from None

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a name.

        Args:
            name: The entry.
            default: What to return if the shelf has no such entry.
        """
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not name:
            return False
        core = self._opened()
        return core.has(name.encode("utf-8", "surrogatepass"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._opened().names())

    def __bool__(self) -> bool:
        return True  # also if it is empty

    def keys(self) -> list[str]:
        return sorted(self._text(name) for name in self._opened().names())

    def _text(self, name: bytes) -> str:
        try:
            return name.decode()
        except UnicodeDecodeError:
            raise CorruptShelf("a name is not text", path=self._path) from None

    def _read_back(
        self, key: bytes, changed: tuple[int, bytes, np.ndarray[Any, Any]], shadows: dict[bytes, Any]
    ) -> Any:
        """What this transaction has assigned: an array comes as its shadow copy."""
        kind, meta, data = changed
        if kind == entries.VALUE:
            return entries.decode_value(meta)
        if kind == entries.ARRAY:
            found = entries.decode_array(entries.array_meta(meta, data.size), data)
            if isinstance(found, np.ndarray):
                found.flags.writeable = True
        else:
            fixed = data.view()
            fixed.flags.writeable = False
            found = entries.decode_packed(meta, fixed, lambda: data)
        if kind == entries.ARRAY or entries.is_tensor(found):  # a parameter is packed
            shadows[key] = found
        return found

    def _entry(
        self, core: engine.NativeShelf, name: str, key: bytes
    ) -> tuple[int, bytes, int, engine.NativePin | None]:
        """Kind, description, generation and pinned data of a committed entry, all of one commit."""
        try:
            found = core.read(key)
        except engine.NativeShelfClosed:
            raise self._closed() from None
        except engine.NativeShelfDamaged as error:
            raise CorruptShelf(str(error), path=self._path, name=name) from None
        except OSError as error:
            raise self._unreadable(name, error) from error
        if found is None:
            raise KeyError(name)
        return found

    def _decode(self, name: str, kind: int, meta: bytes, pin: engine.NativePin | None, *, again: bool) -> Any:
        """The value of an entry. `again`: verify its bytes even if that was done before, or is off."""
        if pin is not None and (self._verify or again):
            damage = pin.damage(again)
            if damage:
                raise CorruptShelf(damage, path=self._path, name=name)
        try:
            if kind == entries.VALUE and pin is None:
                return entries.decode_value(meta)
            if kind == entries.ARRAY:
                if pin is None:
                    return entries.decode_array(entries.array_meta(meta, 0), _NO_BYTES)
                array = entries.array_meta(meta, pin.nbytes)
                # Torch has no read-only tensors: what is done to this one stays in it.
                data = pin.own_view() if array.framework == "torch" else pin.view()
                return entries.decode_array(array, data)
            if kind == entries.PACKED and pin is not None:
                return entries.decode_packed(meta, pin.view(), pin.own_view)
        except (entries.Malformed, CorruptCheckpoint) as error:
            reason = getattr(error, "reason", str(error))
            raise CorruptShelf(reason, path=self._path, name=name) from None
        except OSError as error:
            raise self._unreadable(name, error) from error
        raise CorruptShelf(f"it is of an unknown kind, {kind}", path=self._path, name=name)

    def _unreadable(self, name: str, error: OSError) -> ReadFailed:
        what = f"cannot read {name!r} of the shelf {self._path}: {error.strerror or error}"
        return read_error(what, error.errno, self._path)

    # --- changing

    def __setitem__(self, name: str, value: Any) -> None:
        key = to_key(name)
        core = self._opened()
        transaction = core.mine()
        if transaction is None:
            with self.transaction():
                self._put(core, key, value)
        elif transaction.shadows.get(key, _ABSENT) is not value:  # it is after shelf.a += 1
            self._put(core, key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        require_attribute(name, _RESERVED)
        self[name] = value

    def __delitem__(self, name: str) -> None:
        key = to_key(name)
        core = self._opened()
        if core.mine() is None:
            with self.transaction():
                del self[name]
            return
        if not core.has(key):
            raise KeyError(name)
        core.remove(key)

    def __delattr__(self, name: str) -> None:
        require_attribute(name, _RESERVED)
        try:
            del self[name]
        except KeyError:
            raise AttributeError(f"the shelf {self._path} has no entry {name!r}") from None

    def transaction(self) -> engine.NativeTransaction:
        """A block in which any number of changes become durable together, or not at all.

        Raises `TransactionError` if one is under way, in this thread or another.
        """
        return engine.NativeTransaction(self._opened(), self)

    def writable(self, name: str) -> Any:
        """A copy of an array that can be changed in place. The end of the transaction stores it.

        Args:
            name: An entry that holds a numpy array or a torch tensor.
        """
        transaction = self._opened().mine()
        if transaction is None:
            raise TransactionError(
                f"writable({name!r}) gives a copy that the end of a transaction stores: "
                "call it inside of `with shelf.transaction():`, in the same thread"
            )
        array = self[name]
        if not isinstance(array, np.ndarray) and not entries.is_tensor(array):
            raise TypeError(
                f"the entry {name!r} is no array but of type {type(array).__name__}: "
                "it is not changed in place, but assigned"
            )
        key = to_key(name)
        if transaction.shadows.get(key, _ABSENT) is not array:
            array = entries.copy_of(array)
            transaction.shadows[key] = array
        return array

    def _put(self, core: engine.NativeShelf, key: bytes, value: Any) -> None:
        """Stores a value in the transaction under way, in place of a shadow copy, or changes nothing."""
        try:
            if type(value) is np.ndarray and value.flags.c_contiguous:
                core.put_buffer(key, entries.ARRAY, entries.numpy_meta(value), value)
                return
            text = entries.scalar_text(value)
            if text is not None:
                core.put(key, entries.VALUE, text, 0, 0)
                return
            made = entries.encode(value)
            if isinstance(made.data, bytes):
                core.put_buffer(key, made.kind, made.meta, made.data)
            else:
                core.put(key, made.kind, made.meta, made.data.address, made.data.nbytes)
        except engine.NativeShelfFull as error:
            raise self._full(error) from None
        except engine.NativeShelfClosed:
            raise self._closed() from None
        except OSError as error:
            raise self._failed(error) from error

    # --- transactions, as `NativeTransaction` drives them

    def _commit(self) -> None:
        core = self._opened()
        transaction = core.mine()
        assert transaction is not None
        try:
            while not core.commit():
                key, shadow = next(iter(transaction.shadows.items()))
                self._put(core, key, shadow)
        except engine.NativeShelfFull as error:
            raise self._full(error) from None
        except (ShelfFull, SaveFailed):
            raise
        except OSError as error:
            raise self._failed(error) from error

    def _refuse(self, reason: str) -> None:
        """Says why a transaction cannot begin, or cannot commit."""
        if reason == "closed":
            raise self._closed()
        if reason == "closed inside":
            raise ShelfClosed(f"the shelf {self._path} was closed inside of a transaction, which is undone")
        if reason == "ended":
            raise TransactionError(
                f"this transaction on the shelf {self._path} was not begun, or has ended already. A thread "
                "that ends inside of one undoes it"
            )
        if reason == "failed":
            raise SaveFailed(
                f"an earlier commit to the shelf {self._path} failed ({self._opened().failure}), and whether "
                "it is on the medium is not known. Close the shelf and open it again: it then has that "
                "commit, or the one before"
            )
        if reason == "for reading":
            raise TransactionError(f"the shelf {self._path} was opened for reading; open it without mode='r'")
        if reason == "left elsewhere":
            raise TransactionError(
                f"a transaction on the shelf {self._path} ended in another thread than it began in, "
                "and is undone: end it where it began"
            )
        raise TransactionError(
            f"a transaction on the shelf {self._path} is already under way {reason}; "
            + ("put the changes into one block" if reason == "in this thread" else "wait for it")
        )

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

    def _closed(self) -> ShelfClosed:
        return ShelfClosed(f"the shelf {self._path} is closed")

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
        """For a reader: goes on to the last committed state. Arrays that were read before stay as they are.

        Returns:
            Whether there was a newer state.
        """
        core = self._opened()
        if self._writable:
            return False  # it always has the last state: its own
        try:
            return core.refresh()
        except engine.NativeShelfClosed:
            raise self._closed() from None
        except engine.NativeShelfDamaged as error:
            raise CorruptShelf(str(error), path=self._path) from None

    def verify(self) -> list[CorruptShelf]:
        """Reads every byte of the committed state.

        Returns:
            The errors of all damaged entries: none, as a rule.
        """
        core = self._opened()
        damaged = []
        for key in core.committed_names():
            name = self._text(key)
            try:
                kind, meta, _, pin = self._entry(core, name, key)
                self._decode(name, kind, meta, pin, again=True)
            except KeyError:
                continue  # another thread has removed it meanwhile
            except CorruptShelf as error:
                damaged.append(error)
        return damaged

    def close(self) -> None:
        """Closes the file, and undoes a transaction that is under way. Arrays that were read stay valid."""
        core = self._core
        if core is None:
            return
        if not core.close():
            self._refuse("in another thread")
        _set(self, "_core", None)
        _open_shelves.discard(self)

    def _abandon(self) -> None:
        """In a forked child: the shelf is the parent's."""
        core = self._core
        if core is not None:
            core.abandon()
            _set(self, "_core", None)

    def _opened(self) -> engine.NativeShelf:
        core = self._core
        if core is None:
            raise self._closed()
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
        names = [name for name in self.keys() if name.isidentifier()] if self._core is not None else []
        return [*object.__dir__(self), *names]

    def __reduce__(self) -> Any:
        raise TypeError("a shelf cannot be pickled: send its path, and open it there with mode='r'")


_open_shelves: weakref.WeakSet[Shelf] = weakref.WeakSet()


def _abandon_in_child() -> None:
    """A lock belongs to the open file, which parent and child share: a child that lives on would keep it."""
    for shelf in list(_open_shelves):
        shelf._abandon()
    _open_shelves.clear()


os.register_at_fork(after_in_child=_abandon_in_child)

_set = object.__setattr__
_ABSENT = object()
_NO_BYTES = np.empty(0, np.uint8)
_RESERVED = frozenset(name for name in dir(Shelf) if not name.startswith("_"))
