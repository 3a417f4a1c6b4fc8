"""Reads pickles without running code.

A pickle is a program that may call anything Python can import. This machine imports and calls nothing: a
class or function in a pickle is only a `ClassName`, and the caller gives a table of what each name makes of
its arguments. Objects of the names in a second list become an `InertObject`. Any other name is an error that
says which, and where in the object it stands as far as that is known.

The opcodes are those of Python's own unpickler, of protocols 2 to 5. This module replaces those that look up
a name, call something or change an object. It also owns the limits: the number of opcodes (and with it of
objects, since none makes more than one), the length of integers, and what may be a key (hashing nested tuples
that share their parts could take forever). The objects of a pickle may share parts or contain themselves, so
code that walks them needs limits of its own.
"""

from __future__ import annotations

import datetime
import io
import pickle
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np

from everystep.errors import CorruptCheckpoint, UnsupportedSource
from everystep.universal.torch_file.torch_values import TorchDevice, TorchDtype

MAX_PICKLE_NBYTES = 256 << 20
MAX_OPCODES = 64_000_000
_MAX_INTEGER_NBYTES = 1024
_MAX_KEY_INTEGER = 1 << 60
_MAX_KEY_PARTS = 256
_MAX_KEY_DEPTH = 16


@dataclass(frozen=True, slots=True)
class ClassName:
    """A class or function that a pickle mentions."""

    text: str


@dataclass(eq=False, slots=True)
class InertObject:
    """An object of a class that is only known by name: what it was made of, and its attributes."""

    name: str
    args: tuple[Any, ...] = ()
    state: object = None
    items: dict[Any, Any] = field(default_factory=dict)

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes of an ordinary object; empty if its state is of another form."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0] or {}, dict):
            merged: dict[str, Any] = dict(state[0] or {})
            if isinstance(state[1], dict):
                merged.update(state[1])
            return merged
        return state if isinstance(state, dict) else {}


class Refused(ValueError):
    """Raised by makers and setters: this is a proper pickle, of something that cannot be kept exactly."""


Maker = Callable[..., Any]
Setter = Callable[[Any, Any], None]


_KEY_TYPES = (
    *(str, bytes, float, np.number, np.bool_, np.character, np.datetime64, np.timedelta64),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone, PurePath),
    *(TorchDtype, TorchDevice, ClassName, InertObject),
)


def checked_key(key: Any) -> Any:
    """A key, or a member of a set, whose hash takes bounded time; `Refused` for any other.

    Hashes of nested tuples that share parts do not, nor do dictionaries of many integers with one hash.
    """
    _check_key(key, 0, 0)
    return key


def _check_key(key: Any, depth: int, parts: int) -> int:
    if isinstance(key, (tuple, frozenset)):
        if depth >= _MAX_KEY_DEPTH:
            raise Refused("a key that is a deeply nested tuple")
        for one in key:
            parts = _check_key(one, depth + 1, parts + 1)
            if parts > _MAX_KEY_PARTS:
                raise Refused("a key that is a long or nested tuple")
    elif isinstance(key, int):
        if abs(key) > _MAX_KEY_INTEGER:
            raise Refused("a key that is an integer beyond 2**60")
    elif isinstance(key, (complex, np.complexfloating)):
        raise Refused("a key that is a complex number")
    elif key is not None and not isinstance(key, _KEY_TYPES):
        raise Refused(f"a key that is {_kind(key)}")
    return parts


_MARK = object()
_PurePython: Any = pickle._Unpickler


