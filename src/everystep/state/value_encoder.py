"""Single values to nodes: numbers, text, bytes, times, paths, numpy scalars, torch's small types.

Owns the exact-type table of what has no inside. Containers and arrays belong to `flatten`; the way
back is `value_decoder`. A value comes back with the same type and the same bits, or it is not stored.
"""

from __future__ import annotations

import datetime as dt
import math
import random
import struct
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np

from everystep.state import numpy_arrays, omegaconf_values
from everystep.state.node import MAX_EXACT_INT, ZONE_KEY, Node
from everystep.state.refusals import type_name, unsupported

_DECIMAL_BITS: Final = 2000
"""Larger integers are written in hexadecimal: decimal takes quadratic time, and Python limits its digits."""

Encoder = Callable[[Any, str], Node]


def is_text(value: str) -> bool:
    """Whether JSON can hold this string: lone surrogates have no UTF-8."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _same(value: Node, place: str) -> Node:
    return value


def _int(value: int, place: str) -> Node:
    if -MAX_EXACT_INT <= value <= MAX_EXACT_INT:
        return value
    return {"$int": str(value) if value.bit_length() <= _DECIMAL_BITS else hex(value)}


def _float(value: float, place: str = "") -> Node:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _complex(value: complex, place: str) -> Node:
    return {"$complex": [_float(value.real), _float(value.imag)]}


def _str(value: str, place: str) -> Node:
    return value if is_text(value) else {"$str": _b64(value.encode("utf-8", "surrogatepass"))}


def _b64(data: bytes | bytearray) -> str:
    return b64encode(data).decode("ascii")


def _timedelta(value: dt.timedelta, place: str) -> Node:
    return {"$timedelta": [value.days, value.seconds, value.microseconds]}


def _timezone(value: dt.timezone, place: str) -> Node:
    offset, *names = value.__getinitargs__()  # type: ignore[attr-defined]
    name = _str(names[0], place) if names else None
    return {"$timezone": [offset.days, offset.seconds, offset.microseconds, name]}


def _zone(value: ZoneInfo, place: str) -> Node:
    key = value.key
    if not key or ZONE_KEY.fullmatch(key) is None or not _is_zone(key):
        raise unsupported(place, "a ZoneInfo without a key of the time zone database")
    return {"$zoneinfo": key}


def _is_zone(key: str) -> bool:
    """Whether the time zone database has it. `ZoneInfo.from_file` takes any key."""
    try:
        ZoneInfo(key)
    except (ValueError, OSError, KeyError):
        return False
    return True


def _tzinfo(value: dt.tzinfo | None, place: str) -> Node:
    if value is None:
        return None
    if type(value) is dt.timezone:
        return _timezone(value, place)
    if type(value) is ZoneInfo:
        return _zone(value, place)
    raise unsupported(
        place, f"its time zone has type {type_name(value)}; use datetime.timezone or zoneinfo.ZoneInfo"
    )


def _datetime(value: dt.datetime, place: str) -> Node:
    v = value
    clock: list[Node] = [v.hour, v.minute, v.second, v.microsecond, v.fold]
    return {"$datetime": [v.year, v.month, v.day, *clock, _tzinfo(v.tzinfo, place)]}


def _date(value: dt.date, place: str) -> Node:
    return {"$date": [value.year, value.month, value.day]}


def _time(value: dt.time, place: str) -> Node:
    v = value
    return {"$time": [v.hour, v.minute, v.second, v.microsecond, v.fold, _tzinfo(v.tzinfo, place)]}


def _numpy_scalar(value: np.generic, place: str) -> Node:
    code = numpy_arrays.scalar_code(value.dtype, type(value))
    if code is None:
        raise unsupported(place, f"a numpy scalar of dtype {value.dtype}")
    return {"$np": [code, value.tobytes().hex()]}


def _numpy_text(value: np.str_, place: str) -> Node:
    # numpy drops trailing NULs when it reads fixed-width text, so these two travel as Python's own.
    return {"$np": ["str", _str(str.__str__(value), place)]}  # str() would drop them as well


def _numpy_bytes(value: np.bytes_, place: str) -> Node:
    return {"$np": ["bytes", bytes(value).hex()]}


ENCODERS: Final[dict[type, Encoder]] = {
    type(None): _same,
    bool: _same,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: lambda value, place: {"$bytes": _b64(value)},
    bytearray: lambda value, place: {"$bytearray": _b64(value)},
    dt.timedelta: _timedelta,
    dt.timezone: _timezone,
    ZoneInfo: _zone,
    dt.datetime: _datetime,
    dt.date: _date,
    dt.time: _time,
    type(Path()): lambda value, place: {"$path": _str(str(value), place)},
    PurePosixPath: lambda value, place: {"$purepath": ["posix", _str(str(value), place)]},
    PureWindowsPath: lambda value, place: {"$purepath": ["windows", _str(str(value), place)]},
    np.str_: _numpy_text,
    np.bytes_: _numpy_bytes,
}
"""Exact type -> encoder. Subclasses are absent on purpose: they would come back as something else."""

ENCODERS.update(dict.fromkeys(numpy_arrays.SCALAR_TYPES, _numpy_scalar))


def _numpy_dtype(value: np.dtype[Any], place: str) -> Node:
    code = numpy_arrays.dtype_code(value)
    if code is None:
        raise unsupported(place, f"numpy dtype {value}")
    return {"$npdtype": code}


def encode(value: object, place: str) -> Node:
    """The node of a value that is no container and no array; `UnsupportedState` for any other."""
    encoder = ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, place)
    if isinstance(value, np.dtype):  # every numpy dtype is of a class of its own
        return _numpy_dtype(value, place)
    if sys.modules.get("torch") is not None and _learn_torch():
        return encode(value, place)
    if isinstance(value, type):
        return {omegaconf_values.OMEGACONF_TYPE: omegaconf_values.name_of_class(value, place)}
    raise unsupported(place, f"its type is {type_name(value)}. {_advice(value)}")


def is_value(value: object) -> bool:
    """Whether its type is one that `encode` knows, or it is a configuration of OmegaConf."""
    if type(value) in ENCODERS or isinstance(value, np.dtype) or omegaconf_values.is_config(value):
        return True
    return sys.modules.get("torch") is not None and _learn_torch() and type(value) in ENCODERS


def _advice(value: object) -> str:
    """What to store instead."""
    kind = type(value)
    torch = sys.modules.get("torch")
    if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)) or (
        torch is not None and isinstance(value, torch.Generator)
    ):
        return "Store everystep.rng(...) of it instead, which also restores it in place"
    for sign, plain in _PLAIN_FORMS.items():
        if hasattr(kind, sign):
            return f"A checkpoint runs no code of classes; store {plain} instead"
    if isinstance(value, SimpleNamespace):
        return "Store vars(...) of it instead"
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return "Store dict(...) of it instead"
    for base in (dict, list, tuple, set, frozenset, str, bytes, bool, int, float):
        if isinstance(value, base):
            inside = isinstance(value, dict) and any(type(its) is kind for its in value.values())
            return (
                f"A subclass of {base.__name__} would not come back as itself; "
                f"store {base.__name__}(...) of it instead{', and of those inside it' if inside else ''}"
            )
    return "Convert it to a supported type, or give its class state_dict() and load_state_dict()"


_PLAIN_FORMS: Final = {
    "__members__": "its name or its value",
    "__dataclass_fields__": "dataclasses.asdict(...) of it",
    "__attrs_attrs__": "attrs.asdict(...) of it",
    "__pydantic_fields__": "its model_dump()",
    "_asdict": "its _asdict()",
    "to_dict": "its to_dict()",
}
"""Enums, dataclasses, attrs, pydantic, named tuples, configurations: a sign of each, and its plain form."""


def _torch_size(value: tuple[int, ...], place: str) -> Node:
    if any(abs(size) > MAX_EXACT_INT for size in value):
        raise unsupported(place, f"a torch.Size beyond 2**53: {value}")
    return {"$torch.size": list(value)}


def _learn_torch() -> bool:
    """Adds torch's value types to the table once torch is imported. Returns whether it added any."""
    import torch

    if torch.Size in ENCODERS:
        return False
    ENCODERS[torch.dtype] = lambda value, place: {"$torch.dtype": str(value).removeprefix("torch.")}
    ENCODERS[torch.Size] = _torch_size
    ENCODERS[torch.device] = lambda value, place: {"$torch.device": str(value)}
    return True
