"""Objects for `torch.save`, random and whole, and the question whether two of them are the same."""

from __future__ import annotations

import argparse
import datetime
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex32),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


def differences(found: Any, expected: Any, place: str = "") -> list[str]:
    """Where two objects differ in type, order, value or bits. Nothing is called equal that only looks so."""
    if type(found) is not type(expected):
        return [f"{place}: {type(found)} instead of {type(expected)}"]
    if isinstance(expected, torch.Tensor):
        return _tensor_differences(found, expected, place)
    if isinstance(expected, (np.ndarray, np.generic)):
        return _array_differences(found, expected, place)
    if isinstance(expected, argparse.Namespace):
        return differences(vars(found), vars(expected), f"{place} (Namespace)")
    if isinstance(expected, dict):
        return _dict_differences(found, expected, place)
    if isinstance(expected, (list, tuple, deque)):
        if len(found) != len(expected) or getattr(found, "maxlen", 0) != getattr(expected, "maxlen", 0):
            return [f"{place}: {found!r} instead of {expected!r}"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{place}[{i}]")]
    if isinstance(expected, (set, frozenset)):
        return differences(sorted(found, key=_exact), sorted(expected, key=_exact), f"{place} (set)")
    same = _exact(found) == _exact(expected)
    return [] if same else [f"{place}: {found!r} instead of {expected!r}"]


def _array_differences(found: Any, expected: Any, place: str) -> list[str]:
    for what in ("dtype", "shape"):
        if getattr(found, what) != getattr(expected, what):
            return [f"{place}: {what} {getattr(found, what)} instead of {getattr(expected, what)}"]
    if found.dtype.str != expected.dtype.str:
        return [f"{place}: {found.dtype.str} instead of {expected.dtype.str}"]
    same = _numbers(found) == _numbers(expected)
    return [] if same else [f"{place}: {found.tobytes()!r} instead of {expected.tobytes()!r}"]


def _numbers(array: Any) -> bytes:
    """Its bytes; of long doubles, those that count."""
    raw: bytes = array.tobytes()
    if array.dtype.char in "gG":
        return np.frombuffer(raw, np.uint8).reshape(-1, np.dtype("g").itemsize)[:, :10].tobytes()
    return raw


def _dict_differences(found: Any, expected: Any, place: str) -> list[str]:
    keys = differences(list(found), list(expected), f"{place} (keys)")
    if keys:
        return keys
    if getattr(found, "default_factory", None) is not getattr(expected, "default_factory", None):
        return [f"{place}: another default_factory"]
    hung = getattr(found, "__dict__", {}), getattr(expected, "__dict__", {})
    lines = differences(*hung, f"{place} (vars)") if any(hung) else []
    pairs = zip(found.items(), expected.values(), strict=True)
    return lines + [line for (key, a), b in pairs for line in differences(a, b, f"{place}[{key!r}]")]


def _tensor_differences(found: torch.Tensor, expected: torch.Tensor, place: str) -> list[str]:
    for what in ("dtype", "shape", "requires_grad", "__dict__"):
        if getattr(found, what) != getattr(expected, what):
            return [f"{place}: {what} {getattr(found, what)} instead of {getattr(expected, what)}"]
    if bits(found) != bits(expected):
        return [f"{place}: {found} instead of {expected}"]
    return []


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements, in C order."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _exact(value: Any) -> Any:
    if isinstance(value, float):
        return "float", struct.pack(">d", value)
    if isinstance(value, complex):
        return "complex", struct.pack(">dd", value.real, value.imag)
    if isinstance(value, (datetime.datetime, datetime.time)):
        return type(value).__name__, value.isoformat(), value.fold, repr(value.tzinfo)
    if isinstance(value, np.generic):
        return str(value.dtype), value.tobytes()
    if isinstance(value, (tuple, frozenset)):
        parts = [(type(one).__name__, _exact(one)) for one in value]
        return type(value).__name__, parts if isinstance(value, tuple) else sorted(parts)
    return type(value).__name__, repr(value)


# --- random ones


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any type, layout and sign, with any bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    base = [n + draw(st.integers(0, 2)) for n in shape]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = math.prod(base) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count + 16 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    tensor = raw.view(dtype)[draw(st.integers(0, 16)) :][: math.prod(base)].reshape(base)
    tensor = tensor[tuple(slice(0, n) for n in shape)]
    if draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    if dtype in (torch.complex64, torch.complex128):
        how = draw(st.sampled_from(["plain", "conj", "imag", "neg"]))
        if how == "conj":
            tensor = tensor.conj()
        elif how == "imag":
            tensor = tensor.conj().imag
        elif how == "neg":
            tensor = torch._neg_view(tensor)
    if draw(st.integers(0, 4)) == 0:
        tensor = tensor[..., None].expand(*tensor.shape, 3)
    if tensor.is_floating_point() and dtype.itemsize != 1:
        kind = draw(st.sampled_from(["plain", "grad", "parameter", "frozen"]))
        if kind == "grad":
            tensor.requires_grad_()
        elif kind != "plain" and not (tensor.is_neg() or tensor.is_conj()):
            tensor = torch.nn.Parameter(tensor, kind == "parameter")
    return tensor


_NUMPY_CODES = [
    *("?", "i1", "u1", "i2", "<u4", ">i4", "i8", "u8", "f2", "f4", ">f8", "c8", "c16", "g", "G", "S3", "U2"),
    *(">U2", "V5", "M8[ns]", "m8[3D]", "M8", ">m8[s]"),
]


@st.composite
def numpy_dtypes(draw: st.DrawFn) -> np.dtype[Any]:
    return np.dtype(draw(st.sampled_from(_NUMPY_CODES)))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = draw(numpy_dtypes())
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    raw = _raw(draw, dtype, math.prod(shape))
    array = np.frombuffer(raw, dtype, math.prod(shape)).reshape(shape)
    how = draw(st.sampled_from(["C", "F", "step", "transposed", "copy"]))
    if how == "F":
        return np.asfortranarray(array)
    if how == "step" and shape:
        return array[::-2]
    return array.T if how == "transposed" else array.copy() if how == "copy" else array


def _raw(draw: st.DrawFn, dtype: np.dtype[Any], count: int) -> bytes:
    nbytes = max(1, count) * dtype.itemsize
    seed = draw(st.integers(0, 2**32))
    if dtype.kind == "U":
        return (
            np.random.default_rng(seed).integers(0, 0xD000, nbytes // 4).astype(dtype.str[0] + "u4").tobytes()
        )
    if dtype.kind == "b":
        return np.random.default_rng(seed).integers(0, 2, nbytes).astype("u1").tobytes()
    return np.random.default_rng(seed).bytes(nbytes)


@st.composite
def numpy_scalars(draw: st.DrawFn) -> Any:
    dtype = draw(numpy_dtypes())
    return np.frombuffer(_raw(draw, dtype, 1), dtype, 1)[0]


_ZONES = st.one_of(
    st.none(),
    st.builds(
        datetime.timezone,
        st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
        st.text(max_size=3),
    ),
    st.just(datetime.timezone.utc),
)
_TIMES = st.one_of(
    st.datetimes(timezones=_ZONES),
    st.dates(),
    st.times(timezones=_ZONES),
    st.timedeltas(),
    st.builds(lambda moment: moment.replace(fold=1), st.datetimes()),
)
_TORCH = st.one_of(
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")]),
    st.builds(torch.Size, st.lists(st.integers(0, 9), max_size=3)),
)
_SURROGATES = st.text(st.characters(), max_size=4)
KEYS = st.one_of(
    st.text(max_size=5),
    _SURROGATES,
    st.integers(-(2**60), 2**60),
    st.none(),
    st.booleans(),
    st.floats(),
    st.binary(max_size=4),
    st.tuples(st.integers(-9, 9), st.text(max_size=3)),
    st.frozensets(st.integers(0, 9), max_size=3),
    _TIMES,
    _TORCH,
)
_PATHS = st.one_of(
    st.builds(pathlib.Path, st.text("ab/", max_size=5)),
    st.builds(pathlib.PurePosixPath, st.text("ab/", max_size=5)),
    st.builds(pathlib.PureWindowsPath, st.text("ab\\:", max_size=5)),
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**2100), 2**2100),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    _SURROGATES,
    st.binary(max_size=5),
    st.builds(bytearray, st.binary(max_size=5)),
    _TIMES,
    _TORCH,
    _PATHS,
    numpy_dtypes(),
    numpy_scalars(),
    arrays(),
    tensors(),
    st.sets(st.one_of(st.integers(0, 99), st.text(max_size=3)), max_size=4),
    st.frozensets(st.one_of(st.integers(0, 99), st.text(max_size=3)), max_size=4),
)


def _with_metadata(made: OrderedDict[Any, Any]) -> OrderedDict[Any, Any]:
    vars(made)["_metadata"] = OrderedDict({"": {"version": 1}})
    return made


def _containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dictionaries = st.dictionaries(KEYS, inside, max_size=4)
    lists = st.lists(inside, max_size=4)
    return st.one_of(
        dictionaries,
        lists,
        st.builds(tuple, lists),
        st.builds(OrderedDict, dictionaries),
        st.builds(OrderedDict, dictionaries).map(_with_metadata),
        st.builds(lambda d: defaultdict(list, d), dictionaries),
        st.builds(lambda d: defaultdict(None, d), dictionaries),
        st.builds(Counter, st.dictionaries(KEYS, st.integers(), max_size=4)),
        st.builds(deque, lists),
        st.builds(deque, lists, st.integers(0, 5)),
        st.builds(
            lambda d: argparse.Namespace(**d), st.dictionaries(st.text("abc", min_size=1), inside, max_size=3)
        ),
        st.builds(lambda one: [one, one, (one,)], inside),
    )


OBJECTS = st.recursive(VALUES, _containers, max_leaves=12)