class PickleMachine(_PurePython):  # type: ignore[misc]
    """One pickle, from its bytes to objects.

    `makers` maps a name to a function that is called with the arguments that the pickle gives, `values` a
    name to what it stands for, `setters` the type of an object to a function that gives it a state. `inert`
    names become records. `persistent` answers persistent ids (torch: storages).
    """

    def __init__(
        self,
        data: bytes,
        *,
        path: str,
        makers: Mapping[str, Maker],
        values: Mapping[str, object],
        setters: Mapping[type, Setter],
        inert: Collection[str] = (),
        persistent: Callable[[object], object] | None = None,
    ) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")  # of Python 2's texts; torch.load decodes them so
        self.path = path
        self._data = data
        self._makers = makers
        self._values = values
        self._setters = setters
        self._inert = inert
        self._persistent = persistent

    def call(self, function: object, args: object) -> Any:
        """What the table makes of a name and arguments; for makers that get a function as an argument."""
        if not isinstance(function, ClassName):
            raise self._corrupt(f"the pickle calls {_kind(function)}, which is not a class or function")
        if not isinstance(args, tuple):
            raise self._corrupt(f"the pickle calls {function.text} with {_kind(args)}")
        maker = self._makers.get(function.text)
        if maker is None:
            if function.text in self._inert:
                return InertObject(function.text, args)
            raise self._refuse(function.text)
        try:
            return maker(*args)
        except (CorruptCheckpoint, UnsupportedSource):
            raise
        except Refused as error:
            raise self._unsupported(str(error)) from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
            raise self._corrupt(f"{function.text} has arguments that do not fit: {error}") from error

    def run(self) -> Any:
        """The object that the pickle describes."""
        if len(self._data) > MAX_PICKLE_NBYTES:
            raise UnsupportedSource(
                f"{self.path}: a pickle of {len(self._data)} bytes is above the limit of {MAX_PICKLE_NBYTES}"
            )
        file = io.BytesIO(self._data)
        self.read = read = file.read
        self.readline = file.readline
        stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.stack, self.append = stack, stack.append
        try:
            for _ in range(MAX_OPCODES):
                code = read(1)
                if code == pickle.STOP:
                    if len(self.stack) != 1 or self.metastack:
                        raise self._corrupt("the pickle ends with objects left over")
                    return self.stack[0]
                step = _STEPS.get(code)
                if step is None:
                    raise self._unknown(code, file.tell() - 1)
                step(self)
        except (IndexError, struct.error):
            raise self._corrupt(f"the pickle ends early or is damaged at byte {file.tell()}") from None
        except (UnicodeDecodeError, KeyError, pickle.UnpicklingError) as error:
            raise self._corrupt(f"the pickle is damaged at byte {file.tell()}: {error}") from None
        raise UnsupportedSource(f"{self.path}: the pickle has more than {MAX_OPCODES} opcodes")

    def find_class(self, module: str, name: str) -> object:
        """Looks a name up in the tables; nothing is imported."""
        text = f"{module}.{name}"
        # Python 2 names of what Python 3 moved; pickles of protocol 2 use them.
        text = _OLD_NAMES.get(text, text)
        if text in self._values:
            return self._values[text]
        if text in self._makers or text in self._inert:
            return ClassName(text)
        raise self._refuse(text)

    def persistent_load(self, key: object) -> object:
        if self._persistent is None:
            raise UnsupportedSource(f"{self.path}: the pickle refers to an object outside of it")
        return self._persistent(key)

    # --- errors

    def _corrupt(self, reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(reason, path=self.path)

    def _refuse(self, name: str) -> UnsupportedSource:
        where = self._place(self._flat_stack())
        return UnsupportedSource(
            f"{self.path}: the file contains {name[:200]!r}{where}, which is not on the list of known "
            "classes. Nothing of it was run. Save the file again with tensors and plain values only"
        )

    def _unsupported(self, what: str, *, of_top: bool = False) -> UnsupportedSource:
        """`of_top`: it is about the object on top of the stack, not about the one that comes next."""
        stack = self._flat_stack()
        where = self._place(stack[:-1] if of_top else stack)
        return UnsupportedSource(
            f"{self.path}: the file contains {what}{where}, which cannot be kept exactly. "
            "Save the file again without it"
        )

    def _flat_stack(self) -> list[Any]:
        """What is on the stack, with the marks that Python's unpickler keeps beside it."""
        return [item for level in self.metastack for item in (*level, _MARK)] + self.stack

    def _place(self, stack: Sequence[Any]) -> str:
        """Where in the object the machine is: keys and indices of the containers that are being filled."""
        # A container that is being filled is followed by a mark, or stands at the bottom.
        keys: list[object] = []
        container: object = None
        inside: list[Any] = []
        marked = True
        for number, item in enumerate(stack):
            if item is not _MARK:
                if number == 0 and _is_container(item):
                    container, marked = item, False
                else:
                    inside.append(item)
            elif not inside and not marked:
                marked = True
            elif inside and _is_container(inside[-1]):
                keys += _open_key(container, inside[:-1])
                container, inside, marked = inside[-1], [], True
            else:  # the mark of a tuple, which may be the arguments of a call or a state
                is_state = bool(inside) and self._setter(inside[-1]) is not None
                is_call = bool(inside) and isinstance(inside[-1], ClassName)
                keys += _open_key(container, inside[:-1] if is_state else inside)
                container, inside, marked = None if is_state or is_call else _MARK, [], True
        keys += _open_key(container, inside)
        return f" at {'.'.join(map(str, keys))[:200]!r}" if keys else ""

    def _unknown(self, code: bytes, at: int) -> CorruptCheckpoint | UnsupportedSource:
        if not code:
            return self._corrupt(f"the pickle ends early at byte {at + 1}")
        if code in _OLD_OPCODES:
            return UnsupportedSource(
                f"{self.path}: opcode {code.decode()!r} of pickle protocol 0 or 1. "
                "Save again with the default protocol of torch.save"
            )
        return self._corrupt(f"byte {at} of the pickle is {code[0]:#x}, which is no opcode")

    # --- opcodes that differ from those of Python's unpickler

    def _protocol(self) -> None:
        protocol = self.read(1)[0]
        if protocol > 5:
            raise UnsupportedSource(f"{self.path}: pickle protocol {protocol} is newer than this reader")

    def _frame(self) -> None:
        self.read(8)  # a hint for readers of streams

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.append(self.call(self.stack.pop(), args))

    def _newobj_ex(self) -> None:
        kwargs, args = self.stack.pop(), self.stack.pop()
        if kwargs:
            raise UnsupportedSource(f"{self.path}: an object that is made with keyword arguments")
        self.append(self.call(self.stack.pop(), args))

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, InertObject):
            target.state = state
            return
        setter = self._setter(target)
        if setter is None:
            raise self._unsupported(f"{_kind(target)} with attributes", of_top=True)
        try:
            setter(target, state)
        except Refused as error:
            raise self._unsupported(str(error), of_top=True) from error
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise self._corrupt(f"the state of {_kind(target)} does not fit: {error}") from error

    def _setter(self, target: object) -> Setter | None:
        return next((set_ for kind, set_ in self._setters.items() if isinstance(target, kind)), None)

    def _key(self, key: Any) -> Any:
        try:
            return checked_key(key)
        except Refused as error:
            raise self._unsupported(str(error), of_top=True) from None

    def _append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (list, deque)):
            raise self._corrupt(f"the pickle appends to {_kind(target)}")
        target.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, InertObject):
            target = target.items
        if not isinstance(target, dict) or len(values) % 2:
            raise self._corrupt(f"the pickle sets items of {_kind(target)}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[key if type(key) is str else self._key(key)] = value

    def _set_one(self) -> None:
        value = self.stack.pop()
        self._set_items([self.stack.pop(), value])

    def _dict_of_mark(self) -> None:
        values = self.pop_mark()
        self.append({})
        self._set_items(values)

    def _add_items(self) -> None:
        values = self.pop_mark()
        target = self.stack[-1]
        if not isinstance(target, set):
            raise self._corrupt(f"the pickle adds to {_kind(target)}")
        target.update(map(self._key, values))

    def _frozen_set(self) -> None:
        values = self.pop_mark()
        self.append(frozenset(map(self._key, values)))

    def _integer(self) -> None:
        nbytes = int.from_bytes(self.read(4), "little")
        if nbytes > _MAX_INTEGER_NBYTES:
            raise UnsupportedSource(f"{self.path}: an integer of {nbytes} bytes")
        self.append(int.from_bytes(self.read(nbytes), "little", signed=True))

    def _bytearray(self) -> None:
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))


