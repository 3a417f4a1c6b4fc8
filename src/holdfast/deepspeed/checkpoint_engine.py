"""`use(engine)`: ``save_checkpoint`` and ``load_checkpoint`` of an engine of DeepSpeed go through Holdfast.

Every file that DeepSpeed would write with ``torch.save`` is a Holdfast checkpoint of that name, a directory.
DeepSpeed looks for these names with ``glob`` and ``os.path.exists``, and a rank reads only its own files:
hence one checkpoint per file, not one per tag. The tag as a whole appears at once:

1. Each rank writes its files into ``.TAG.partial``. Each of them is durable by itself.
2. The ranks tell each other whether that succeeded. If one has failed, all raise, and there is no such tag.
3. Rank 0 renames ``.TAG.partial`` to ``TAG`` and syncs the directory above. **This is the commit.**
4. Rank 0 replaces the file ``latest`` by a new one, synced. So it only ever names complete tags.

DeepSpeed does not admit engines of others: ``create_checkpoint_engine`` chooses among four of its own. It
also writes ``latest`` itself, in place, so that a kill can leave it empty; but not for a *decoupled* engine.
So `use` sets ``engine.checkpoint_engine`` to one that says it is decoupled, and wraps three methods of that
DeepSpeedEngine: ``save_checkpoint``, which commits, ``load_checkpoint``, which passes over damage, and
``_take_model_step``, which waits for a save that overlaps.

Other names of DeepSpeed that this relies on: ``basic_optimizer``, ``global_steps``, ``local_rank``,
``global_rank``.
"""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from typing import Any

import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from holdfast.caller import stack_level
from holdfast.deepspeed.objects import make_object
from holdfast.deepspeed.writes import Write, copies, save_for_others
from holdfast.errors import CorruptCheckpoint, HoldfastError, SaveFailed, StateMismatch
from holdfast.integrations import deepspeed_tags as tags
from holdfast.integrations.deepspeed_files import from_plain, to_plain
from holdfast.store import load


def use(engine: DeepSpeedEngine, *, overlap: bool = False) -> DeepSpeedEngine:
    """Lets ``engine.save_checkpoint`` and ``load_checkpoint`` go through Holdfast. Returns the engine.

    A checkpoint is durable when ``save_checkpoint`` returns. With `overlap` it returns at once: the files are
    written while the next forward and backward run, and the next step of the optimizer waits for the commit.
    ``engine.destroy()`` commits the last one.
    """
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        name = type(engine.checkpoint_engine).__name__
        raise ValueError(f"the engine has a {name} already: remove it from the config of DeepSpeed")
    if engine.zero_nvme_offload_optimizer():
        raise NotImplementedError("holdfast.deepspeed does not support optimizer states on NVMe")
    engine.checkpoint_engine = HoldfastEngine(engine, overlap=overlap)
    return engine


