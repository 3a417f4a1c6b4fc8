"""Trainings with DeepSpeed, in its own environment. Called by `test_deepspeed_engine.py`.

exact FOLDER first|again CASE...   trainings of some cases; one JSON line per rank and training
kills FOLDER                       one process, killed at calls of Everystep inside of save_checkpoint
own FOLDER                         what else users do
layouts FOLDER                     pipeline, tensor and expert parallelism, on two ranks
other FOLDER CASE...               checkpoints of another world

A case is ``STAGE-DTYPE-HOW``; HOW is ``use``, ``overlap`` or ``state``. ``first`` trains each case as a
whole, and again up to the middle; then all ranks are killed. ``again`` continues from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed_training
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import everystep
from everystep.engine import faults
from everystep.integrations.deepspeed import state_of, use

STEPS, MIDDLE = 8, 4
SCALES: dict[str, Any] = {"fp16": {"initial_scale_power": 8, "loss_scale_window": 2}}


class Net(nn.Module):
    """With all that an inexact resume would change: dropout, statistics of batches, a frozen weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.register_buffer("mean", torch.zeros(width))  # of this rank's batches, as in BatchNorm
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(width, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.first(value).relu(), 0.3, self.training)
        if self.training:
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return self.last(self.frozen(hidden)).float().square().mean()


def made(stage: int, dtype: str = "fp32", width: int | None = None, **config: Any) -> Any:
    torch.manual_seed(0)
    # ZeRO-3 does not initialise the padding of odd sizes, so that it differs between two trainings.
    net = Net(width or (16 if stage == 3 else 17))
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1000,
        **({} if dtype == "fp32" else {dtype: {"enabled": True, **SCALES.get(dtype, {})}}),
        **config,
    }
    engine, *_ = deepspeed.initialize(
        model=net, config=settings, model_parameters=[p for p in net.parameters() if p.requires_grad]
    )
    return engine


def step(engine: Any, number: int, *, seeded: bool) -> None:
    """One step of the optimizer. Its data, and with `seeded` its random numbers, follow from its number."""
    feed = torch.Generator().manual_seed(100 * number + dist.get_rank())
    if seeded:
        torch.manual_seed(100 * number + dist.get_rank())
    for _ in range(2):
        kind = next(engine.module.parameters()).dtype
        engine.backward(engine(torch.randn(4, 8, generator=feed).to(kind)))
        engine.step()