def _kind(value: object) -> str:
    if isinstance(value, (InertObject, ClassName)):
        return f"a {(value.name if isinstance(value, InertObject) else value.text)!r}"
    return f"a {type(value).__name__}"


def _is_container(item: object) -> bool:
    return isinstance(item, (list, deque, dict, InertObject))


def _open_key(container: object, inside: list[Any]) -> list[object]:
    """The key or index of a container's entry that is being read, as far as it has one."""
    if isinstance(container, (dict, InertObject)):
        # Keys and values take turns. What stands at the place of a value and is called is not yet one.
        called = next(
            (i for i, item in enumerate(inside) if i % 2 and isinstance(item, ClassName)), len(inside)
        )
        return [inside[called - 1]] if called % 2 and isinstance(inside[called - 1], (str, int)) else []
    if container is _MARK or isinstance(container, (list, deque)):
        called = next((i for i, item in enumerate(inside) if isinstance(item, ClassName)), len(inside))
        return [called if container is _MARK else len(container) + called]  # type: ignore[arg-type]
    return []


_OLD_NAMES = {
    "__builtin__.set": "builtins.set",
    "__builtin__.frozenset": "builtins.frozenset",
    "__builtin__.list": "builtins.list",
    "__builtin__.dict": "builtins.dict",
    "__builtin__.int": "builtins.int",
    "__builtin__.long": "builtins.int",
    "__builtin__.float": "builtins.float",
    "__builtin__.bool": "builtins.bool",
    "__builtin__.str": "builtins.str",
    "__builtin__.unicode": "builtins.str",
    "__builtin__.bytes": "builtins.bytes",
    "__builtin__.bytearray": "builtins.bytearray",
    "__builtin__.complex": "builtins.complex",
    "__builtin__.slice": "builtins.slice",
    "__builtin__.object": "builtins.object",
    "copy_reg._reconstructor": "copyreg._reconstructor",
}

