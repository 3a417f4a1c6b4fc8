"""A directory as torch's DCP writes it: ``.metadata`` and ``__R_N.distcp`` files. Owns no meaning of names.

The metadata is a pickle that says for each tensor its shape and the boxes it was saved in, and for each box
the file, offset and length of an item. An item is a `torch.save` archive with one tensor (or one object), so
a box's elements lie in one piece inside of it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from everystep.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedSource
from everystep.format.geometry import Box, TooTangled, disjoint, whole
from everystep.universal.source import SourceLeaf
from everystep.universal.torch_file.leaves import leaf_of_boxes
from everystep.universal.torch_file.pickle_classes import PLAIN_MAKERS, PLAIN_SETTERS, PLAIN_VALUES
from everystep.universal.torch_file.pickle_machine import MAX_PICKLE_NBYTES, InertObject, PickleMachine
from everystep.universal.torch_file.reading import StoredTensor, read_torch_file, torch_dtype
from everystep.universal.torch_file.torch_values import is_shape
from everystep.universal.torch_file.zip_reader import OpenFile

METADATA = ".metadata"
_MODULES = "torch.distributed.checkpoint.metadata"
_PLANS = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_TENSOR = f"{_MODULES}.TensorStorageMetadata"
_OBJECT = f"{_MODULES}.BytesStorageMetadata"
_ROOTS = frozenset({f"{_MODULES}.Metadata", f"{_MEGATRON}.MCoreMetadata"})
_ALLOWED = frozenset(
    {
        *_ROOTS,
        _TENSOR,
        _OBJECT,
        f"{_MODULES}.MetadataIndex",
        f"{_MODULES}.ChunkStorageMetadata",
        f"{_MODULES}.TensorProperties",
        f"{_MODULES}.StorageMeta",
        f"{_MODULES}._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        # Of torch before 2.3, and what Megatron-Core keeps of its plans. Nothing of these is used.
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        f"{_PLANS}.SavePlan",
        f"{_PLANS}.WriteItem",
        f"{_PLANS}.WriteItemType",
        f"{_PLANS}.TensorWriteData",
        f"{_PLANS}.BytesIOWriteData",
        f"{_MEGATRON}.MCoreSavePlan",
    }
)


class DcpDirectory:
    """The metadata of a directory. `names` are those of its entries, in order: `tensors` or `objects`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.metadata_path = os.path.join(path, METADATA)
        self.attributes = self._read_metadata()
        self._entries = self._dictionary("state_dict_metadata")
        self._items: dict[tuple[str, tuple[int, ...] | None], InertObject] = {}
        for index, info in self._dictionary("storage_data").items():
            if not isinstance(index, InertObject) or not isinstance(info, InertObject):
                raise self._corrupt("the metadata gives places in a form that is not known")
            at = index.attributes.get("offset")
            name = index.attributes.get("fqn")
            if not isinstance(name, str) or not (at is None or isinstance(at, tuple)):
                raise self._corrupt("the metadata has an entry without a name")
            self._items[name, at] = info
        self.names = list(self._entries)
        self.tensors: list[str] = []
        self.objects: list[str] = []
        for name, entry in self._entries.items():
            if not isinstance(name, str) or not isinstance(entry, InertObject):
                raise self._corrupt("the metadata has an entry of a form that is not known")
            if entry.name not in (_TENSOR, _OBJECT):
                raise UnsupportedSource(f"{self.metadata_path}: entry {name!r} is a {entry.name!r}")
            (self.tensors if entry.name == _TENSOR else self.objects).append(name)

    @property
    def version(self) -> str | None:
        found = self.attributes.get("version")
        return found if isinstance(found, str) else None

    @property
    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """Where in the nested state each entry was, as far as the planner says."""
        found = self.attributes.get("planner_data")
        if not isinstance(found, dict):
            return {}
        return {
            name: path
            for name, path in found.items()
            if isinstance(name, str)
            and isinstance(path, tuple)
            and all(isinstance(key, (str, int)) for key in path)
        }

    def read_object(self, name: str, allowed: Collection[str] = ()) -> Any:
        """An entry that is no tensor."""
        file, offset, nbytes = self._place(name, None)
        return read_torch_file(file, allowed, start=offset, nbytes=nbytes)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The type and shape of a tensor."""
        known = self._entries[name].attributes
        shape, properties = known.get("size"), known.get("properties")
        if not is_shape(shape) or not isinstance(properties, InertObject):
            raise self._corrupt("the description of the tensor is damaged", name)
        return self._dtype(name, properties), tuple(shape)

    def stored_boxes(self, name: str) -> list[tuple[Box, StoredTensor]]:
        """The boxes of a tensor, which are together all of it and disjoint, and where each is stored."""
        dtype, shape = self.describe(name)
        chunks = self._entries[name].attributes.get("chunks")
        if not isinstance(chunks, list):
            raise self._corrupt("the description of the tensor is damaged", name)
        boxes = list(dict.fromkeys(self._box(name, chunk) for chunk in chunks))
        self._require_all(name, shape, boxes)
        found: list[tuple[Box, StoredTensor]] = []
        for box in boxes:
            file, offset, nbytes = self._place(name, box.start)
            tensor = read_torch_file(file, start=offset, nbytes=nbytes)
            if not isinstance(tensor, StoredTensor) or tensor.shape != box.shape or tensor.dtype != dtype:
                raise CorruptCheckpoint(
                    "the stored piece is not what the metadata says", path=file, leaf=name
                )
            found.append((box, tensor))
        return found

    def leaf(self, name: str, renamed: str) -> SourceLeaf:
        """A tensor as a leaf."""
        dtype, shape = self.describe(name)
        return leaf_of_boxes(renamed, dtype, shape, self.stored_boxes(name), title=name)

    def _read_metadata(self) -> Mapping[str, Any]:
        try:
            file = OpenFile(self.metadata_path)
        except FileNotFoundError:
            raise IncompleteCheckpoint(
                "the file is missing: the save did not finish, or this is no DCP directory",
                path=self.metadata_path,
            ) from None
        with file:
            if file.nbytes > MAX_PICKLE_NBYTES:
                raise UnsupportedSource(f"{self.metadata_path}: {file.nbytes} bytes are above the limit")
            data = file.read(0, file.nbytes)
        made = PickleMachine(
            data,
            path=self.metadata_path,
            makers=PLAIN_MAKERS,
            values=PLAIN_VALUES,
            setters=PLAIN_SETTERS,
            inert=_ALLOWED,
        ).run()
        if not isinstance(made, InertObject) or made.name not in _ROOTS:
            raise UnsupportedSource(f"{self.metadata_path}: this is not the metadata of DCP")
        return made.attributes

    def _corrupt(self, reason: str, leaf: str | None = None) -> CorruptCheckpoint:
        return CorruptCheckpoint(reason, path=self.metadata_path, leaf=leaf)

    def _dictionary(self, name: str) -> dict[Any, Any]:
        found = self.attributes.get(name)
        if not isinstance(found, dict):
            raise UnsupportedSource(
                f"{self.metadata_path}: there is no {name}; another writer made this directory"
            )
        return found

    def _place(self, name: str, at: tuple[int, ...] | None) -> tuple[str, int, int]:
        info = self._items.get((name, at))
        if info is None:
            raise self._corrupt(f"the place of the piece at {at} is missing", name)
        known = info.attributes
        file, offset, nbytes = known.get("relative_path"), known.get("offset"), known.get("length")
        if known.get("transform_descriptors"):
            raise UnsupportedSource(f"{self.metadata_path}: {name!r} is stored compressed or encrypted")
        if not isinstance(file, str) or type(offset) is not int or type(nbytes) is not int:
            raise self._corrupt("the place of a piece has a form that is not known", name)
        where = os.path.normpath(os.path.join(self.path, file))
        if os.path.isabs(file) or not where.startswith(self.path + os.sep) or offset < 0 or nbytes < 0:
            raise self._corrupt(f"a piece lies outside of the directory: {file!r}", name)
        return where, offset, nbytes

    def _dtype(self, name: str, properties: InertObject) -> str:
        state = properties.state
        value = state[0] if isinstance(state, tuple) and state else properties.attributes.get("dtype")
        try:
            return torch_dtype(value)
        except ValueError:
            raise UnsupportedSource(f"{self.metadata_path}: {name!r} has an unknown element type") from None

    def _box(self, name: str, chunk: object) -> Box:
        known = chunk.attributes if isinstance(chunk, InertObject) else {}
        start, shape = known.get("offsets"), known.get("sizes")
        if not is_shape(start) or not is_shape(shape) or len(start or ()) != len(shape or ()):
            raise self._corrupt("the description of a piece is damaged", name)
        return Box(tuple(start or ()), tuple(shape or ()))

    def _require_all(self, name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
        if any(
            len(box.shape) != len(shape) or any(b > n for b, n in zip(box.stop, shape, strict=True))
            for box in boxes
        ):
            raise self._corrupt("a piece reaches past the tensor", name)
        problem = not_all_of(shape, boxes)
        if problem is not None:
            raise self._corrupt(problem, name)


def not_all_of(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """What is wrong with boxes that should be disjoint and together all of a tensor; None if nothing is."""
    try:
        apart = disjoint(boxes)
    except TooTangled as error:
        return str(error)
    whole_tensor = apart and sum(box.volume for box in boxes) == whole(shape).volume
    return None if whole_tensor else "the pieces do not make up the tensor"
