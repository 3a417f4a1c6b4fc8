"""Nodes back to single values: the mirror of `value_encoder`, fed from files that may be hostile.

Owns one decoder per tag. Each accepts what the encoder writes and answers anything else with
`CorruptCheckpoint`; none runs code or looks a name up outside fixed tables. Containers and leaves belong to
`rebuild`.
"""

from __future__ import annotations

import binascii
import datetime as dt
import re
import struct
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final, TypeVar
from zoneinfo import ZoneInfo

import numpy as np

from everystep.errors import UnsupportedState
from everystep.state import numpy_arrays
from everystep.state.node import MAX_EXACT_INT, ZONE_KEY, Node, corrupt, shorten

_INTEGER = re.compile(r"-?(?:[0-9]{1,640}|0x[0-9a-f]+)", re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,32}(?::[0-9]{1,5})?", re.ASCII)
_HEX = re.compile(r"(?:[0-9a-f]{2})*", re.ASCII)

Decoder = Callable[[Node], object]
T = TypeVar("T")


def _text(node: Node, tag: str) -> str:
    if type(node) is str:
        return node
    if type(node) is dict and len(node) == 1 and "$str" in node:
        return _decode_str(node["$str"])
    corrupt(f"{tag} holds {shorten(node)} where text belongs")


def _ints(node: Node, tag: str, count: int) -> list[int]:
    if type(node) is not list or len(node) != count:
        corrupt(f"{tag} needs {count} integers")
    numbers = []
    for item in node:
        if type(item) is not int or not -MAX_EXACT_INT <= item <= MAX_EXACT_INT:
            corrupt(f"{tag} holds {shorten(item)} where an integer belongs")
        numbers.append(item)
    return numbers


def _split(node: Node, tag: str, count: int) -> tuple[list[int], Node]:
    """`count` integers and one more node."""
    if type(node) is not list or len(node) != count + 1:
        corrupt(f"{tag} needs {count + 1} members")
    return _ints(node[:count], tag, count), node[count]


def _hex(node: Node, tag: str) -> bytes:
    if type(node) is not str or _HEX.fullmatch(node) is None:
        corrupt(f"{tag} holds {shorten(node)} where hexadecimal digits belong")
    return bytes.fromhex(node)


def _base64(node: Node, tag: str) -> bytes:
    if type(node) is not str:
        corrupt(f"{tag} holds {shorten(node)} where base64 belongs")
    try:
        return b64decode(node, validate=True)
    except (binascii.Error, ValueError):  # ValueError: not ASCII
        corrupt(f"{tag} holds {shorten(node)} where base64 belongs")


def _decode_int(node: Node) -> int:
    if type(node) is not str or _INTEGER.fullmatch(node) is None:
        corrupt(f"$int holds {shorten(node)}")
    return int(node, 16) if "x" in node else int(node)


def _decode_float(node: Node) -> float:
    data = _hex(node, "$float")
    if len(data) != 8:
        corrupt("$float needs 16 hexadecimal digits")
    number: float = struct.unpack(">d", data)[0]
    return number


def _decode_complex(node: Node) -> complex:
    if type(node) is not list or len(node) != 2:
        corrupt("$complex needs two floats")
    parts = []
    for part in node:
        if type(part) is dict and len(part) == 1 and "$float" in part:
            parts.append(_decode_float(part["$float"]))
        elif type(part) is float:
            parts.append(part)
        else:
            corrupt(f"$complex holds {shorten(part)} where a float belongs")
    return complex(parts[0], parts[1])


def _decode_str(node: Node) -> str:
    try:
        return _base64(node, "$str").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        corrupt("$str does not hold UTF-8")


def _decode_timedelta(node: Node) -> dt.timedelta:
    days, seconds, micros = _ints(node, "$timedelta", 3)
    return _made("$timedelta", lambda: dt.timedelta(days, seconds, micros))


def _decode_timezone(node: Node) -> dt.timezone:
    (days, seconds, micros), name = _split(node, "$timezone", 3)
    if name is None:
        return _made("$timezone", lambda: dt.timezone(dt.timedelta(days, seconds, micros)))
    text = _text(name, "$timezone")
    return _made("$timezone", lambda: dt.timezone(dt.timedelta(days, seconds, micros), text))


def _decode_zone(node: Node) -> ZoneInfo:
    if type(node) is not str or ZONE_KEY.fullmatch(node) is None:
        corrupt(f"$zoneinfo holds {shorten(node)}")
    try:
        return ZoneInfo(node)
    except (ValueError, OSError, KeyError) as error:
        corrupt(
            f"time zone {node!r} is not known on this machine ({shorten(str(error))}); pip install tzdata"
        )