_OLD_OPCODES = frozenset(bytes([code]) for code in b"FILSVPpgidom")
_PLAIN_OPCODES = (
    *(pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.BINSTRING, pickle.SHORT_BINSTRING),
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID),
)
"""What Python's unpickler does for these, it does to its own stack and memo only."""

_m = PickleMachine
_STEPS: dict[bytes, Callable[[PickleMachine], None]] = {
    **{code: _PurePython.dispatch[code[0]] for code in _PLAIN_OPCODES},
    pickle.PROTO: _m._protocol,
    pickle.FRAME: _m._frame,
    pickle.REDUCE: _m._reduce,
    pickle.NEWOBJ: _m._reduce,  # a class and its arguments, which the table treats alike
    pickle.NEWOBJ_EX: _m._newobj_ex,
    pickle.BUILD: _m._build,
    pickle.APPEND: lambda m: m._append([m.stack.pop()]),
    pickle.APPENDS: lambda m: m._append(m.pop_mark()),
    pickle.SETITEM: _m._set_one,
    pickle.SETITEMS: lambda m: m._set_items(m.pop_mark()),
    pickle.DICT: _m._dict_of_mark,
    pickle.ADDITEMS: _m._add_items,
    pickle.FROZENSET: _m._frozen_set,
    pickle.LONG4: _m._integer,
    pickle.BYTEARRAY8: _m._bytearray,
}