def digest(engine: Any, *, buffers: bool) -> str:
    """Of all that this rank has: weights, statistics, master weights, moments."""
    found = hashlib.sha256()
    for tensor in [*engine.module.parameters(), *(engine.module.buffers() if buffers else ())]:
        local = getattr(tensor, "ds_tensor", tensor)
        found.update(local.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for parameter, states in engine.basic_optimizer.state.items():
        for value in (parameter, *states.values()):
            if isinstance(value, torch.Tensor):
                found.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def report(engine: Any, case: str) -> None:
    # DeepSpeed's own checkpoints have the statistics of rank 0 only.
    buffers = case.endswith("state") or dist.get_rank() == 0
    said = {
        "rank": dist.get_rank(),
        "case": case,
        "steps": engine.global_steps,
        "skipped": engine.skipped_steps,
        "state": digest(engine, buffers=buffers),
        "rate": engine.get_lr(),
        "scale": float(getattr(engine.optimizer, "loss_scale", 1.0)),
    }
    print("\n" + json.dumps(said), flush=True)


def train(folder: str, case: str, *, until: int, ends: bool = True) -> None:
    stage, dtype, how = case.split("-")
    engine = made(int(stage), dtype)
    if how == "state":
        ckpt = everystep.Checkpointer(f"{folder}/run", state_of(engine))
        for number in range(ckpt.restore(), until):
            step(engine, number, seeded=False)
            ckpt.save(number + 1)
        if ends:
            ckpt.close()
        else:
            ckpt.wait()
    else:
        use(engine, overlap=how == "overlap")
        path, client = engine.load_checkpoint(folder)
        first = 0 if path is None else client["next"]
        for number in range(first, until):
            step(engine, number, seeded=True)
            engine.save_checkpoint(folder, client_state={"next": number + 1})
    if ends:
        report(engine, case)
        engine.destroy()


def exact(folder: str, part: str, cases: list[str]) -> None:
    for case in cases:
        if part == "first":
            train(f"{folder}/{case}/whole", case, until=STEPS)
            train(f"{folder}/{case}/killed", case, until=MIDDLE, ends=False)
        else:
            train(f"{folder}/{case}/killed", case, until=STEPS)
    dist.barrier()
    if part == "first":
        os.kill(os.getpid(), signal.SIGKILL)


# --- kills inside of save_checkpoint


def kills(folder: str) -> None:
    """Each line: how many calls had been made, the step that a new process finds, and its digest."""
    get_accelerator().create_op_builder("ShareMemCommBuilder").load()  # once, not in each child
    for overlap in (False, True):
        calls = in_child(saved_and_killed, f"{folder}/{overlap}0", 0, overlap)
        in_child(found_in, f"{folder}/{overlap}0", 0)
        for nth in (calls // 2, calls) if overlap else (calls // 3, 2 * calls // 3, calls - 2, calls):
            place = f"{folder}/{overlap}{nth}"
            in_child(saved_and_killed, place, nth, overlap)
            in_child(found_in, place, nth)


def saved_and_killed(folder: str, nth: int, overlap: bool) -> int:
    """Saves two steps, and is killed at a call of the third save. Returns the number of calls."""
    engine = use(made(1), overlap=overlap)
    for number in range(3):
        step(engine, number, seeded=True)
        if number == 2:
            engine.checkpoint_engine.finish()
            print("\n" + json.dumps({"rank": 0, "digest": digest(engine, buffers=True)}), flush=True)
            faults.install(faults.Fault("any", nth or 10**6, "kill"))
        engine.save_checkpoint(folder, client_state={"next": number + 1})
        if number == 1 and nth == 0:
            print("\n" + json.dumps({"rank": 0, "digest": digest(engine, buffers=True)}), flush=True)
    engine.checkpoint_engine.finish()
    return faults.count_calls()


def found_in(folder: str, nth: int) -> int:
    engine = use(made(1))
    _, client = engine.load_checkpoint(folder)
    said = {"rank": 0, "nth": nth, "next": client["next"], "digest": digest(engine, buffers=True)}
    print("\n" + json.dumps(said), flush=True)
    return 0


def in_child(call: Any, *args: Any) -> int:
    """In a process of its own, without the seconds that importing takes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            os.write(writing, str(call(*args)).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading) as file:
        return int(file.read() or 0)


# --- what else users do


def own(folder: str) -> None:
    engine = made(2)
    for number in range(2):
        step(engine, number, seeded=True)
    engine.save_checkpoint(f"{folder}/plain", client_state={"args": argparse.Namespace(width=17)})
    use(engine)
    at = f"{folder}/ours"
    engine.save_checkpoint(at, client_state={"args": argparse.Namespace(width=17)})
    wanted = digest(engine, buffers=True)
    same_leaves(f"{folder}/plain", at)

    # DeepSpeed's own files are still read, and ours by a new engine.
    for place in (f"{folder}/plain", at):
        other = use(made(2))
        path, client = other.load_checkpoint(place)
        assert path is not None
        assert client["args"] == argparse.Namespace(width=17), client
        assert digest(other, buffers=True) == wanted

    # A tag is replaced as a whole; a file of others in it stays.
    Path(at, "global_step2", "notes.txt").write_text("mine")
    engine.save_checkpoint(at, client_state={"again": True})
    assert Path(at, "global_step2", "notes.txt").read_text() == "mine"
    assert made_by(use(made(2)), at)["again"] is True

    # What cannot be stored is refused, and what was there before stays.
    refused("UnsupportedState: .*'strange'", lambda: save_strange(engine, at))
    assert Path(at, "latest").read_text() == "global_step2"
    step(engine, 2, seeded=True)
    engine.save_checkpoint(at)
    assert Path(at, "latest").read_text() == "global_step3"

    # Damage: an error that names the file and the tensor, or the tag before.
    (shard,) = Path(at, "global_step3", "zero_pp_rank_0_mp_rank_00_optim_states.pt").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    refused("optim_states.pt/", lambda: use(made(2)).load_checkpoint(at, tag="global_step3"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert made_by(use(made(2)), at)["again"] is True
    said = " ".join(str(one.message) for one in seen)
    assert re.search("passing over .*global_step3: .*optim_states.pt/", said), said

    # Weights for others are a file, as ever.
    engine.save_16bit_model(f"{folder}/weights")
    assert "first.weight" in torch.load(f"{folder}/weights/pytorch_model.bin", weights_only=True)
    assert not list(Path(folder).glob("**/.*.partial"))

    # Another model is named by what differs, also where DeepSpeed's own load would not notice.
    for stage in (0, 1, 3):
        there = f"{folder}/stage{stage}"
        wider = made(stage, width=40)
        before = digest(wider, buffers=True)
        use(made(stage)).save_checkpoint(there)
        refused("StateMismatch: .*first.weight", lambda at=there, to=wider: use(to).load_checkpoint(at))
        assert stage == 0 or digest(wider, buffers=True) == before, "a part of it was loaded"
        everystep.save(f"{there}/run", state_of(made(stage)))
        refused(
            "StateMismatch: .*first.weight",
            lambda at=there, stage=stage: everystep.load(f"{at}/run", into=state_of(made(stage, width=40))),
        )

    # Weights of a training without ZeRO go into one with ZeRO, as with DeepSpeed's own files.
    bare = made(0)
    step(bare, 0, seeded=True)
    use(bare).save_checkpoint(f"{folder}/bare", tag="runs/first")
    assert Path(folder, "bare", "latest").read_text() == "runs/first"
    zero = use(made(1))
    refused("CheckpointNotFound: .*optim_states", lambda: zero.load_checkpoint(f"{folder}/bare"))
    path, _ = zero.load_checkpoint(f"{folder}/bare", load_optimizer_states=False)
    assert path is not None
    for mine, its in zip(zero.module.parameters(), bare.module.parameters(), strict=True):
        assert torch.equal(mine, its)

    # Weights for others that cannot be written are an error at once.
    refused("NotADirectoryError|FileExistsError", lambda: engine.save_16bit_model(f"{at}/latest"))

    refused("EverystepEngine already", lambda: use(engine))
    run = f"{folder}/run"
    everystep.save(run, state_of(engine, note={"epoch": 1}))
    other, note = made(2), {"epoch": 0}
    everystep.load(run, into=state_of(other, note=note))
    assert digest(other, buffers=True) == digest(engine, buffers=True)
    assert (note, other.global_steps, other.get_lr()) == ({"epoch": 1}, 3, engine.get_lr())
    refused(
        "counters.*stage 2 on 1 .*stage 1 on 1", lambda: everystep.load(run, into=state_of(made(1), note={}))
    )
    refused("model", lambda: everystep.load(run, into=state_of(made(2, width=18), note={})))
    refused("names itself: rng", lambda: state_of(engine, rng=1))
    print("own: ok")


class Strange:
    pass


def save_strange(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder, tag="global_step3", client_state={"strange": Strange()})


def made_by(engine: Any, folder: str) -> Any:
    return engine.load_checkpoint(folder)[1]


def same_leaves(one: str, other: str) -> None:
    with everystep.open(one) as first, everystep.open(other) as second:
        assert list(first.leaves) == list(second.leaves)
        assert first.values == second.values, (first.values, second.values)
        left, right = first.read(), second.read()
        assert all(torch.equal(left[name], right[name]) for name in left)


def refused(pattern: str, call: Any) -> None:
    said = ""
    try:
        call()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    assert re.search(pattern, said, re.DOTALL), said


# --- other ways to be parallel


def layouts(folder: str) -> None:
    """Saved by DeepSpeed and by us, read alike; and loaded by DeepSpeed."""
    cases: dict[str, dict[str, Any]] = {
        "moe": {"model": "moe", "experts": 4, "ep": 2, "stage": 2},
        "pipe": {"model": "pipe", "pp": 2},
        "cut": {"model": "cut", "tp": 2},  # the last one: DeepSpeed does not forget its ranks
    }
    for name, case in cases.items():
        engine = layout({**deepspeed_training.DEFAULTS, **case})
        layout_step(engine, case)
        engine.save_checkpoint(f"{folder}/{name}/plain")
        use(engine, overlap=True)
        engine.save_checkpoint(f"{folder}/{name}/ours")
        wanted = digest(engine, buffers=True)
        layout_step(engine, case)  # commits
        other = use(layout({**deepspeed_training.DEFAULTS, **case}))
        path, _ = other.load_checkpoint(f"{folder}/{name}/ours")
        assert path is not None, name
        assert digest(other, buffers=True) == wanted, name
        if dist.get_rank() == 0:
            same_leaves(f"{folder}/{name}/plain", f"{folder}/{name}/ours")
        dist.barrier()
    print("layouts: ok")


def layout(case: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    groups: Any = None
    mpu = None
    if case["model"] == "pipe":
        model = deepspeed_training.pipeline(case)
        groups = list(model.parameters())
    elif case["model"] == "cut":
        mpu = deepspeed_training.Grid(case["tp"])
        model = deepspeed_training.Cut(case["tp"], mpu.get_model_parallel_rank())
        model.universal_checkpoint_info = deepspeed_training.INFO
        groups = [p for p in model.parameters() if p.requires_grad]
    else:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        model = deepspeed_training.Sparse(case["experts"], case["ep"])
        named = {"params": list(model.parameters()), "name": "parameters"}
        groups = split_params_into_different_moe_groups_for_optimizer(named)
    config = deepspeed_training.settings(case)
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=groups, mpu=mpu, dist_init_required=False
    )
    return engine


def layout_step(engine: Any, case: dict[str, Any]) -> None:
    feed = torch.Generator().manual_seed(7)
    if case["model"] == "pipe":
        tokens = torch.randint(0, 7, (2, 3), generator=feed)
        engine.train_batch(data_iter=iter([(tokens, tokens)] * engine.gradient_accumulation_steps()))
        return
    shape = (2, 3) if case["model"] == "cut" else (2, 3, 4)
    engine.backward(engine(torch.rand(shape, generator=feed)))
    engine.step()


def other_world(folder: str, cases: list[str]) -> None:
    for case in cases:
        refused(
            "StateMismatch: .* on 2 data-parallel ranks",
            lambda case=case: train(f"{folder}/{case}/killed", case, until=STEPS),
        )
    print("other: ok")


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_RANK", "0")
    command, place, *rest = sys.argv[1:]
    if command == "kills":
        kills(place)
        sys.exit()
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    if command == "exact":
        exact(place, rest[0], rest[1:])
    elif command == "own":
        own(place)
    elif command == "layouts":
        layouts(place)
    else:
        other_world(place, rest)
    sys.stdout.flush()
    os._exit(0)  # threads of DeepSpeed's own may hang at exit
