"""Promise: every element type and every memory layout is described so that its bytes come back exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from everystep.engine.buffers import Memory, Strided
from everystep.errors import UnsupportedState
from everystep.format import dtypes
from everystep.state import convert, empty, flatten, torch_arrays
from everystep.state.numpy_arrays import ML_DTYPES, NATIVE, overlaps_itself
from everystep.state.torch_arrays import TORCH_NAMES, torch_dtype, window_reader, window_writer
from support.states.memory_store import read, round_trip, save

NUMPY_ONLY = [">f4", ">i8", "<M8[ns]", "<m8[D]", "<U5", "|S3", "|V6", "g", "G", ">c16"]


def random_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = torch_dtype(name)
    count = int(np.prod(shape)) * dtypes.itemsize(name)
    high = 2 if name == "BOOL" else 256
    data = torch.randint(0, high, (count,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", TORCH_NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_torch_dtype_and_shape_comes_back(name: str, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(name, shape)
    back = round_trip({"t": tensor})["t"]
    assert type(back) is torch.Tensor
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert tensor_bytes(back) == tensor_bytes(tensor)


@pytest.mark.parametrize("code", [*NATIVE.values(), *NUMPY_ONLY, *ML_DTYPES.values()])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_every_numpy_dtype_and_shape_comes_back(code: str, shape: tuple[int, ...]) -> None:
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, code) if code in ML_DTYPES.values() else code)
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(0).integers(0, 2 if code == "|b1" else 100, count, np.uint8)
    array = data.view(dtype).reshape(shape) if count else np.empty(shape, dtype)
    back = round_trip({"a": array})["a"]
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()


def test_every_named_type_has_a_size_the_frameworks_agree_with() -> None:
    for name in TORCH_NAMES:
        assert torch_dtype(name).itemsize == dtypes.itemsize(name)
    for name, code in NATIVE.items():
        assert np.dtype(code).itemsize == dtypes.itemsize(name)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 2),
    "sliced": lambda x: x[1:, ::2, 1:3],
    "expanded": lambda x: x[:, :1].expand(-1, 6, -1),
    "scalar of a matrix": lambda x: x[1, 2, 3],
    "offset": lambda x: x.reshape(-1)[7:],
    "permuted": lambda x: x.permute(2, 0, 1)[::2],
    "single rows": lambda x: x[:1, :, :1],
    "empty slice": lambda x: x[2:2],
    "window": lambda x: x.reshape(-1).unfold(0, 5, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["F32", "BF16", "C128", "U8", "F4_E2M1_X2", "C32"])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_torch_layouts_come_back_as_they_look(layout: str, name: str) -> None:
    tensor = LAYOUTS[layout](random_tensor(name, (4, 6, 8)))
    (leaf,) = flatten([tensor]).leaves
    assert isinstance(leaf.source, Memory if tensor.is_contiguous() else Strided)
    assert read(leaf.source) == tensor_bytes(tensor)


def test_channels_last_keeps_values_and_shape() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    back = round_trip([tensor])[0]
    assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    "make",
    [lambda x: x.conj(), lambda x: x.conj().imag, lambda x: x.conj().T, lambda x: torch._neg_view(x.real)],
)
def test_conjugate_and_negative_views_are_stored_as_seen(make: Any) -> None:
    tensor = make(torch.randn(3, 4, dtype=torch.complex64))
    assert tensor.is_conj() or tensor.is_neg()
    assert torch.equal(round_trip([tensor])[0], tensor)


@given(
    hnp.arrays(
        np.int32, hnp.array_shapes(min_dims=1, max_dims=4, max_side=6), elements=st.integers(-9, 9)
    ).flatmap(
        lambda array: hnp.basic_indices(array.shape, allow_newaxis=True).map(lambda index: array[index])
    ),
    st.randoms(),
)
def test_any_numpy_view_is_stored_as_seen(array: np.ndarray, random: Any) -> None:
    array = np.asarray(array)
    axes = list(range(array.ndim))
    random.shuffle(axes)
    array = array.transpose(axes)
    (leaf,) = flatten([array]).leaves
    assert read(leaf.source) == array.tobytes()


def test_memory_maps_are_arrays(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "m", np.int16, "w+", shape=(4,))
    mapped[:] = [1, 2, 3, 4]
    back = round_trip([mapped])[0]
    assert type(back) is np.ndarray
    assert back.tolist() == [1, 2, 3, 4]


class Wrapped(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        lambda: torch.zeros(3).as_subclass(Wrapped),
        lambda: torch.nn.UninitializedParameter(),
        lambda: torch._efficientzerotensor(3),
        lambda: torch.empty(3, dtype=torch.bits8),
        lambda: np.array([object()]),
        lambda: np.zeros(2, [("a", "f4")]),
        lambda: np.ma.masked_array([1, 2], [True, False]),
        lambda: np.matrix([1]),
        lambda: np.array(["a"], np.dtypes.StringDType()),
    ],
)
def test_arrays_that_are_more_than_bytes_are_refused_by_place(make: Any) -> None:
    value = make()
    with pytest.raises(UnsupportedState, match=r"model\.odd"):
        flatten({"model": {"odd": value}})


def test_the_refusal_of_a_meta_tensor_says_what_to_do() -> None:
    with pytest.raises(UnsupportedState, match="materialise"):
        flatten([torch.empty(3, device="meta")])


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("residue", [0, 4, 64, 2048, 4092])
def test_large_fresh_arrays_lie_where_the_file_offset_wants(framework: Any, residue: int) -> None:
    array, memory = empty("F32", (100, 1000), framework, residue)
    assert memory.address % 4096 == residue
    assert memory.nbytes == 400_000
    assert tuple(array.shape) == (100, 1000)
    assert flatten([array]).leaves[0].source.address == memory.address
    assert isinstance(array, torch.Tensor if framework == "torch" else np.ndarray)


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_residue_that_would_misalign_elements_is_not_taken(framework: Any) -> None:
    _, memory = empty("F64", (10_000,), framework, 2)
    assert memory.address % 8 == 0


@pytest.mark.parametrize("name", TORCH_NAMES)
@pytest.mark.parametrize("shape", [(0, 3), (), (70_000, 2)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_fresh_tensors_of_every_type(name: str, shape: tuple[int, ...]) -> None:
    tensor, memory = empty(name, shape, "torch")
    assert (tensor.dtype, tuple(tensor.shape)) == (torch_dtype(name), shape)
    assert (tensor.data_ptr(), tensor.nbytes) == (memory.address, memory.nbytes)
    assert tensor.is_contiguous()


@pytest.mark.parametrize("name", [*NATIVE, *ML_DTYPES])
def test_arrays_convert_between_frameworks_without_changing_bytes(name: str) -> None:
    tensor = random_tensor(name, (3, 4))
    array = convert(tensor, "numpy")
    assert isinstance(array, np.ndarray)
    assert array.tobytes() == tensor_bytes(tensor)
    assert save([array]).leaves["0"].dtype == name
    back = convert(array, "torch")
    assert back.dtype == tensor.dtype
    assert tensor_bytes(back) == tensor_bytes(tensor)
    assert convert(tensor, "torch") is tensor
    assert convert(array, "numpy") is array


def test_converting_shares_memory_and_copes_with_what_torch_cannot_share() -> None:
    array = np.arange(4)
    assert convert(array, "torch").data_ptr() == array.ctypes.data
    assert convert(array[::-1], "torch").tolist() == [3, 2, 1, 0]
    array.flags.writeable = False
    assert convert(array, "torch").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["C32", "F4_E2M1_X2"])
def test_numpy_without_such_a_type_says_to_use_torch(name: str) -> None:
    with pytest.raises(UnsupportedState, match="framework='torch'"):
        empty(name, (2,), "numpy")


def test_torch_without_such_a_type_says_to_use_numpy() -> None:
    with pytest.raises(UnsupportedState, match="framework='numpy'"):
        empty("NP:<M8[ns]", (2,), "torch")
    with pytest.raises(UnsupportedState, match="framework='numpy'"):
        convert(np.array(["a"]), "torch")


def test_without_ml_dtypes_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(UnsupportedState, match="pip install ml_dtypes"):
        empty("BF16", (2,), "numpy")


@pytest.mark.parametrize("step", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.real.t(),
        lambda x: x.conj(),
        lambda x: x.conj().t(),
        lambda x: x.conj().imag[1:4, ::2],
        lambda x: x.conj()[2, 3],
        lambda x: x.to(torch.complex32).conj(),
        lambda x: x.to(torch.complex128).conj()[:, None],
        lambda x: torch._neg_view(x.real)[::2],
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_windows_of_any_tensor_add_up_to_its_bytes(
    make: Any, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows cut through rows and elements, and boxes through windows."""
    monkeypatch.setattr(torch_arrays, "_BOX_NBYTES", 48)
    tensor = make(torch.randn(5, 6, dtype=torch.complex64))
    data = bytearray(tensor.nbytes)
    fill = window_reader(tensor)
    for start in range(0, len(data), step):
        fill(memoryview(data)[start : start + step], start)
    assert bytes(data) == tensor_bytes(tensor.resolve_conj().resolve_neg())


@pytest.mark.parametrize("step", [1, 7, 64])
def test_windows_fill_a_device_tensor(step: int) -> None:
    """There is no device here: the window functions themselves do not care where the tensor lives."""
    tensor = torch.randn(6, 5)
    data = tensor_bytes(tensor)
    target = torch.zeros(6, 5)
    drain = window_writer(target)
    for start in range(0, len(data), step):
        drain(memoryview(bytes(data))[start : start + step], start)
    assert torch.equal(target, tensor)


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((), (), False),
        ((3,), (1,), False),
        ((3,), (0,), True),
        ((1,), (0,), False),
        ((4, 3), (2, 1), True),
        ((4, 3), (3, 1), False),
        ((3, 4), (1, 3), False),
        ((3,), (-1,), False),
        ((2, 2), (1, 1), True),
        ((3, 0, 2), (0, 0, 0), False),
    ],
)
def test_self_overlap_is_seen(shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool) -> None:
    assert overlaps_itself(shape, strides) is overlaps
