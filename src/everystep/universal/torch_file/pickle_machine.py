"""Reads pickles without running code.

A pickle is a program that may call anything Python can import. This machine imports and calls nothing: a
class or function in a pickle is only a `Name`, and the caller gives a table of what each name makes of its
arguments. Names of a second list become inert `Record`s. Any other name is an error that says which, and
where in the object it stands as far as that is known.

Owns the opcodes of protocols 2 to 5, and limits: the number of opcodes (and with it of objects, since none
makes more than one), the numbers of the memo, the length of integers, and what may be a key (hashing nested
tuples that share their parts could take forever). Objects in pickles may share parts or contain themselves,
so a caller that walks them needs limits of its own.
"""

from __future__ import annotations

import datetime
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np

from everystep.errors import CorruptCheckpoint, UnsupportedSource
from everystep.universal.torch_file.values import TorchDevice, TorchDtype

MAX_PICKLE_NBYTES = 256 << 20
MAX_OPCODES = 64_000_000
_MAX_INTEGER_NBYTES = 1024
_MAX_KEY_INTEGER = 1 << 60
_MAX_KEY_PARTS = 256
_MAX_KEY_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that a pickle mentions."""

    text: str


@dataclass(eq=False, slots=True)
class Record:
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
    *(TorchDtype, TorchDevice, Name, Record),
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


class _Mark:
    __slots__ = ()


_MARK = _Mark()


class PickleMachine:
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
        self.path = path
        self._data = data
        self._at = 0
        self._makers = makers
        self._values = values
        self._setters = setters
        self._inert = inert
        self._persistent = persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    @property
    def position(self) -> int:
        """One past the last byte that was read: the end of the pickle after `run`."""
        return self._at

    def call(self, function: object, args: object) -> Any:
        """What the table makes of a name and arguments; for makers that get a function as an argument."""
        if not isinstance(function, Name):
            raise self._corrupt(f"the pickle calls {_kind(function)}, which is not a class or function")
        if not isinstance(args, tuple):
            raise self._corrupt(f"the pickle calls {function.text} with {_kind(args)}")
        maker = self._makers.get(function.text)
        if maker is None:
            if function.text in self._inert:
                return Record(function.text, args)
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
        data, table = self._data, _TABLE
        try:
            for _ in range(MAX_OPCODES):
                code = data[self._at]
                self._at += 1
                if code == 0x2E:  # STOP
                    if len(self._stack) != 1 or self._stack[0] is _MARK:
                        raise self._corrupt("the pickle ends with objects left over")
                    return self._stack[0]
                step = table[code]
                if step is None:
                    raise self._unknown(code)
                step(self)
        except (IndexError, struct.error):
            raise self._corrupt(f"the pickle ends early or is damaged at byte {self._at}") from None
        except (UnicodeDecodeError, KeyError) as error:
            raise self._corrupt(f"the pickle is damaged at byte {self._at}: {error}") from None
        raise UnsupportedSource(f"{self.path}: the pickle has more than {MAX_OPCODES} opcodes")

    # --- errors

    def _corrupt(self, reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(reason, path=self.path)

    def _refuse(self, name: str) -> UnsupportedSource:
        where = self._place(self._stack)
        return UnsupportedSource(
            f"{self.path}: the file contains {name[:200]!r}{where}, which is not on the list of known "
            "classes. Nothing of it was run. Save the file again with tensors and plain values only"
        )

    def _unsupported(self, what: str, *, of_top: bool = False) -> UnsupportedSource:
        """`of_top`: it is about the object on top of the stack, not about the one that comes next."""
        where = self._place(self._stack[:-1] if of_top else self._stack)
        return UnsupportedSource(
            f"{self.path}: the file contains {what}{where}, which cannot be kept exactly. "
            "Save the file again without it"
        )

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
                is_call = bool(inside) and isinstance(inside[-1], Name)
                keys += _open_key(container, inside[:-1] if is_state else inside)
                container, inside, marked = None if is_state or is_call else _MARK, [], True
        keys += _open_key(container, inside)
        return f" at {'.'.join(map(str, keys))[:200]!r}" if keys else ""

    def _unknown(self, code: int) -> CorruptCheckpoint | UnsupportedSource:
        if bytes([code]) in b"FILSTUVXpgidotPm":
            return UnsupportedSource(
                f"{self.path}: opcode {chr(code)!r} of pickle protocol 0 or 1. "
                "Save again with the default protocol of torch.save"
            )
        return self._corrupt(f"byte {self._at - 1} of the pickle is {code:#x}, which is no opcode")

    # --- reading

    def _take(self, nbytes: int) -> bytes:
        end = self._at + nbytes
        if end > len(self._data):
            raise IndexError
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def _number(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "little")

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at) if b"\n" in self._data[self._at : self._at + 4096] else -1
        if end < 0:
            raise IndexError
        return self._take(end + 1 - self._at)[:-1].decode("utf-8")

    def _to_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while at >= 0 and stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise IndexError
        found = stack[at + 1 :]
        del stack[at:]
        return found

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise IndexError
        return value

    def _top(self) -> Any:
        value = self._stack[-1]
        if value is _MARK:
            raise IndexError
        return value

    def _key(self, key: Any) -> Any:
        try:
            return checked_key(key)
        except Refused as error:
            raise self._unsupported(str(error), of_top=True) from None

    # --- opcodes

    def _push_name(self, module: str, name: str) -> None:
        text = f"{module}.{name}"
        # Python 2 names of what Python 3 moved; pickles of protocol 2 use them.
        text = _OLD_NAMES.get(text, text)
        if text in self._values:
            self._stack.append(self._values[text])
        elif text in self._makers or text in self._inert:
            self._stack.append(Name(text))
        else:
            raise self._refuse(text)

    def _global(self) -> None:
        module = self._line()
        self._push_name(module, self._line())

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self._corrupt("the pickle names a class with something that is not text")
        self._push_name(module, name)

    def _reduce(self) -> None:
        args = self._pop()
        self._stack.append(self.call(self._pop(), args))

    def _newobj_ex(self) -> None:
        kwargs, args = self._pop(), self._pop()
        if kwargs:
            raise UnsupportedSource(f"{self.path}: an object that is made with keyword arguments")
        self._stack.append(self.call(self._pop(), args))

    def _build(self) -> None:
        state = self._pop()
        target = self._top()
        if isinstance(target, Record):
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

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, (list, deque)):
            raise self._corrupt(f"the pickle appends to {_kind(target)}")
        target.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = self._top()
        if isinstance(target, Record):
            target = target.items
        if not isinstance(target, dict) or len(values) % 2:
            raise self._corrupt(f"the pickle sets items of {_kind(target)}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[self._key(key)] = value

    def _append_one(self) -> None:
        self._append([self._pop()])

    def _append_many(self) -> None:
        self._append(self._to_mark())

    def _set_one(self) -> None:
        value = self._pop()
        self._set_items([self._pop(), value])

    def _set_many(self) -> None:
        self._set_items(self._to_mark())

    def _add_items(self) -> None:
        values = self._to_mark()
        target = self._top()
        if not isinstance(target, set):
            raise self._corrupt(f"the pickle adds to {_kind(target)}")
        target.update(map(self._key, values))

    def _dict_of_mark(self) -> None:
        values = self._to_mark()
        self._stack.append({})
        self._set_items(values)

    def _tuple(self, count: int) -> None:
        stack = self._stack
        if count > len(stack) or any(one is _MARK for one in stack[len(stack) - count :]):
            raise IndexError
        made = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        stack.append(made)

    def _text(self, nbytes: int) -> None:
        self._stack.append(self._take(nbytes).decode("utf-8", "surrogatepass"))

    def _old_text(self, nbytes: int) -> None:
        self._stack.append(self._take(nbytes).decode("utf-8"))  # of Python 2; torch.load decodes it so

    def _bytes(self, nbytes: int) -> None:
        self._stack.append(self._take(nbytes))

    def _integer(self, nbytes: int) -> None:
        if nbytes > _MAX_INTEGER_NBYTES:
            raise UnsupportedSource(f"{self.path}: an integer of {nbytes} bytes")
        self._stack.append(int.from_bytes(self._take(nbytes), "little", signed=True))

    def _persistent_id(self) -> None:
        key = self._pop()
        if self._persistent is None:
            raise UnsupportedSource(f"{self.path}: the pickle refers to an object outside of it")
        self._stack.append(self._persistent(key))

    def _put(self, index: int) -> None:
        # Every writer counts; a dictionary makes large numbers harmless.
        self._memo[index] = self._top()

    def _dup(self) -> None:
        self._stack.append(self._top())

    def _protocol(self) -> None:
        protocol = self._number(1)
        if protocol > 5:
            raise UnsupportedSource(f"{self.path}: pickle protocol {protocol} is newer than this reader")

    def _frame(self) -> None:
        self._take(8)  # a hint for readers of streams

    def _pop_mark(self) -> None:
        self._to_mark()

    def _pop_any(self) -> None:
        self._stack.pop()


def _kind(value: object) -> str:
    if isinstance(value, (Record, Name)):
        return f"a {(value.name if isinstance(value, Record) else value.text)!r}"
    return f"a {type(value).__name__}"


def _is_container(item: object) -> bool:
    return isinstance(item, (list, deque, dict, Record))


def _open_key(container: object, inside: list[Any]) -> list[object]:
    """The key or index of a container's entry that is being read, as far as it has one."""
    if isinstance(container, (dict, Record)):
        # Keys and values take turns. What stands at the place of a value and is called is not yet one.
        called = next((i for i, item in enumerate(inside) if i % 2 and isinstance(item, Name)), len(inside))
        return [inside[called - 1]] if called % 2 and isinstance(inside[called - 1], (str, int)) else []
    if container is _MARK or isinstance(container, (list, deque)):
        called = next((i for i, item in enumerate(inside) if isinstance(item, Name)), len(inside))
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