def _decode_tzinfo(node: Node, tag: str) -> dt.tzinfo | None:
    if node is None:
        return None
    if type(node) is dict and len(node) == 1:
        if "$timezone" in node:
            return _decode_timezone(node["$timezone"])
        if "$zoneinfo" in node:
            return _decode_zone(node["$zoneinfo"])
    corrupt(f"{tag} holds {shorten(node)} where a time zone belongs")


def _decode_datetime(node: Node) -> dt.datetime:
    (*numbers, fold), zone = _split(node, "$datetime", 8)
    tzinfo = _decode_tzinfo(zone, "$datetime")
    year, month, day, hour, minute, second, micros = numbers
    return _made(
        "$datetime", lambda: dt.datetime(year, month, day, hour, minute, second, micros, tzinfo, fold=fold)
    )


def _decode_date(node: Node) -> dt.date:
    year, month, day = _ints(node, "$date", 3)
    return _made("$date", lambda: dt.date(year, month, day))


def _decode_time(node: Node) -> dt.time:
    (hour, minute, second, micros, fold), zone = _split(node, "$time", 5)
    tzinfo = _decode_tzinfo(zone, "$time")
    return _made("$time", lambda: dt.time(hour, minute, second, micros, tzinfo, fold=fold))


def _made(tag: str, make: Callable[[], T]) -> T:
    """What `make` builds from numbers out of a file; out-of-range numbers are the file's fault."""
    try:
        return make()
    except (ValueError, OverflowError) as error:
        corrupt(f"{tag} is out of range: {shorten(str(error))}")


def _decode_purepath(node: Node) -> PurePosixPath | PureWindowsPath:
    if type(node) is list and len(node) == 2:
        text = _text(node[1], "$purepath")
        if node[0] == "posix":
            return PurePosixPath(text)
        if node[0] == "windows":
            return PureWindowsPath(text)
    corrupt(f"$purepath holds {shorten(node)}")


def _decode_numpy(node: Node) -> np.generic:
    if type(node) is not list or len(node) != 2 or type(node[0]) is not str:
        corrupt(f"$np holds {shorten(node)}")
    code, body = node
    assert type(code) is str
    if code == "str":
        text: np.generic = np.str_(_text(body, "$np"))
        return text
    data = _hex(body, "$np")
    if code == "bytes":
        scalar: np.generic = np.bytes_(data)
        return scalar
    found = numpy_arrays.scalar_dtype(code)
    if found is None or found.itemsize != len(data):
        corrupt(f"$np holds {len(data)} bytes of the type {shorten(code)!r}")
    # A copy: the scalar of a void type would otherwise be a view of the buffer, and read-only.
    scalar = np.frombuffer(bytearray(data), found)[0]
    return scalar


def _decode_numpy_dtype(node: Node) -> np.dtype[Any]:
    found = numpy_arrays.coded_dtype(node) if type(node) is str else None
    if found is None:
        corrupt(f"$npdtype holds {shorten(node)}")
    return found


def _torch(tag: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedState(
            f"the state holds a {tag.removeprefix('$')}, which needs torch to be read: pip install torch"
        ) from error
    return torch


def _decode_torch_dtype(node: Node) -> object:
    torch = _torch("$torch.dtype")
    if type(node) is str and re.fullmatch(r"[a-z0-9_]{1,32}", node):
        found = vars(torch).get(node)
        if isinstance(found, torch.dtype):
            return found
    corrupt(f"$torch.dtype holds {shorten(node)}")


def _decode_torch_size(node: Node) -> object:
    if type(node) is not list:
        corrupt(f"$torch.size holds {shorten(node)}")
    sizes = _ints(node, "$torch.size", len(node))
    return _torch("$torch.size").Size(sizes)


def _decode_torch_device(node: Node) -> object:
    torch = _torch("$torch.device")
    if type(node) is not str or _DEVICE.fullmatch(node) is None:
        corrupt(f"$torch.device holds {shorten(node)}")
    try:
        return torch.device(node)
    except RuntimeError:
        corrupt(f"$torch.device names {node!r}, which this torch does not know")


DECODERS: Final[dict[str, Decoder]] = {
    "$int": _decode_int,
    "$float": _decode_float,
    "$complex": _decode_complex,
    "$str": _decode_str,
    "$bytes": lambda node: _base64(node, "$bytes"),
    "$bytearray": lambda node: bytearray(_base64(node, "$bytearray")),
    "$timedelta": _decode_timedelta,
    "$timezone": _decode_timezone,
    "$zoneinfo": _decode_zone,
    "$datetime": _decode_datetime,
    "$date": _decode_date,
    "$time": _decode_time,
    "$path": lambda node: Path(_text(node, "$path")),
    "$purepath": _decode_purepath,
    "$np": _decode_numpy,
    "$npdtype": _decode_numpy_dtype,
    "$torch.dtype": _decode_torch_dtype,
    "$torch.size": _decode_torch_size,
    "$torch.device": _decode_torch_device,
}
