"""The state a benchmark saves: which arrays, of which shapes, with which bytes.

Built once per run and never changed, so every system saves the same bytes from the same memory. How it is
saved is left to mechanisms.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from everystep_study.mechanisms.mechanism import Subject

if TYPE_CHECKING:
    import torch

Shape: TypeAlias = Literal["few-large", "many-small", "gpt2"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
Array: TypeAlias = NDArray[Any]

DEFAULT_NBYTES, QUICK_NBYTES = 1 << 30, 128 << 20
SMALL_NBYTES = 4096
SMALL_COUNT = 20_000
FEW = 8

CONTEXT = 1024
_GPT2_VOCABULARY = 50_257
HEAD_WIDTH = 64
_PAGE = 4096
_ADAM_COPIES = 3  # the weight and Adam's two moments, all fp32


class State(Subject):
    """Flat on purpose: `safetensors` and `np.savez` know no nesting, and all should do the same work.

    `tensors` are the same memory as `arrays` seen through torch, or None where torch is not installed. A load
    goes into new memory, which `loaded` then has, or with `in_place` into the arrays.
    """

    def __init__(self, arrays: Mapping[str, Array], tensors: Mapping[str, torch.Tensor] | None) -> None:
        self.arrays, self.tensors = dict(arrays), tensors
        self.in_place = False
        self.loaded: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> State:
        """With tensors of the same memory, where torch is installed."""
        if importlib.util.find_spec("torch") is None:
            return cls(arrays, None)
        import torch

        return cls(arrays, {name: torch.from_numpy(array) for name, array in arrays.items()})

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def tree(self, weights_only: bool = False) -> dict[str, Any]:
        """What a user would hold: torch tensors where there is torch, numpy arrays elsewhere."""
        return dict(self.arrays if self.tensors is None else self.tensors)

    def target(self, weights_only: bool = False) -> dict[str, Any]:
        if self.in_place:
            return self.tree()
        import torch

        return {name: torch.empty_like(tensor) for name, tensor in self.tree().items()}

    def put(self, tree: Mapping[str, Any]) -> None:
        self.loaded = tree

    def put_flat(self, found: Mapping[str, Any]) -> None:
        """Takes tensors that are maps of a file. Reading a byte of each page has them all in memory."""
        for tensor in found.values():
            if tensor.numel():
                tensor.numpy().reshape(-1).view(np.uint8)[::_PAGE].max()
        self.loaded = found


@dataclass(frozen=True, slots=True)
class Gpt2:
    """A GPT-2 scaled to a size: width and depth move together, the vocabulary takes the rest."""

    width: int
    layers: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes())

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        d = self.width
        yield "wte.weight", (self.vocabulary, d)
        yield "wpe.weight", (CONTEXT, d)
        for i in range(self.layers):
            block = f"h.{i}"
            yield f"{block}.ln_1.weight", (d,)
            yield f"{block}.ln_1.bias", (d,)
            yield f"{block}.attn.c_attn.weight", (d, 3 * d)
            yield f"{block}.attn.c_attn.bias", (3 * d,)
            yield f"{block}.attn.c_proj.weight", (d, d)
            yield f"{block}.attn.c_proj.bias", (d,)
            yield f"{block}.ln_2.weight", (d,)
            yield f"{block}.ln_2.bias", (d,)
            yield f"{block}.mlp.c_fc.weight", (d, 4 * d)
            yield f"{block}.mlp.c_fc.bias", (4 * d,)
            yield f"{block}.mlp.c_proj.weight", (4 * d, d)
            yield f"{block}.mlp.c_proj.bias", (d,)
        yield "ln_f.weight", (d,)
        yield "ln_f.bias", (d,)


def fit_gpt2(nbytes: int) -> Gpt2:
    """The GPT-2 whose weights and Adam moments come to `nbytes`.

    GPT-2 small has 12 layers of width 12 x 64; the same rule gives the smaller and larger ones here. The
    vocabulary is fitted last, so the total is right to within one embedding row; of all depths the one
    whose vocabulary comes closest to GPT-2's own is taken.
    """
    target = nbytes // (4 * _ADAM_COPIES)
    best: Gpt2 | None = None
    for layers in range(1, 1000):
        width = HEAD_WIDTH * layers
        rest = Gpt2(width, layers, 0).parameters
        vocabulary = (target - rest) // width
        if vocabulary < 1:
            break
        if best is None or abs(vocabulary - _GPT2_VOCABULARY) < abs(best.vocabulary - _GPT2_VOCABULARY):
            best = Gpt2(width, layers, vocabulary)
    if best is None:
        raise ValueError(f"a GPT-2 with Adam does not fit into {nbytes} bytes: ask for 2 MiB or more")
    return best


def shape_of(nbytes: int, layers: int | None = None, width: int | None = None) -> Gpt2:
    """The GPT-2 whose weights and Adam moments come to `nbytes`; the vocabulary takes what the rest leaves.

    With one of `layers` and `width` the other follows GPT-2's rule, 64 of width per layer.
    """
    if layers is None and width is None:
        return fit_gpt2(nbytes)
    layers = layers if layers is not None else max(1, (width or 0) // HEAD_WIDTH)
    width = width if width is not None else HEAD_WIDTH * layers
    if layers < 1:
        raise ValueError(f"a model has at least one layer, not {layers}")
    if width < HEAD_WIDTH or width % HEAD_WIDTH:
        raise ValueError(f"the width is a multiple of the head's, {HEAD_WIDTH}, not {width}")
    rest = Gpt2(width, layers, 0).parameters
    vocabulary = (nbytes // (4 * _ADAM_COPIES) - rest) // width
    if vocabulary < 2:
        needed = 4 * _ADAM_COPIES * (rest + 2 * width) / (1 << 20)
        raise ValueError(
            f"{layers} layers of width {width} with Adam take {needed:.0f} MiB: give more --size"
        )
    return Gpt2(width, layers, vocabulary)


@dataclass(frozen=True, slots=True)
class Load:
    """How much one step of a training computes."""

    batch: int
    sequence: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.sequence < 1:
            raise ValueError(
                f"a step computes at least one token, not a batch of {self.batch} x {self.sequence}"
            )
        if self.sequence > CONTEXT:
            raise ValueError(f"GPT-2 sees {CONTEXT} tokens at most, not a sequence of {self.sequence}")

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


def shapes_of(shape: Shape, nbytes: int | None = None) -> dict[str, tuple[int, ...]]:
    """Name and shape of every fp32 array of a state of about `nbytes` (the shape's own size when None)."""
    if shape == "few-large":
        return _few_large(DEFAULT_NBYTES if nbytes is None else nbytes)
    if shape == "many-small":
        count = SMALL_COUNT if nbytes is None else max(1, nbytes // SMALL_NBYTES)
        return {f"layer.{i:06d}.weight": (SMALL_NBYTES // 4,) for i in range(count)}
    return _gpt2(DEFAULT_NBYTES if nbytes is None else nbytes)


def build(shape: Shape, nbytes: int | None = None, *, seed: int = 0) -> State:
    """The state itself, filled with reproducible noise (which no device or filesystem can compress away)."""
    rng = np.random.default_rng(seed)
    shapes = shapes_of(shape, nbytes)
    tensors: dict[str, torch.Tensor] | None = None
    arrays: dict[str, Array]
    if importlib.util.find_spec("torch") is None:
        arrays = {name: np.empty(dims, np.float32) for name, dims in shapes.items()}
    else:
        import torch

        # torch allocates, so that addresses have the alignment, and memory the pages, of a real training.
        tensors = {name: torch.empty(dims, dtype=torch.float32) for name, dims in shapes.items()}
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    for name, array in arrays.items():
        if array.ndim == 0:
            array[...] = 1000.0  # Adam's step count
            continue
        rng.standard_normal(out=array, dtype=np.float32)
        if name.endswith(".exp_avg_sq"):
            np.square(array, out=array)
    return State(arrays, tensors)


def _few_large(nbytes: int) -> dict[str, tuple[int, ...]]:
    elements = max(FEW, nbytes // 4)
    each = elements // FEW
    if each >= 1024:
        each -= each % 1024
    sizes = [each] * (FEW - 1) + [elements - each * (FEW - 1)]
    return {
        f"layer.{i}.weight": (size // 1024, 1024) if size % 1024 == 0 else (size,)
        for i, size in enumerate(sizes)
    }


def _gpt2(nbytes: int) -> dict[str, tuple[int, ...]]:
    weights = dict(fit_gpt2(nbytes).shapes())
    shapes: dict[str, tuple[int, ...]] = {f"model.{name}": dims for name, dims in weights.items()}
    for name, dims in weights.items():
        shapes[f"optimizer.{name}.step"] = ()
        shapes[f"optimizer.{name}.exp_avg"] = dims
        shapes[f"optimizer.{name}.exp_avg_sq"] = dims
    return shapes


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """How two sets of arrays or tensors differ, bit for bit, or None when they are equal."""
    if expected.keys() != found.keys():
        odd = sorted(expected.keys() ^ found.keys())
        return f"leaves missing or made up: {', '.join(odd[:3])}{' ...' if len(odd) > 3 else ''}"
    for name, leaf in expected.items():
        array, other = _array(leaf), _array(found[name])
        if array.dtype != other.dtype or array.shape != other.shape:
            return f"{name}: {array.dtype}{array.shape} became {other.dtype}{other.shape}"
        if not np.array_equal(bytes_of(array), bytes_of(other)):
            return f"{name} differs"
    return None


def _array(leaf: Any) -> Array:
    return np.asarray(leaf.detach() if hasattr(leaf, "detach") else leaf)


def bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
