"""Directories of `torch.distributed.checkpoint`: ``.metadata`` and ``__R_N.distcp`` files.

The metadata is a pickle that says for each tensor its shape and the boxes it was saved in, and for each box the file,
offset and length of an item. An item is a `torch.save` archive with one tensor (or one object), so a box's elements
lie in one piece inside of it. Names stay as they are in the state dict; only ``optimizer.state.<parameter>.<state>``,
the form that torch's ``get_state_dict`` gives, becomes ``optimizer.<parameter>.<state>``.
"""

from __future__ import annotations

import os
from typing import Any

from holdfast.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from holdfast.format.geometry import Box, TooTangled, disjoint, whole
from holdfast.universal.pickle_machine import MAX_PICKLE_NBYTES, PickleMachine, Record
from holdfast.universal.source import Source, SourceLeaf, Stretch
from holdfast.universal.torch_file import PLAIN_MAKERS, StoredTensor, read_torch_file, torch_dtype
from holdfast.universal.trees import Collected, step_of
from holdfast.universal.zip_records import OpenFile

KIND = "dcp"
_METADATA = ".metadata"
_STEP_WORDS = ("global_step", "step", "iteration", "train_state.step")
_MODULES = "torch.distributed.checkpoint.metadata"
_TENSOR = f"{_MODULES}.TensorStorageMetadata"
_OBJECT = f"{_MODULES}.BytesStorageMetadata"
_INDEX = f"{_MODULES}.MetadataIndex"
_ALLOWED = frozenset(
    {
        _TENSOR,
        _OBJECT,
        _INDEX,
        f"{_MODULES}.Metadata",
        f"{_MODULES}.ChunkStorageMetadata",
        f"{_MODULES}.TensorProperties",
        f"{_MODULES}.StorageMeta",
        f"{_MODULES}._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
    }
)


def looks_like(path: str | os.PathLike[str]) -> str | None:
    """What was found, or None if this is nothing that `describe` reads."""
    if os.path.isfile(os.path.join(path, _METADATA)):
        return f"a directory of torch.distributed.checkpoint ({_METADATA})"
    return None


def describe(path: str | os.PathLike[str], spec: object = None) -> Source:
    """The leaves and values of a DCP directory."""
    return _Directory(os.path.abspath(path)).source()


