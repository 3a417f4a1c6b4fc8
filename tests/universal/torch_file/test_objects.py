"""What is read from a file of torch.save is what torch itself reads: every type, order, value and bit."""

from __future__ import annotations

import argparse
import decimal
import os
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everystep.errors import UnsupportedSource
from everystep.universal.torch_file.leaves import leaf_of
from everystep.universal.torch_file.reading import StoredTensor, read_torch_file
from everystep.universal.torch_file.torch_values import TorchDevice, TorchDtype, TorchSize
from support.foreign.source_leaves import assembled
from support.foreign.torch_objects import OBJECTS, differences


def realised(value: Any) -> Any:
    """The object with real tensors and real values of torch in place of what stands for them."""
    if isinstance(value, StoredTensor):
        made = assembled(leaf_of("x", value))
        made = torch.nn.Parameter(made, value.requires_grad) if value.is_parameter else made
        vars(made).update(value.attributes)
        return made if value.is_parameter else made.requires_grad_(value.requires_grad)
    if isinstance(value, TorchDtype):
        return getattr(torch, value.name)
    if isinstance(value, TorchSize):
        return torch.Size(value)
    if isinstance(value, TorchDevice):
        return torch.device(value.text)
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**realised(vars(value)))
    if isinstance(value, deque):
        return deque(map(realised, value), value.maxlen)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(realised, value))
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, realised(dict(value)))
    if type(value) is Counter:
        return Counter(realised(dict(value)))
    if isinstance(value, dict):
        filled = type(value)((realised(key), realised(one)) for key, one in value.items())
        if isinstance(value, OrderedDict):
            vars(filled).update(vars(value))
        return filled
    return value


def read_both(path: Path, value: Any, protocol: int = 2) -> tuple[Any, Any]:
    torch.save(value, path, pickle_protocol=protocol)
    return realised(read_torch_file(path)), torch.load(path, weights_only=False)


def check_any_object(path: Path, value: Any, protocol: int) -> None:
    found, expected = read_both(path, value, protocol)
    assert differences(found, expected) == []


QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(QUIET, max_examples=60)
@given(OBJECTS, st.sampled_from([2, 3, 4, 5]))
def test_any_object_is_read_as_torch_reads_it(tmp_path: Path, value: Any, protocol: int) -> None:
    check_any_object(tmp_path / "x.pt", value, protocol)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(QUIET, max_examples=5000)
@given(OBJECTS, st.sampled_from([2, 3, 4, 5]))
def test_thousands_of_objects_are_read_as_torch_reads_them(tmp_path: Path, value: Any, protocol: int) -> None:
    check_any_object(tmp_path / "x.pt", value, protocol)


SINGLE = [
    *(np.datetime64("2024-05-06T07:08"), np.timedelta64(3, "D"), np.longdouble(1) / 3, np.clongdouble(1j)),
    *(np.dtype("f4"), np.dtype(">i8"), np.dtype("M8[3D]"), np.dtype(object), np.float32(0.1), np.bool_(True)),
    *(
        np.str_("a\0b"),
        np.bytes_(b"a\0"),
        np.void(b"abc"),
        np.longdouble([1, 2]),
        np.array(1.5),
        np.empty((0, 3)),
    ),
    *(
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([1, 2], ">i4"),
        np.random.RandomState(3).get_state(),
    ),
    *(
        float("nan"),
        -0.0,
        complex(-0.0, float("inf")),
        2**3000,
        "\ud800",
        b"",
        bytearray(),
        {1},
        frozenset(),
        set(),
    ),
    *(torch.tensor([1 + 2j, 3 - 4j]).conj(), torch.tensor([1 + 2j]).conj().imag, torch.tensor([[1 + 2j]]).mH),
    *(torch.tensor([1 + 2j, 0j], dtype=torch.complex32).conj(), torch.nn.Parameter(torch.ones(2), False)),
    *(
        torch.ones(2, requires_grad=True),
        torch.nn.Buffer(torch.ones(2)),
        torch.Size([]),
        torch.device("cpu", 0),
    ),
]


@pytest.mark.parametrize("value", SINGLE, ids=lambda one: f"{type(one).__name__} {one!r}"[:40])
def test_a_value_keeps_its_type_and_its_bits(tmp_path: Path, value: Any) -> None:
    for protocol in (2, 4, 5):
        found, expected = read_both(tmp_path / "x.pt", {"x": value}, protocol)
        assert differences(found, expected) == []


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    vars(tensor)["tensor_model_parallel"] = True
    return tensor


def test_attributes_of_tensors_are_reported(tmp_path: Path) -> None:
    for tensor in (torch.ones(2), torch.nn.Parameter(torch.ones(2))):
        torch.save(with_attribute(tensor), tmp_path / "x.pt")
        found = read_torch_file(tmp_path / "x.pt")
        assert (found.attributes, found.is_parameter) == (
            {"tensor_model_parallel": True},
            isinstance(tensor, torch.nn.Parameter),
        )


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def attributes_of_a_dict() -> Any:
    made = OrderedDict(a=1)
    vars(made)["extra"] = 1
    return made


REFUSED = {
    "FloatStorage": lambda: torch.ones(2).storage(),
    "UntypedStorage": lambda: torch.ones(2).untyped_storage(),
    "objects": lambda: np.array([None, {}], dtype=object),
    "structured": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "_mareconstruct": lambda: np.ma.masked_array([1, 2], [True, False]),
    "numpy.matrix": lambda: np.matrix([[1]]),
    "numpy.rec": lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
    "metadata": lambda: np.dtype("f4", metadata={"a": 1}),
    "_rebuild_sparse_tensor": lambda: torch.eye(2).to_sparse(),
    "_rebuild_qtensor": quantized,
    "_rebuild_meta_tensor": lambda: torch.empty(2, device="meta"),
    "extra": attributes_of_a_dict,
    "Decimal": lambda: decimal.Decimal("1.5"),
    "range": lambda: range(3),
    "builtins.slice": lambda: slice(3),
    "complex number": lambda: {1j: 1},
    "posix.getcwd": lambda: defaultdict(os.getcwd),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name_and_place(tmp_path: Path, named: str) -> None:
    torch.save({"a": {}, "b": {"w": torch.ones(1), "here": REFUSED[named]()}}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedSource, match=named) as error:
        read_torch_file(tmp_path / "x.pt")
    assert str(tmp_path) in str(error.value)
    if "Storage" not in named:
        assert "'b.here" in str(error.value)
