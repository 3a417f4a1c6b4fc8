"""`use(engine)`: ``save_checkpoint`` and ``load_checkpoint`` of an engine of DeepSpeed go through Everystep.

Every file that DeepSpeed would give ``torch.save`` is an Everystep checkpoint of that name: a directory.
DeepSpeed looks for these names with ``glob`` and ``os.path.exists``, and a rank reads only its own files:
hence one checkpoint per file, not one per tag. How the tag as a whole is committed: `deepspeed_saves`.

DeepSpeed does not admit engines of others: ``create_checkpoint_engine`` chooses among four of its own. It
also writes ``latest`` itself, in place, so that a kill can leave it empty; but not for a *decoupled* engine.
So `use` sets ``engine.checkpoint_engine`` to one that says it is decoupled, and wraps four methods of that
DeepSpeedEngine: ``save_checkpoint``, which commits, ``load_checkpoint``, which passes over damage,
``load_module_state_dict``, which first looks whether the checkpoint fits, and ``_take_model_step``, which
waits for a save that overlaps.

Other names of DeepSpeed that this relies on: ``basic_optimizer``, ``global_steps``, ``local_rank``,
``global_rank``, ``seq_dp_world_size``, ``_get_zero_param_shapes``.
"""

from __future__ import annotations

import atexit
import inspect
import os
import weakref
from typing import Any, Final

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from everystep.engine.atomic_file import file_to_replace
from everystep.errors import StateMismatch
from everystep.integrations.deepspeed import tags
from everystep.integrations.deepspeed.objects import copies_but, make_object, trained_tensors
from everystep.integrations.deepspeed.saves import TagSave
from everystep.integrations.shared.folders import damage_of, first_intact
from everystep.integrations.shared.states import merged, require_fit
from everystep.paths import local_path
from everystep.store import load
from everystep.universal.deepspeed.names import DATA_RANKS, PARAM_SHAPES
from everystep.universal.deepspeed.plain_objects import from_plain, to_plain

WRAPPED: Final = ("save_checkpoint", "load_checkpoint", "load_module_state_dict", "_take_model_step")
"""The methods of a DeepSpeedEngine that `use` replaces."""


def use(engine: DeepSpeedEngine, *, overlap: bool = False) -> DeepSpeedEngine:
    """Makes ``engine.save_checkpoint`` and ``load_checkpoint`` go through Everystep. Returns the engine.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        overlap: If false, a checkpoint is durable when ``save_checkpoint`` returns. If true, that returns at
            once: the files are written while the next forward and backward run, the next step of the
            optimizer waits for the commit, and ``engine.destroy()`` commits the last checkpoint.
    """
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        name = type(engine.checkpoint_engine).__name__
        raise ValueError(f"the engine has a {name} already: remove it from the config of DeepSpeed")
    if engine.zero_nvme_offload_optimizer():
        raise NotImplementedError(
            "everystep.integrations.deepspeed does not support optimizer states on NVMe"
        )
    engine.checkpoint_engine = EverystepEngine(engine, overlap=overlap)
    return engine