_Step = Callable[[PickleMachine], None]


def _steps() -> list[_Step | None]:
    def push(make: Callable[[], Any]) -> _Step:
        return lambda m: m._stack.append(make())

    def sized(width: int, use: Callable[[PickleMachine, int], None]) -> _Step:
        return lambda m: use(m, m._number(width))

    m = PickleMachine
    steps: dict[bytes, _Step] = {
        b"\x80": m._protocol,
        b"\x95": m._frame,
        b"(": push(lambda: _MARK),
        b"0": m._pop_any,
        b"1": m._pop_mark,
        b"2": m._dup,
        b"N": push(lambda: None),
        b"\x88": push(lambda: True),
        b"\x89": push(lambda: False),
        b"}": push(dict),
        b"]": push(list),
        b")": push(tuple),
        b"\x8f": push(set),
        b"K": lambda m: m._stack.append(m._number(1)),
        b"M": lambda m: m._stack.append(m._number(2)),
        b"J": lambda m: m._stack.append(int.from_bytes(m._take(4), "little", signed=True)),
        b"G": lambda m: m._stack.append(struct.unpack(">d", m._take(8))[0]),
        b"\x8a": sized(1, m._integer),
        b"\x8b": sized(4, m._integer),
        b"X": sized(4, m._text),
        b"\x8c": sized(1, m._text),
        b"\x8d": sized(8, m._text),
        b"T": sized(4, m._old_text),
        b"U": sized(1, m._old_text),
        b"B": sized(4, m._bytes),
        b"C": sized(1, m._bytes),
        b"\x8e": sized(8, m._bytes),
        b"\x96": lambda m: m._stack.append(bytearray(m._take(m._number(8)))),
        b"t": lambda m: m._stack.append(tuple(m._to_mark())),
        b"l": lambda m: m._stack.append(m._to_mark()),
        b"d": m._dict_of_mark,
        b"\x91": lambda m: m._stack.append(frozenset(map(m._key, m._to_mark()))),
        b"\x85": lambda m: m._tuple(1),
        b"\x86": lambda m: m._tuple(2),
        b"\x87": lambda m: m._tuple(3),
        b"a": m._append_one,
        b"e": m._append_many,
        b"s": m._set_one,
        b"u": m._set_many,
        b"\x90": m._add_items,
        b"q": sized(1, m._put),
        b"r": sized(4, m._put),
        b"\x94": lambda m: m._put(len(m._memo)),
        b"h": lambda m: m._stack.append(m._memo[m._number(1)]),
        b"j": lambda m: m._stack.append(m._memo[m._number(4)]),
        b"c": m._global,
        b"\x93": m._stack_global,
        b"R": m._reduce,
        b"\x81": m._reduce,  # NEWOBJ: a class and its arguments, which the table treats alike
        b"\x92": m._newobj_ex,
        b"b": m._build,
        b"Q": m._persistent_id,
    }
    table: list[_Step | None] = [None] * 256
    for code, step in steps.items():
        table[code[0]] = step
    return table


_TABLE = _steps()
