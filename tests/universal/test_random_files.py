"""Random files of four systems: loaded, each is what its own library makes of it, or it is refused by name.

The same after a conversion to a checkpoint of ours. Whole results are compared: types, order, values, bits.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import everystep
from everystep import universal
from everystep.errors import UnsupportedSource, UnsupportedState
from everystep.universal.torch_file import reading
from support.foreign.torch_objects import OBJECTS, arrays, differences, tensors

h5py = pytest.importorskip("h5py")

REFUSALS = (UnsupportedSource, UnsupportedState)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


# --- what is written, and what its own library reads -------------------------------------------------------


class Kind(NamedTuple):
    content: st.SearchStrategy[Any]
    write: Callable[[Path, Any], None]
    load: Callable[[Path], Any]


def _write_torch(path: Path, content: tuple[Any, int]) -> None:
    torch.save(content[0], path, pickle_protocol=content[1])


def _load_torch(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def _write_npz(path: Path, content: tuple[dict[str, Any], bool, dict[str, bytes]]) -> None:
    members, compressed, others = content
    how = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, array in members.items():
            with archive.open(name + ".npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array))
        for name, raw in others.items():
            archive.writestr(name, raw)


def _load_npz(path: Path) -> Any:
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


H5_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "compression": st.sampled_from(["gzip", "lzf"]),
        "shuffle": st.booleans(),
        "fletcher32": st.booleans(),
        "chunks": st.just(True),
    },
)


def _datasets() -> st.SearchStrategy[Any]:
    return st.tuples(arrays(), H5_OPTIONS, st.booleans())


H5_NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=6
).filter(lambda name: name not in (".", ".."))
HDF5 = st.dictionaries(
    H5_NAMES,
    st.recursive(_datasets(), lambda inside: st.dictionaries(H5_NAMES, inside, max_size=4), max_leaves=8),
    max_size=4,
)


def _write_hdf5(path: Path, content: tuple[dict[str, Any], dict[str, Any]]) -> None:
    with h5py.File(path, "w", **content[1]) as file:
        _fill(file, content[0])


def _fill(group: Any, content: dict[str, Any]) -> None:
    for name, one in content.items():
        if isinstance(one, dict):
            _fill(group.create_group(name), one)
            continue
        array, options, growing = one
        if array.dtype.kind in "UMm":  # h5py has no such types
            array = (
                array.astype("S") if array.dtype.kind == "U" and array.astype(str).size == 0 else np.int8(5)
            )
        array = np.asarray(array)
        if array.ndim and growing and array.size:
            options = {**options, "maxshape": (None,) * array.ndim}
        group.create_dataset(name, data=array, **(options if array.ndim and array.size else {}))


def _load_hdf5(path: Path) -> Any:
    def read(group: Any) -> Any:
        return {name: read(one) if isinstance(one, h5py.Group) else one[...] for name, one in group.items()}

    with h5py.File(path, "r") as file:
        return read(file)


DCP = st.dictionaries(st.text(max_size=5), st.one_of(OBJECTS, tensors()), min_size=1, max_size=4)


def _write_dcp(path: Path, content: dict[str, Any]) -> None:
    dcp.save(content, checkpoint_id=path, no_dist=True)


def _load_dcp(path: Path) -> Any:
    with io.BytesIO() as made:
        dcp_to_torch_save(path, made)  # type: ignore[arg-type]  # it hands this to torch.save
        made.seek(0)
        return torch.load(made, weights_only=False)


KINDS = {
    "x.pt": Kind(st.tuples(OBJECTS, st.sampled_from([2, 3, 4, 5])), _write_torch, _load_torch),
    "x.npz": Kind(
        st.tuples(
            st.dictionaries(NAMES, arrays(), max_size=4),
            st.booleans(),
            st.sampled_from([{}, {}, {}, {}, {}, {}, {"notes.txt": b"as trained"}]),
        ),
        _write_npz,
        _load_npz,
    ),
    "x.h5": Kind(
        st.tuples(
            HDF5, st.sampled_from([{}, {"libver": "latest"}, {"track_order": True}, {"userblock_size": 512}])
        ),
        _write_hdf5,
        _load_hdf5,
    ),
    "dcp": Kind(DCP, _write_dcp, _load_dcp),
}


# --- the comparison ----------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """What came of one file."""

    outcome: str
    wrong: list[str]


def tried(directory: Path, name: str, content: Any, convert: bool) -> Trial:
    kind, path = KINDS[name], directory / name
    try:
        kind.write(path, content)
        expected = kind.load(path)
    except (Exception, CheckpointException) as error:
        return Trial(f"its own library: {type(error).__name__}", [])
    try:
        found = everystep.load(path)
    except REFUSALS as error:
        return Trial("refused", [] if str(path) in str(error) else [f"the path is not named: {error}"])
    wrong = differences(found, expected)
    if not wrong and convert:
        try:
            universal.convert(path, directory / "converted", overwrite=True)
        except REFUSALS:
            return Trial("equal; not converted", [])
        wrong = differences(everystep.load(directory / "converted"), expected, "converted")
    return Trial("equal", wrong)


QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck))


def check_many(directory: Path, name: str, count: int, convert_every: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()

    @settings(QUIET, max_examples=count)
    @given(KINDS[name].content)
    def check(content: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = tried(directory, name, content, outcomes.total() % convert_every == 0)
        outcomes[trial.outcome] += 1
        assert trial.wrong == []

    check()
    return outcomes


@pytest.mark.parametrize("name", KINDS)
def test_a_random_file_is_loaded_as_its_own_library_loads_it(tmp_path: Path, name: str) -> None:
    outcomes = check_many(tmp_path, name, 40, convert_every=2)
    assert outcomes["equal"] > outcomes.total() / 3, outcomes


@pytest.mark.parametrize("name", ["x.pt", "dcp"])
def test_tensors_in_more_pieces_than_are_read_one_by_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_RUNS", 2)
    outcomes = check_many(tmp_path, name, 60, convert_every=2)
    assert outcomes["equal"] > outcomes.total() / 3, outcomes


def test_convolutions_in_channels_last_are_read(tmp_path: Path) -> None:
    state = {"w": torch.randn(64, 64, 3, 3).to(memory_format=torch.channels_last), "t": torch.randn(99, 50).T}
    torch.save(state, tmp_path / "x.pt")
    assert differences(everystep.load(tmp_path / "x.pt"), state) == []
    with everystep.open(tmp_path / "x.pt") as checkpoint:
        assert torch.equal(torch.as_tensor(checkpoint["w"][3:5]), state["w"][3:5])


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", KINDS)
def test_thousands_of_random_files(tmp_path: Path, name: str) -> None:
    outcomes = check_many(tmp_path, name, 5000, convert_every=5)
    print(name, dict(outcomes))
    assert outcomes["equal"] > outcomes.total() / 3, outcomes