class _Directory:
    def __init__(self, path: str) -> None:
        self._path = path
        self._metadata_path = os.path.join(path, _METADATA)
        metadata = self._read_metadata()
        self._entries = self._dictionary(metadata, "state_dict_metadata")
        storage = self._dictionary(metadata, "storage_data")
        self._items: dict[tuple[str, tuple[int, ...] | None], Record] = {}
        for index, info in storage.items():
            if not isinstance(index, Record) or not isinstance(info, Record):
                raise self._corrupt("the metadata gives places in a form that is not known")
            at = index.attributes.get("offset")
            name = index.attributes.get("fqn")
            if not isinstance(name, str) or not (at is None or isinstance(at, tuple)):
                raise self._corrupt("the metadata has an entry without a name")
            self._items[name, at] = info
        self._version = metadata.get("version")

    def source(self) -> Source:
        into = Collected(self._path)
        leaves: list[SourceLeaf] = []
        for name, entry in self._entries.items():
            if not isinstance(name, str) or not isinstance(entry, Record):
                raise self._corrupt("the metadata has an entry of a form that is not known")
            renamed = _our_name(name)
            if entry.name == _TENSOR:
                leaves.append(self._leaf(name, renamed, entry))
            elif entry.name == _OBJECT:
                into.add(self._object(name), renamed)
            else:
                raise UnsupportedSource(f"{self._metadata_path}: entry {name!r} is a {entry.name!r}")
        others, aliases = into.leaves()
        names = [leaf.name for leaf in (*leaves, *others)]
        if len({*names, *aliases}) != len(names) + len(aliases):
            raise UnsupportedSource(f"{self._path}: two entries have one name")
        facts = {"format": "torch.distributed.checkpoint"}
        if isinstance(self._version, str):
            facts["version"] = self._version
        return Source(
            path=self._path,
            kind=KIND,
            step=step_of(into.values, _STEP_WORDS),
            leaves=(*leaves, *others),
            values=into.values,
            aliases=aliases,
            facts=facts,
        )

    def _read_metadata(self) -> dict[str, Any]:
        try:
            file = OpenFile(self._metadata_path)
        except FileNotFoundError:
            raise IncompleteCheckpoint(
                "the file is missing: the save did not finish, or this is no DCP directory",
                path=self._metadata_path,
            ) from None
        with file:
            if file.nbytes > MAX_PICKLE_NBYTES:
                raise UnsupportedSource(f"{self._metadata_path}: {file.nbytes} bytes are above the limit")
            data = file.read(0, file.nbytes)
        made = PickleMachine(data, path=self._metadata_path, makers=PLAIN_MAKERS, inert=_ALLOWED).run()
        if not isinstance(made, Record) or made.name != f"{_MODULES}.Metadata":
            raise UnsupportedSource(f"{self._metadata_path}: this is not the metadata of DCP")
        return dict(made.attributes)

    def _corrupt(self, reason: str, leaf: str | None = None) -> CorruptCheckpoint:
        return CorruptCheckpoint(reason, path=self._metadata_path, leaf=leaf)

    def _dictionary(self, metadata: dict[str, Any], name: str) -> dict[Any, Any]:
        found = metadata.get(name)
        if not isinstance(found, dict):
            raise UnsupportedSource(
                f"{self._metadata_path}: there is no {name}; another writer made this directory"
            )
        return found

    def _place(self, name: str, at: tuple[int, ...] | None) -> tuple[str, int, int]:
        info = self._items.get((name, at))
        if info is None:
            raise self._corrupt(f"the place of the piece at {at} is missing", name)
        known = info.attributes
        file, offset, nbytes = known.get("relative_path"), known.get("offset"), known.get("length")
        if known.get("transform_descriptors"):
            raise UnsupportedSource(f"{self._metadata_path}: {name!r} is stored compressed or encrypted")
        if not isinstance(file, str) or type(offset) is not int or type(nbytes) is not int:
            raise self._corrupt("the place of a piece has a form that is not known", name)
        where = os.path.normpath(os.path.join(self._path, file))
        if os.path.isabs(file) or not where.startswith(self._path + os.sep) or offset < 0 or nbytes < 0:
            raise self._corrupt(f"a piece lies outside of the directory: {file!r}", name)
        return where, offset, nbytes

    def _object(self, name: str) -> Any:
        file, offset, nbytes = self._place(name, None)
        return read_torch_file(file, start=offset, nbytes=nbytes)

    def _leaf(self, name: str, renamed: str, entry: Record) -> SourceLeaf:
        known = entry.attributes
        shape, chunks, properties = known.get("size"), known.get("chunks"), known.get("properties")
        if not _is_shape(shape) or not isinstance(chunks, list) or not isinstance(properties, Record):
            raise self._corrupt("the description of the tensor is damaged", name)
        assert isinstance(shape, tuple)
        dtype = self._dtype(name, properties)
        stretches: list[Stretch] = []
        boxes: list[Box] = []
        for chunk in chunks:
            box = self._box(name, chunk)
            if box in boxes[-1:]:
                continue
            boxes.append(box)
            file, offset, nbytes = self._place(name, box.start)
            tensor = read_torch_file(file, start=offset, nbytes=nbytes)
            if not isinstance(tensor, StoredTensor) or tensor.shape != box.shape or tensor.dtype != dtype:
                raise CorruptCheckpoint(
                    "the stored piece is not what the metadata says", path=file, leaf=name
                )
            stretches.extend(tensor.stretches(box, leaf=name))
        self._require_all(name, shape, boxes)
        return SourceLeaf(renamed, dtype, shape, tuple(stretches))

    def _dtype(self, name: str, properties: Record) -> str:
        state = properties.state
        value = state[0] if isinstance(state, tuple) and state else properties.attributes.get("dtype")
        try:
            return torch_dtype(value)
        except ValueError:
            raise UnsupportedSource(f"{self._metadata_path}: {name!r} has an unknown element type") from None

    def _box(self, name: str, chunk: object) -> Box:
        known = chunk.attributes if isinstance(chunk, Record) else {}
        start, shape = known.get("offsets"), known.get("sizes")
        if not _is_shape(start) or not _is_shape(shape) or len(start or ()) != len(shape or ()):
            raise self._corrupt("the description of a piece is damaged", name)
        return Box(tuple(start or ()), tuple(shape or ()))

    def _require_all(self, name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
        all_of_it = whole(shape)
        if any(
            len(box.shape) != len(shape) or any(b > n for b, n in zip(box.stop, shape, strict=True))
            for box in boxes
        ):
            raise self._corrupt("a piece reaches past the tensor", name)
        try:
            apart = disjoint(boxes)
        except TooTangled as error:
            raise self._corrupt(str(error), name) from error
        if not apart or sum(box.volume for box in boxes) != all_of_it.volume:
            raise self._corrupt("the pieces do not make up the tensor", name)


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _our_name(name: str) -> str:
    for old, new in (("optimizer.state.", "optimizer."), ("optim.state.", "optim.")):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
