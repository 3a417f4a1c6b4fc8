"""`state_of(engine)`: the training of an engine as a state of live objects, for a `Checkpointer`.

A `Checkpointer` saves while the next forward and backward run, keeps as many checkpoints as it should, and
finds the newest intact one: what ``save_checkpoint`` has no arguments for.

Names of DeepSpeed that this relies on, most of them private: ``basic_optimizer``, ``global_steps``,
``global_samples``, ``skipped_steps``, ``micro_steps``, ``seq_dp_world_size``, ``mp_world_size``,
``has_moe_layers``, ``checkpoint_event_prologue``, ``checkpoint_event_epilogue``, ``ds_tensor``,
``_get_zero_param_shapes``, and the arguments that ``load_state_dict`` of each optimizer has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine, PipelineEngine

from everystep.integrations.deepspeed.objects import make_object, trained_tensors
from everystep.integrations.shared.states import Attributes, merged, require_fit, with_entries
from everystep.state.marks import per_rank
from everystep.state.rng import rng
from everystep.universal.deepspeed.plain_objects import from_plain, to_plain


def state_of(engine: DeepSpeedEngine, **more: Any) -> dict[str, Any]:
    """All that ``engine.save_checkpoint`` saves, as a state for `everystep.Checkpointer`.

    It also has the random numbers and the buffers of every rank. It has the live objects, so call it once,
    after ``deepspeed.initialize``. Restore it on as many ranks, with the same ZeRO stage.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        more: Other entries of the state, by name.
    """
    if engine.zero_nvme_offload_optimizer() or engine.zero_elastic_checkpoint():
        raise NotImplementedError(
            "state_of does not support optimizer states on NVMe, nor ZeRO's elastic checkpoints"
        )
    # Without model parallelism, all ranks have the same weights, and each writes a share of them.
    alike = engine.mp_world_size == 1 and not engine.has_moe_layers and not isinstance(engine, PipelineEngine)
    model, optimizer = _Tensors(lambda: _weights(engine.module)), _Optimizer(engine)
    taken = {
        "counters": _Counters(engine, alike),  # the first one: it checks that the world is the same
        "model": model if alike else per_rank(model),
        "buffers": per_rank(_Tensors(lambda: _buffers(engine.module))),
        "optimizer": optimizer if alike and not engine.zero_optimization() else per_rank(optimizer),
        "scheduler": engine.lr_scheduler,
        "rng": per_rank(rng()),
    }
    return with_entries(taken, more)


class _Tensors:
    """Tensors by name, found again for each save: DeepSpeed may move them. They are filled in place."""

    def __init__(self, named: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._named = named

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._named()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        own = self._named()
        saved, here = ({name: tensor.shape for name, tensor in side.items()} for side in (state, own))
        require_fit(saved, here)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those of ZeRO-3 are elsewhere: in the optimizer's state, frozen ones in `_buffers`."""
    named = module.named_parameters()
    return {name: weight.detach() for name, weight in named if not hasattr(weight, "ds_tensor")}


def _buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What each rank has for itself: DeepSpeed does not make statistics of batches equal on all ranks."""
    persistent = module.state_dict().keys()
    found = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    for name, weight in module.named_parameters():
        if hasattr(weight, "ds_tensor") and not weight.requires_grad:
            found[name] = weight.ds_tensor.detach()
    return found


class _Counters(Attributes):
    """The counters of the engine, and in which world they count."""

    def __init__(self, engine: DeepSpeedEngine, alike: bool) -> None:
        super().__init__(engine, "global_steps", "global_samples", "skipped_steps", "micro_steps")
        self._engine, self._alike = engine, alike

    def state_dict(self) -> dict[str, Any]:
        engine, found = self._engine, super().state_dict()
        found["stage"] = int(engine.zero_optimization_stage())
        found["ranks"] = int(engine.seq_dp_world_size) if engine.zero_optimization() else 1
        if self._alike and engine.zero_optimization_partition_weights():
            # Then no leaf has the shape of a parameter.
            shapes = merged(engine._get_zero_param_shapes())
            found["shapes"] = {name: tuple(shape) for name, shape in shapes.items()}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        saved, here = (state["stage"], state["ranks"]), (own["stage"], own["ranks"])
        if saved != here:
            raise ValueError(
                f"it was saved by ZeRO stage {saved[0]} on {saved[1]} data-parallel ranks, and the engine "
                f"has stage {here[0]} on {here[1]}. Start it as it was"
            )
        if "shapes" in state:  # checkpoints of the first versions have none
            require_fit(state["shapes"], own["shapes"])
        super().load_state_dict(state)


class _Optimizer(torch.optim.Optimizer):
    """DeepSpeed's optimizer as the `Checkpointer` sees it: its steps change everything that is trained."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._optimizer_step_pre_hooks = engine.basic_optimizer._optimizer_step_pre_hooks

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [{"params": list(trained_tensors(self._engine))}]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._engine.basic_optimizer.state

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        return self._engine.basic_optimizer.register_step_pre_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        return {"own": to_plain(self._engine.optimizer.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        engine, own = self._engine, from_plain(state["own"], make_object)
        optimizer = engine.optimizer
        if engine.zero_optimization():
            rank = dist.get_rank(group=optimizer.dp_process_group)
            if hasattr(optimizer, "checkpoint_event_prologue"):
                optimizer.checkpoint_event_prologue()
            optimizer.load_state_dict(
                state_dict_list=[None] * rank + [own], load_optimizer_states=True, load_from_fp32_weights=True
            )
            if hasattr(optimizer, "checkpoint_event_epilogue"):
                optimizer.checkpoint_event_epilogue()
        elif engine.fp16_enabled() or engine.bfloat16_enabled():
            optimizer.load_state_dict(own, load_optimizer_states=True)
        else:
            optimizer.load_state_dict(own)
