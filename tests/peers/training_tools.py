"""What the scripts that train with a framework share. They find this module beside themselves."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import everystep

LAYOUT = os.environ.get("LAYOUT", "")
"""How a script shards its training over ranks. Empty: not at all."""


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of the bytes that this rank has."""
    found = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be spread over ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_digest(module: Any, optimizer: Any) -> str:
    """Of weights and optimizer state, whatever the layout: all ranks gather them, the same on all."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # after some forwards, it has its parameters together
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    state = {names[id(parameter)]: entries for parameter, entries in optimizer.state.items()}
    found = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        for key, tensor in [("", parameter), *sorted(state.get(name, {}).items())]:
            found.update(f"{name} {key}".encode())
            found.update(full(tensor).detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def count_collectives() -> dict[str, int]:
    """Counts the collectives in all later saves of Checkpointers."""
    counted = {"saves": 0, "collectives": 0}
    save = everystep.Checkpointer.save

    def counting(*args: Any, **kwargs: Any) -> Any:
        if not counted["saves"]:
            with CommDebugMode() as check:
                dist.all_reduce(torch.ones(1))
            assert check.get_total_counts() == 1  # it does see them
        with CommDebugMode() as mode:
            result = save(*args, **kwargs)
        counted["saves"] += 1
        counted["collectives"] += mode.get_total_counts()
        return result

    everystep.Checkpointer.save = counting  # type: ignore[method-assign]
    return counted


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(call: Callable[[], dict[str, Any] | None]) -> int:
    """In a process of its own, without the seconds that importing takes. Prints what it returns as JSON."""
    pid = os.fork()
    if pid == 0:
        try:
            report = call()
            if report is not None:
                print("\n" + json.dumps(report), flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def exact(train: Callable[[str, int], dict[str, Any]], folder: str, steps: list[int]) -> None:
    """One whole training, and for every step one that is killed there and resumed."""
    in_child(lambda: train(f"{folder}/whole", 0))
    for step in steps:
        assert in_child(lambda step=step: train(f"{folder}/{step}", step)) == -signal.SIGKILL  # type: ignore[misc]
        in_child(lambda step=step: train(f"{folder}/{step}", 0))  # type: ignore[misc]


def refused(text: str, call: Callable[[], object]) -> None:
    said = ""
    try:
        call()
    except (ValueError, everystep.EverystepError) as error:
        said = str(error)
    assert text in said, said


def damage(checkpoint: Any) -> None:
    """Changes one bit in the largest shard."""
    shard = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def told(text: str, call: Callable[[], object]) -> None:
    """Calls, and expects a warning."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert any(text in str(item.message) for item in found), found
