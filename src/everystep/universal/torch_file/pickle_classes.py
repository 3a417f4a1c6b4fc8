"""Python's own types, numpy's and torch's small ones in pickles: the tables for `pickle_machine`.

Owns what names mean that have nothing to do with tensors. A maker takes exactly the arguments that the real
class writes, and gives what the real class gives; anything else is refused or corrupt.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

from everystep.universal.torch_file.numpy_classes import NUMPY_MAKERS, NUMPY_SETTERS
from everystep.universal.torch_file.pickle_machine import ClassName, Maker, Refused, Setter, checked_key
from everystep.universal.torch_file.torch_values import TorchDevice, TorchDtype, TorchSize

TORCH_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex32": "C32",
    "complex64": "C64",
    "complex128": "C128",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4_E2M1_X2",
}
"""Torch's name of an element type, and ours."""

_TYPES: dict[str, Any] = {
    f"builtins.{kind.__name__}": kind
    for kind in (int, float, bool, str, bytes, complex, list, tuple, dict, set, frozenset)
} | {"collections.OrderedDict": OrderedDict}
"""What a defaultdict may make of nothing."""


def _ordered(*args: Any) -> OrderedDict[Any, Any]:
    """Empty, to be filled; in old pickles with its pairs, as lists."""
    (pairs,) = args or ([],)
    if type(pairs) is not list or not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("an OrderedDict of something that is not pairs")
    return OrderedDict((checked_key(key), value) for key, value in pairs)


def _set_ordered(target: OrderedDict[Any, Any], state: object) -> None:
    if type(state) is not dict or set(state) != {"_metadata"}:
        named = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise Refused(f"an OrderedDict with attributes other than the _metadata of a state dict: {named}")
    vars(target).update(state)


def _default(*args: Any) -> defaultdict[Any, Any]:
    (factory,) = args or (None,)
    if factory is None:
        return defaultdict(None)
    if not isinstance(factory, ClassName) or factory.text not in _TYPES:
        named = factory.text if isinstance(factory, ClassName) else type(factory).__name__
        raise Refused(f"a defaultdict whose entries are made by {named!r}")
    return defaultdict(_TYPES[factory.text])


def _counter(*args: Any) -> Counter[Any]:
    (counts,) = args or ({},)
    if type(counts) is not dict:
        raise TypeError("a Counter of something that is not a dictionary")
    made: Counter[Any] = Counter()
    dict.update(made, counts)
    return made


def _deque(items: Any = (), maxlen: Any = None) -> deque[Any]:
    if type(items) not in (list, tuple) or not (maxlen is None or (type(maxlen) is int and maxlen >= 0)):
        raise TypeError("a deque of something that is not a sequence")
    return deque(items, maxlen)


def _list(*args: Any) -> list[Any]:
    (items,) = args or ([],)
    if type(items) not in (list, tuple):
        raise TypeError("a list of something that is not a sequence")
    return list(items)


def _dict(*args: Any) -> dict[Any, Any]:
    (items,) = args or ({},)
    if type(items) is not dict:
        raise TypeError("a dict of something that is not one")
    return dict(items)


def _set(*args: Any) -> set[Any]:
    return set(map(checked_key, _list(*args)))


def _frozenset(*args: Any) -> frozenset[Any]:
    return frozenset(map(checked_key, _list(*args)))


def _encode(text: Any, encoding: Any) -> bytes:
    """How protocol 2 writes bytes."""
    if encoding not in ("latin1", "latin-1") or type(text) is not str:
        raise ValueError("bytes in an encoding that pickle does not use")
    return text.encode("latin-1")


def _bytes(*args: Any) -> bytes:
    if args and (len(args) != 1 or type(args[0]) is not bytes):
        raise TypeError("bytes of something else")
    return args[0] if args else b""


def _bytearray(*args: Any) -> bytearray:
    return bytearray(_encode(*args) if len(args) == 2 else _bytes(*args))


def _complex(real: Any, imag: Any) -> complex:
    if type(real) is not float or type(imag) is not float:
        raise TypeError("a complex number of something that is not two floats")
    return complex(real, imag)


def _path(*parts: Any) -> pathlib.Path:
    return pathlib.Path(*_texts(parts))


def _pure_posix_path(*parts: Any) -> pathlib.PurePosixPath:
    return pathlib.PurePosixPath(*_texts(parts))


def _pure_windows_path(*parts: Any) -> pathlib.PureWindowsPath:
    return pathlib.PureWindowsPath(*_texts(parts))