class EverystepEngine(CheckpointEngine):
    """What `use` gives to a DeepSpeedEngine: how it saves and loads."""

    def __init__(self, engine: DeepSpeedEngine, *, overlap: bool) -> None:
        super().__init__()
        self.name = type(self).__name__
        self._engine = engine
        self._overlap = overlap
        self._is_coordinator = (
            engine.local_rank if engine.use_node_local_storage() else engine.global_rank
        ) == 0
        self._saving: tuple[TagSave, CheckpointCommitInfo] | None = None
        self._read: tuple[str, Any] | None = None
        self._restores_optimizer = True
        self._own = {name: getattr(engine, name) for name in WRAPPED}
        engine.save_checkpoint = self._save_checkpoint
        engine.load_checkpoint = self._load_checkpoint
        engine.load_module_state_dict = self._load_weights
        engine._take_model_step = self._take_step
        atexit.register(_at_exit, weakref.ref(self))

    # --- saving

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(self._own["save_checkpoint"]).bind(*args, **kwargs)
        local_path(call.arguments["save_dir"])
        self.finish()
        saved = self._own["save_checkpoint"](*args, **kwargs)
        if not self._overlap:
            self.finish()
        return saved

    def _take_step(self, *args: Any, **kwargs: Any) -> Any:
        self.finish()
        return self._own["_take_model_step"](*args, **kwargs)

    def finish(self) -> None:
        """Commits the save that is under way, if there is one. All ranks call it."""
        if self._saving is not None:
            self.commit(self._saving[1])

    def create(self, info: CheckpointCommitInfo) -> None:
        step = self._engine.global_steps
        self._saving = (
            TagSave(info.save_dir, info.tag, step, _gathered, is_coordinator=self._is_coordinator),
            info,
        )

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if not self._is_saved(local_path(path)):  # that one appears with the commit
            super().makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        folder, name = os.path.split(local_path(path))
        if self._saving is None or not self._is_saved(folder):
            _save_as_deepspeed(state_dict, os.path.join(folder, name))
        elif self._overlap:
            # Only a step changes the tensors that are trained; others, as buffers, may change before it.
            plain = to_plain(state_dict, copies_but(trained_tensors(self._engine)))
            self._saving[0].write(name, plain, watched=True)
        else:
            self._saving[0].write(name, to_plain(state_dict), watched=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        assert self._saving is not None
        (saving, _), self._saving = self._saving, None
        saving.commit(latest=info.save_latest)
        return True

    def _is_saved(self, folder: str) -> bool:
        """Whether this is the directory of the tag that is being saved."""
        return self._saving is not None and os.path.abspath(folder) == self._saving[0].path

    def is_decoupled(self) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        return False

    def cleanup(self) -> None:
        self.finish()

    # --- loading

    def _load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.finish()
        engine, own = self._engine, self._own["load_checkpoint"]
        call = inspect.signature(own).bind(*args, **kwargs)
        call.apply_defaults()
        asked = call.arguments
        local_path(asked["load_dir"])
        if asked["tag"] is None and not engine.load_universal_checkpoint():
            asked["tag"] = _newest_intact(asked["load_dir"])
        ours = asked["tag"] is not None and tags.files_of(os.path.join(asked["load_dir"], asked["tag"]))
        if ours and engine.zero_optimization_partition_weights() and not asked["load_optimizer_states"]:
            raise NotImplementedError("ZeRO-3 cannot load a tag of Everystep without its optimizer states")
        self._restores_optimizer = asked["load_optimizer_states"] and not asked["load_module_only"]
        try:
            return own(*call.args, **call.kwargs)
        finally:
            self._read = None

    def load(self, path: str, map_location: Any = None) -> Any:
        """Loads to the CPU, where DeepSpeed expects it. It still reads files that DeepSpeed wrote itself."""
        local_path(path)
        if os.path.isfile(path):
            return TorchCheckpointEngine().load(path, map_location)
        if self._read is None or self._read[0] != path:  # DeepSpeed asks twice for the first file
            self._read = path, from_plain(load(path, process_group="none"), make_object)
        return self._read[1]

    def _load_weights(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """The first thing that a load changes. `StateMismatch` if the checkpoint does not fit."""
        if self._read is not None:
            self._check(checkpoint, os.path.dirname(self._read[0]))
        try:
            self._own["load_module_state_dict"](checkpoint, *args, **kwargs)
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            raise StateMismatch(f"the checkpoint is of another model: {error}") from error

    def _check(self, checkpoint: dict[str, Any], where: str) -> None:
        """Compares states of ZeRO. DeepSpeed would notice after it has loaded half of one, or not at all."""
        engine = self._engine
        cut = engine.zero_optimization() and self._restores_optimizer
        if not (cut or engine.zero_optimization_partition_weights()):
            return
        saved, here = checkpoint.get(DATA_RANKS), engine.seq_dp_world_size
        if saved not in (None, here):
            raise StateMismatch(
                f"{where} was saved on {saved} data-parallel ranks, and there are {here} now. Start as many, "
                "or convert the tag: everystep convert --kind deepspeed --to ds-universal",
                wrong=[DATA_RANKS],
            )
        if (
            checkpoint.get(PARAM_SHAPES) is not None
        ):  # a tag without ZeRO has none; torch compares its weights
            require_fit(merged(checkpoint[PARAM_SHAPES]), merged(engine._get_zero_param_shapes()), where)


def _save_as_deepspeed(state: Any, path: str) -> None:
    """The weights of ``save_16bit_model``: a file as DeepSpeed writes it, but whole and durable."""
    with file_to_replace(path) as file:
        torch.save(state, file)


def _gathered(said: str | None) -> list[str | None]:
    """What each rank says."""
    found: list[str | None] = [said] * dist.get_world_size()
    if len(found) > 1:
        dist.all_gather_object(found, said)
    return found


def _newest_intact(folder: str) -> str | None:
    """The tag that ``latest`` names, or the newest intact one if that is damaged. Each rank reads a share."""

    def damage(tag: str) -> str | None:
        share = tags.files_of(tag)[dist.get_rank() :: dist.get_world_size()]
        return next(filter(None, _gathered(damage_of(share))), None)

    found = first_intact(tags.newest_first(folder), folder, damage)
    return None if found is None else os.path.relpath(found, folder)


def _at_exit(reference: weakref.ref[EverystepEngine]) -> None:
    engine = reference()
    if engine is not None and dist.is_initialized():
        engine.finish()
