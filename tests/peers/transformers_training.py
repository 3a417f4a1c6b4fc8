"""Trainings with the Trainer of transformers, in its own environment. Called by `test_trainer.py`.

exact FOLDER STEP...    whole, and killed when each step is durable and then resumed; one JSON line each
train OUTPUT [STEP]     once, under torchrun; with STEP, the last rank is killed before the next step
own FOLDER              Trainer's own checkpoints and tools
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging

import holdfast
from holdfast.transformers import HoldfastTrainer

warnings.filterwarnings("ignore")
logging.set_verbosity_error()
logging.disable_progress_bar()


class Kill(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.trainer: Any = None
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._step and state.global_step == self._step:
            self.trainer._run.wait()
            if args.process_index == args.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    starts = torch.randint(0, 40, (count,), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids, "labels": ids} for ids in starts[:, None] + torch.arange(8)]


def trainer_of(output: str, kill: int = 0, *, width: int = 16, **options: Any) -> Any:
    """With all that an inexact resume would change: dropout, shuffling, warm-up, accumulation, evaluation."""
    every: dict[str, Any] | None = options.pop("holdfast", {"every": 1, "keep": holdfast.Keep(last=100)})
    set_seed(3)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=width, n_layer=1, n_head=2, **tokens)
    arguments = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_steps": 4,
        "save_total_limit": 2,
        **options,
    }
    world = int(os.environ.get("WORLD_SIZE", "1"))
    killer = Kill(kill)
    trainer = HoldfastTrainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(output_dir=output, use_cpu=True, report_to=[], **arguments),
        train_dataset=texts(20 * world),
        eval_dataset=texts(4 * world),
        callbacks=[killer],
        holdfast=every,
    )
    killer.trainer = trainer
    return trainer


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def train(output: str, kill: int = 0) -> dict[str, Any]:
    trainer = trainer_of(output, kill)
    torch.manual_seed(10 + trainer.args.process_index)
    trainer.train(resume_from_checkpoint="auto")
    kept = ("step", "loss", "eval_loss", "learning_rate")
    logs = [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]
    return {
        "rank": trainer.args.process_index,
        "step": trainer.state.global_step,
        "weights": digest(trainer.model.parameters()),
        "random": digest([torch.rand(3)]),
        "logs": [entry for entry in logs if "loss" in entry or "eval_loss" in entry],
    }


def in_child(output: str, kill: int = 0) -> None:
    """A process of its own, without the seconds that importing takes."""
    pid = os.fork()
    if pid == 0:
        try:
            print("\n" + json.dumps(train(output, kill)), flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(pid, 0)


def exact(folder: str, steps: list[int]) -> None:
    in_child(f"{folder}/whole")
    for step in steps:
        in_child(f"{folder}/{step}", step)
        in_child(f"{folder}/{step}")


def own(folder: str) -> None:
    # Without a run: only Trainer's own checkpoints, and its own way to ask for them.
    output = f"{folder}/own"
    plain = {"holdfast": None, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    plain["lr_scheduler_type"] = "constant"  # any other depends on the number of steps to come
    whole = trainer_of(f"{folder}/whole", **plain)
    whole.train()
    begun = trainer_of(output, **plain, max_steps=6)
    begun.train()
    assert sorted(os.listdir(output)) == ["checkpoint-4", "checkpoint-6"], os.listdir(output)
    found = {path.name for path in Path(output, "checkpoint-6").iterdir()}
    assert found >= {"config.json", "model.safetensors", "trainer_state.json", "holdfast"}, found
    assert not found & {"optimizer.pt", "scheduler.pt", "rng_state.pth"}, found
    opened = GPT2LMHeadModel.from_pretrained(f"{output}/checkpoint-6")
    assert digest(opened.parameters()) == digest(begun.model.parameters())
    assert holdfast.verify(f"{output}/checkpoint-6/holdfast").problems == ()

    # Killed inside of a save: weights are there, our checkpoint is not.
    shutil.copytree(f"{output}/checkpoint-6", f"{output}/checkpoint-8")
    shutil.rmtree(f"{output}/checkpoint-8/holdfast")
    resumed = trainer_of(output, **plain)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step == 15
    assert digest(resumed.model.parameters()) == digest(whole.model.parameters())
    again = trainer_of(output, **plain)
    again.train(resume_from_checkpoint=f"{output}/checkpoint-14")
    assert digest(again.model.parameters()) == digest(whole.model.parameters())

    # A damaged one is passed over.
    (shard,) = Path(output, "checkpoint-15", "holdfast").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    older = trainer_of(output, **plain)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        older.train(resume_from_checkpoint=True)
    assert any("passing over step 15" in str(item.message) for item in told), told
    assert digest(older.model.parameters()) == digest(whole.model.parameters())

    # The best model comes back at the end, and stays within the limit.
    best = trainer_of(f"{folder}/best", **plain, load_best_model_at_end=True, learning_rate=0.5)
    best.train()
    wanted = GPT2LMHeadModel.from_pretrained(best.state.best_model_checkpoint)
    assert digest(best.model.parameters()) == digest(wanted.parameters())
    assert best.state.best_global_step < 15, "the last step was the best: this shows nothing"

    # From a checkpoint of Trainer's, and without one, with a run between checkpoints.
    both = trainer_of(output)
    both.train(resume_from_checkpoint=f"{output}/checkpoint-14")
    assert both.state.global_step == 15
    refused("no complete checkpoint", lambda: trainer_of(f"{folder}/new").train(resume_from_checkpoint=True))
    wide = trainer_of(output, width=20, **plain)
    refused("transformer.wte.weight", lambda: wide.train(resume_from_checkpoint=True))
    print("own: ok")


def refused(text: str, call: Any) -> None:
    said = ""
    try:
        call()
    except (ValueError, holdfast.HoldfastError) as error:
        said = str(error)
    assert text in said, said


if __name__ == "__main__":
    command, place, *rest = sys.argv[1:]
    if command == "exact":
        exact(place, list(map(int, rest)))
    elif command == "train":
        print("\n" + json.dumps(train(place, *map(int, rest))), flush=True)
    else:
        own(place)