def _texts(parts: tuple[Any, ...]) -> tuple[str, ...]:
    if not all(type(part) is str for part in parts):
        raise TypeError("a path that is not text")
    return parts


def _namespace(*args: Any) -> argparse.Namespace:
    if args:
        raise TypeError("a Namespace is not made of arguments")
    return argparse.Namespace()


def _set_namespace(target: argparse.Namespace, state: object) -> None:
    if type(state) is not dict or not all(type(name) is str for name in state):
        raise TypeError("a Namespace without attributes")
    vars(target).update(state)


# --- times, from the bytes in which Python packs them. Unlike here, Python does not check all of them.


def _packed(data: Any, nbytes: int) -> bytes:
    if type(data) is not bytes or len(data) != nbytes:
        raise TypeError(f"a time that is not {nbytes} bytes")
    return data


def _zone(zone: Any) -> datetime.tzinfo | None:
    if zone is not None and type(zone) is not datetime.timezone:
        raise TypeError("a time zone of an unknown form")
    return zone


def _datetime(data: Any, zone: Any = None) -> datetime.datetime:
    high, low, month, day, hour, minute, second, *micros = _packed(data, 10)
    return datetime.datetime(
        high << 8 | low,
        month & 0x7F,
        day,
        hour,
        minute,
        second,
        int.from_bytes(bytes(micros), "big"),
        _zone(zone),
        fold=month >> 7,
    )


def _date(data: Any) -> datetime.date:
    high, low, month, day = _packed(data, 4)
    return datetime.date(high << 8 | low, month, day)


def _time(data: Any, zone: Any = None) -> datetime.time:
    hour, minute, second, *micros = _packed(data, 6)
    micro = int.from_bytes(bytes(micros), "big")
    return datetime.time(hour & 0x7F, minute, second, micro, _zone(zone), fold=hour >> 7)


def _timedelta(days: Any, seconds: Any, micros: Any) -> datetime.timedelta:
    if not all(type(one) is int for one in (days, seconds, micros)):
        raise TypeError("a timedelta of something that is not whole numbers")
    return datetime.timedelta(days, seconds, micros)


def _timezone(offset: Any, *name: Any) -> datetime.timezone:
    if type(offset) is not datetime.timedelta or not all(type(one) is str for one in name):
        raise TypeError("a time zone of an unknown form")
    return datetime.timezone(offset, *name)


# --- torch


def _size(items: Any) -> TorchSize:
    if type(items) not in (list, tuple) or not all(type(n) is int for n in items):
        raise TypeError("a torch.Size of something that is not whole numbers")
    return TorchSize(items)


def _device(kind: Any, index: Any = None) -> TorchDevice:
    if type(kind) is not str or not (index is None or type(index) is int):
        raise TypeError("a device that is not text and a number")
    return TorchDevice(kind if index is None else f"{kind}:{index}")


def _layout(name: Any) -> ClassName:
    if type(name) is not str:
        raise TypeError("a layout that is not text")
    return ClassName(name)


def not_called(name: str) -> Maker:
    """For names that may stand in a pickle, but of which no object is made."""

    def refuse(*args: object) -> object:
        raise Refused(f"an object of {name}")

    return refuse


PLAIN_MAKERS: dict[str, Maker] = {
    **{name: not_called(name) for name in (*_TYPES, "builtins.object")},
    **NUMPY_MAKERS,
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    "builtins.list": _list,
    "builtins.dict": _dict,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "_codecs.encode": _encode,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _default,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "argparse.Namespace": _namespace,
    "pathlib.PosixPath": _path,
    "pathlib._local.PosixPath": _path,
    "pathlib.PurePosixPath": _pure_posix_path,
    "pathlib._local.PurePosixPath": _pure_posix_path,
    "pathlib.PureWindowsPath": _pure_windows_path,
    "pathlib._local.PureWindowsPath": _pure_windows_path,
    "datetime.datetime": _datetime,
    "datetime.date": _date,
    "datetime.time": _time,
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
}
"""What a name makes of its arguments."""

PLAIN_VALUES: dict[str, object] = {f"torch.{name}": TorchDtype(name) for name in TORCH_DTYPES}
"""Names that are values themselves."""

PLAIN_SETTERS: dict[type, Setter] = {
    **NUMPY_SETTERS,
    OrderedDict: _set_ordered,
    argparse.Namespace: _set_namespace,
}
"""How an object takes the state that a pickle gives it after it was made."""
