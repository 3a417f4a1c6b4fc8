"""Random transfers, and a model of what they must do: hypothesis strategies for pieces, numpy for the bytes.

A `Spec` says how a piece looks; `make_source` and `make_target` give it memory. The model of a file is one
numpy array of its bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from everystep.engine import (
    CHUNK_NBYTES,
    Backend,
    ByteSource,
    Consumed,
    Memory,
    Padding,
    Produced,
    Strided,
    Tuning,
    Unkept,
    xxh3_64,
)

PAGE = 4096
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Kind = Literal["memory", "strided", "callback", "unkept", "padding"]


@dataclass(frozen=True)
class Spec:
    """One piece: the gap before it, its kind and size, and where its address lies within a page."""

    gap: int
    nbytes: int
    kind: Kind
    congruent: bool  # address and offset agree modulo the page: what direct I/O without a copy needs
    residue: int  # of the address, when not congruent
    itemsize: int  # of strided pieces


def small_windows(backend: Backend, *, depth: int = 3, small_nbytes: int = 0) -> Tuning:
    """Windows far smaller than the data, so that pieces cross many of them."""
    return Tuning(backend, 64 << 10, depth, small_nbytes)


_sizes = st.one_of(
    st.integers(0, 100),
    st.integers(0, 20_000),
    st.integers(30_000, 200_000),
    st.sampled_from([32 << 10, 64 << 10, (64 << 10) + 1, CHUNK_NBYTES - 1, CHUNK_NBYTES, CHUNK_NBYTES + 1]),
    st.integers(CHUNK_NBYTES, 2 * CHUNK_NBYTES + 70_000),
)
_gaps = st.one_of(st.just(0), st.integers(0, 100), st.sampled_from([4095, 4096, 65_536, 65_537, 200_000]))


def specs(*kinds: Kind) -> st.SearchStrategy[Spec]:
    return st.builds(
        Spec,
        gap=_gaps,
        nbytes=_sizes,
        kind=st.sampled_from(kinds),
        congruent=st.booleans(),
        residue=st.integers(0, PAGE - 1),
        itemsize=st.sampled_from([1, 2, 3, 4, 5, 8, 12, 16]),
    )


def offsets_of(pieces: Sequence[Spec]) -> list[int]:
    ends = itertools.accumulate(spec.gap + spec.nbytes for spec in pieces)
    return [end - spec.nbytes for end, spec in zip(ends, pieces, strict=True)]


def random_bytes(nbytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def place(data: Bytes, residue: int) -> Bytes:
    """A copy of `data` at an address with that residue modulo the page."""
    base = np.empty(data.nbytes + PAGE, np.uint8)
    skip = (residue - base.ctypes.data) % PAGE
    view = base[skip : skip + data.nbytes]
    view[:] = data
    return view


HUGE_PAGE = 2 << 20


def in_pages(data: Bytes, residue: int, *, huge: bool) -> Bytes:
    """A copy of `data` in memory of its own, of huge pages or of small ones."""
    memory = mmap.mmap(-1, data.nbytes + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    base = np.frombuffer(memory, np.uint8)
    skip = (residue - base.ctypes.data) % HUGE_PAGE
    base[:] = 1  # also what lies before: the first page is then a huge one as well
    view = base[skip : skip + data.nbytes]
    view[:] = data
    return view


def memory_of(array: Bytes) -> Memory:
    return Memory(array.ctypes.data, array.nbytes, array)


def checksums(data: Bytes, chunk_nbytes: int = CHUNK_NBYTES) -> str:
    """What the engine must compute: sixteen digits per chunk."""
    raw = data.tobytes()
    return "".join(
        f"{xxh3_64(raw[start : start + chunk_nbytes]):016x}" for start in range(0, len(raw), chunk_nbytes)
    )


@dataclass
class Windows:
    """The callback side of a `Produced` or `Consumed`: serves or takes windows, and remembers which."""

    data: Bytes
    seen: list[tuple[int, int]] = field(default_factory=list)

    def fill(self, window: memoryview, offset: int) -> None:
        self.seen.append((offset, len(window)))
        window[:] = self.data[offset : offset + len(window)].data

    def drain(self, window: memoryview, offset: int) -> None:
        self.seen.append((offset, len(window)))
        self.data[offset : offset + len(window)] = np.frombuffer(window, np.uint8)

    def covered_once(self) -> bool:
        at = 0
        for offset, nbytes in self.seen:
            if offset != at:
                return False
            at += nbytes
        return at == self.data.nbytes


def _strided_view(nbytes: int, itemsize: int) -> Any:
    """A transposed array of at most `nbytes`: as many whole rows of whole items as fit."""
    rows = max(1, int((nbytes // itemsize) ** 0.5))
    columns = nbytes // itemsize // rows
    return np.zeros((columns, rows), np.dtype((np.void, itemsize))).T


def fitted(spec: Spec) -> Spec:
    """Strided pieces hold whole rows of whole items; their size is cut to that."""
    if spec.kind != "strided":
        return spec
    view = _strided_view(spec.nbytes, spec.itemsize)
    return replace(spec, nbytes=view.nbytes)


def _describe(view: Any) -> Strided:
    return Strided(view.ctypes.data, view.itemsize, view.shape, view.strides, view)


def _residue(spec: Spec, offset: int) -> int:
    return offset % PAGE if spec.congruent else spec.residue


def make_source(spec: Spec, offset: int, data: Bytes) -> ByteSource:
    """A source of exactly `data`."""
    if spec.kind == "memory":
        return memory_of(place(data, _residue(spec, offset)))
    if spec.kind == "strided":
        view = _strided_view(spec.nbytes, spec.itemsize)
        view[...] = np.frombuffer(data.tobytes(), view.dtype).reshape(view.shape)
        return _describe(view)
    return Produced(data.nbytes, Windows(data).fill)


@dataclass(frozen=True)
class Target:
    """A destination, and a way to see what arrived there (None where nothing is kept)."""

    destination: Memory | Strided | Consumed | Unkept | Padding
    array: Any

    def arrived(self) -> Bytes:
        return np.frombuffer(np.ascontiguousarray(self.array).tobytes(), np.uint8)


def make_target(spec: Spec, offset: int) -> Target:
    if spec.kind == "memory":
        array = place(np.full(spec.nbytes, 0xEE, np.uint8), _residue(spec, offset))
        return Target(memory_of(array), array)
    if spec.kind == "strided":
        view = _strided_view(spec.nbytes, spec.itemsize)
        return Target(_describe(view), view)
    if spec.kind == "callback":
        windows = Windows(np.full(spec.nbytes, 0xEE, np.uint8))
        return Target(Consumed(spec.nbytes, windows.drain), windows.data)
    return Target(Padding(spec.nbytes) if spec.kind == "padding" else Unkept(spec.nbytes), None)