class HoldfastEngine(CheckpointEngine):
    """What `use` gives to a DeepSpeedEngine: how it saves and loads."""

    def __init__(self, engine: DeepSpeedEngine, *, overlap: bool) -> None:
        super().__init__()
        self.name = type(self).__name__
        self._engine = engine
        self._overlap = overlap
        self._leads = (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0
        self._info: CheckpointCommitInfo | None = None
        self._writes: list[Write] = []
        self._failure: Exception | None = None
        self._read: tuple[str, Any] | None = None
        self._restores_optimizer = True
        self._save, engine.save_checkpoint = engine.save_checkpoint, self._save_checkpoint
        self._load, engine.load_checkpoint = engine.load_checkpoint, self._load_checkpoint
        self._step, engine._take_model_step = engine._take_model_step, self._take_model_step
        atexit.register(_at_exit, weakref.ref(self))

    # --- saving

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.finish()
        saved = self._save(*args, **kwargs)
        if not self._overlap:
            self.finish()
        return saved

    def _take_model_step(self, *args: Any, **kwargs: Any) -> Any:
        self.finish()
        return self._step(*args, **kwargs)

    def finish(self) -> None:
        """Commits the save that is under way, if there is one. All ranks call it."""
        if self._info is not None:
            self.commit(self._info)

    def create(self, info: CheckpointCommitInfo) -> None:
        self._info, self._writes, self._failure = info, [], None
        self._tag = os.path.abspath(os.path.join(info.save_dir, info.tag))
        try:
            if self._leads:
                tags.begin(self._tag)
        except (HoldfastError, OSError) as error:
            self._failure = error
        dist.barrier()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if self._info is None or os.path.abspath(path) != self._tag:  # that one appears with the commit
            super().makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Begins to write a file. If it fails, the commit raises that, on all ranks."""
        folder, name = os.path.split(os.path.abspath(path))
        try:
            if self._info is None or folder != self._tag:
                save_for_others(state_dict, os.path.join(folder, name))
            elif self._failure is None:
                state = to_plain(state_dict, copies(self._engine)) if self._overlap else to_plain(state_dict)
                target = os.path.join(tags.partial_of(self._tag), name)
                step = self._engine.global_steps
                self._writes.append(Write(target, state, step, watched=self._overlap))
        except (HoldfastError, OSError) as error:
            self._failure = error

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Steps 2 to 4."""
        assert self._info is not None
        given, self._info = self._info, None
        failures = [self._failure, *[write.wait() for write in self._writes]]
        self._writes = []
        self._agree(next(filter(None, failures), None))
        failure = None
        try:
            if self._leads:
                tags.publish(self._tag)
                if given.save_latest:
                    tags.write_latest(os.path.abspath(given.save_dir), given.tag)
        except (HoldfastError, OSError) as error:
            failure = error
        self._agree(failure)
        return True

    def _agree(self, failure: Exception | None) -> None:
        """Raises on all ranks if one of them has failed."""
        said = _gathered(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(said):
            if text is not None:
                raise SaveFailed(f"{self._tag} was not saved, because of rank {rank}: {text}")

    def is_decoupled(self) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        return False

    def cleanup(self) -> None:
        self.finish()

    # --- loading

    def _load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        self.finish()
        engine = self._engine
        if tag is None and not engine.load_universal_checkpoint():
            tag = _newest_intact(load_dir)
        ours = tag is not None and bool(tags.files_of(os.path.join(load_dir, tag)))
        if ours and engine.zero_optimization_partition_weights() and not load_optimizer_states:
            raise NotImplementedError("ZeRO-3 cannot load a tag of Holdfast without its optimizer states")
        self._restores_optimizer = load_optimizer_states and not load_module_only
        try:
            return self._load(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
        finally:
            self._read = None

    def load(self, path: str, map_location: Any = None) -> Any:
        """Onto the CPU, where DeepSpeed wants it. Files that DeepSpeed wrote itself are still read."""
        if os.path.isfile(path):
            return TorchCheckpointEngine().load(path, map_location)
        if self._read is None or self._read[0] != path:  # DeepSpeed asks twice for the first file
            self._read = path, from_plain(load(path, process_group="none"), make_object)
            self._check_ranks(*self._read)
        return self._read[1]

    def _check_ranks(self, path: str, content: dict[str, Any]) -> None:
        """Of ZeRO: DeepSpeed would find out when it has loaded half of it, or not at all."""
        engine = self._engine
        saved, here = content.get("dp_world_size"), engine.seq_dp_world_size
        cut = engine.zero_optimization() and self._restores_optimizer
        if (cut or engine.zero_optimization_partition_weights()) and saved not in (None, here):
            raise StateMismatch(
                f"{path} was saved on {saved} data-parallel ranks, and there are {here} now. Start as many, "
                "or convert the tag: holdfast convert --from deepspeed --to ds-universal",
                wrong=["dp_world_size"],
            )


def _gathered(said: str | None) -> list[str | None]:
    """What each rank says."""
    found: list[str | None] = [said] * dist.get_world_size()
    if len(found) > 1:
        dist.all_gather_object(found, said)
    return found


def _newest_intact(folder: str) -> str | None:
    """The tag that ``latest`` names; if it is damaged, the newest that is not. Each rank reads a share."""
    newest = tags.read_latest(folder)
    if newest is None:
        return None
    reason = None
    for tag in dict.fromkeys([newest, *tags.newest_first(folder)]):
        path = os.path.join(folder, tag)
        files = tags.files_of(path)
        said = _gathered(tags.damage_of(files[dist.get_rank() :: dist.get_world_size()]))
        damage = next(filter(None, said), None)
        if damage is None:
            return tag
        reason = reason or damage
        warnings.warn(f"passing over {path}: {damage}", RuntimeWarning, stacklevel=stack_level())
    raise CorruptCheckpoint(f"no tag is intact: {reason}", path=folder)


def _at_exit(reference: weakref.ref[HoldfastEngine]) -> None:
    engine = reference()
    if engine is not None and dist.is_initialized():
        engine.finish()
