"""Trainings with the Trainer of transformers, in its own environment. Called by `test_trainer.py`.

exact FOLDER STEP...    whole, and killed when each step is durable and then resumed; one JSON line each
train OUTPUT [STEP]     once, under torchrun; with STEP, the last rank is killed before the next step
restored OUTPUT         what a restored state is, on any number of ranks
own FOLDER              Trainer's own checkpoints and tools
sharded FOLDER          the same for a sharded model, under torchrun

LAYOUT in the environment shards the model: ``fsdp2`` by Trainer's arguments, ``loaded`` while it is loaded.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from training_tools import (
    LAYOUT,
    count_collectives,
    damage,
    die,
    digest,
    exact,
    full,
    in_child,
    refused,
    told,
    whole_digest,
)
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import everystep
from everystep.engine import faults
from everystep.integrations.transformers import EverystepTrainer
from everystep.store import list_steps

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
                die()


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    starts = torch.randint(0, 40, (count,), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids, "labels": ids} for ids in starts[:, None] + torch.arange(8)]


def model_of(width: int) -> Any:
    if LAYOUT != "loaded":
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(vocab_size=64, n_positions=16, n_embd=width, n_layer=2, n_head=2, **tokens)
        return GPT2LMHeadModel(config)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, attention_dropout=0.1, **sizes)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        how = {} if world == 1 else {"distributed_config": DistributedConfig(fsdp_size=world)}
        return LlamaForCausalLM.from_pretrained(folder, **how)


def trainer_of(output: str, kill: int = 0, *, width: int = 16, **options: Any) -> Any:
    """With all that an inexact resume would change: dropout, shuffling, warm-up, accumulation, evaluation."""
    every: dict[str, Any] | None = options.pop("everystep", {"every": 1, "keep": everystep.Keep(last=100)})
    world = int(os.environ.get("WORLD_SIZE", "1"))
    set_seed(3)
    model = model_of(width)
    config = options.pop("fsdp_config", {})
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
        **({"save_strategy": "no"} if LAYOUT == "loaded" else {}),
        **options,
    }
    if LAYOUT == "fsdp2" and world > 1:
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], **config}
    made = TrainingArguments(output_dir=output, use_cpu=True, report_to=[], **arguments)
    if LAYOUT == "fsdp2" and world > 1:
        # Under Trainer, accelerate decides about FSDP: see `sharding` in accelerate_training.py.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    killer = Kill(kill)
    trainer = EverystepTrainer(
        model=model,
        args=made,
        train_dataset=texts(20 * world),
        eval_dataset=texts(4 * world),
        callbacks=[killer],
        everystep=every,
    )
    killer.trainer = trainer
    return trainer


def train(output: str, kill: int = 0) -> dict[str, Any]:
    trainer = trainer_of(output, kill)
    torch.manual_seed(10 + trainer.args.process_index)
    counted = count_collectives() if LAYOUT else {}
    trainer.train(resume_from_checkpoint="auto")
    assert not counted or (counted["saves"] and not counted["collectives"]), counted
    kept = ("step", "loss", "eval_loss", "learning_rate")
    logs = [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]
    return {
        "rank": trainer.args.process_index,
        "sharded": type(next(trainer.model.parameters())).__name__,
        "step": trainer.state.global_step,
        "weights": digest(trainer.model.parameters()),
        "random": digest([torch.rand(3)]),
        "logs": [entry for entry in logs if "loss" in entry or "eval_loss" in entry],
    }


def restored(output: str) -> dict[str, Any]:
    """On another number of ranks an epoch has another number of steps, so this one has none left."""
    trainer = trainer_of(output, max_steps=15)
    trainer.train(resume_from_checkpoint=True)
    if LAYOUT == "loaded" and trainer.args.world_size > 1:  # Trainer itself cannot resume such a model
        own = TrainingArguments(output_dir=f"{output}-own", use_cpu=True, report_to=[], save_strategy="steps")
        refused("Resuming is not supported", lambda: Trainer(model=trainer.model, args=own))
    return {
        "rank": trainer.args.process_index,
        "step": trainer.state.global_step,
        "whole": whole_digest(trainer.model, trainer.optimizer.optimizer),
    }


def own(folder: str) -> None:
    # Without a run: only Trainer's own checkpoints, and its own way to ask for them.
    output = f"{folder}/own"
    plain = {"everystep": None, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    plain["lr_scheduler_type"] = "constant"  # any other depends on the number of steps to come
    whole = trainer_of(f"{folder}/whole", **plain)
    whole.train()
    begun = trainer_of(output, **plain, max_steps=6)
    begun.train()
    assert sorted(os.listdir(output)) == ["checkpoint-4", "checkpoint-6"], os.listdir(output)
    found = {path.name for path in Path(output, "checkpoint-6").iterdir()}
    assert found >= {"config.json", "model.safetensors", "trainer_state.json", "everystep"}, found
    assert not found & {"optimizer.pt", "scheduler.pt", "rng_state.pth"}, found
    opened = GPT2LMHeadModel.from_pretrained(f"{output}/checkpoint-6")
    assert digest(opened.parameters()) == digest(begun.model.parameters())
    assert everystep.verify(f"{output}/checkpoint-6/everystep").problems == ()

    # Killed inside of a save: when weights are there and our checkpoint is not, and before its commit.
    assert in_child(lambda: killed_saving(output, plain, weights=True)) == -9
    assert sorted(os.listdir(output)) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"], os.listdir(output)
    assert Path(output, "checkpoint-8", "config.json").exists()
    assert in_child(lambda: killed_saving(output, plain, weights=False)) == -9
    assert sorted(os.listdir(f"{output}/checkpoint-8/everystep.partial")), os.listdir(
        f"{output}/checkpoint-8"
    )
    resumed = trainer_of(output, **plain)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step == 15
    assert digest(resumed.model.parameters()) == digest(whole.model.parameters())
    again = trainer_of(output, **plain)
    again.train(resume_from_checkpoint=f"{output}/checkpoint-14")
    assert digest(again.model.parameters()) == digest(whole.model.parameters())

    # A damaged one is passed over.
    damage(Path(output, "checkpoint-15", "everystep"))
    older = trainer_of(output, **plain)
    told(f"passing over {output}/checkpoint-15/everystep: ", lambda: older.train(resume_from_checkpoint=True))
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
    back_to_an_older_one(f"{folder}/back", plain, digest(whole.model.parameters()))
    from_trainers_own(f"{folder}/theirs", plain, digest(whole.model.parameters()))
    refused(
        "No valid checkpoint found in output directory",
        lambda: trainer_of(f"{folder}/new").train(resume_from_checkpoint=True),
    )
    wide = trainer_of(output, width=20, **plain)
    refused("transformer.wte.weight", lambda: wide.train(resume_from_checkpoint=True))
    print("own: ok")


def back_to_an_older_one(output: str, plain: dict[str, Any], wanted: str) -> None:
    """While the run between checkpoints has only later steps; and while one of its steps is damaged."""
    how = {**plain, "everystep": {"every": 5, "keep": everystep.Keep(last=2)}, "save_total_limit": None}
    trainer_of(output, **how).train()
    assert list_steps(f"{output}/everystep") == [10, 15]

    def again(step: int) -> list[int]:
        trainer = trainer_of(output, **how)
        trainer.train(f"{output}/checkpoint-{step}", None)  # Trainer's takes both by position
        assert digest(trainer.model.parameters()) == wanted, step
        return list_steps(f"{output}/everystep")

    assert again(4) == [10, 15]
    damage(Path(output, "everystep", "step-000000000010"))
    told("passing over step 10", lambda: again(12))
    assert list_steps(f"{output}/everystep") == [13, 15]  # a run that begins saves the first step it sees


def from_trainers_own(output: str, plain: dict[str, Any], wanted: str) -> None:
    """A training that began without Everystep goes on with it."""
    theirs = trainer_of(output, **plain, max_steps=6)
    theirs.__class__ = Trainer
    theirs.train()
    assert not Path(output, "checkpoint-6", "everystep").exists()
    begun: list[int] = []

    class Begin(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begun.append(state.global_step)

    for how, steps in (({}, 8), ({"everystep": {"every": 1}}, 15)):
        ours = trainer_of(output, **{**plain, **how, "max_steps": steps})
        ours.add_callback(Begin())
        ours.train(resume_from_checkpoint=True)
    assert begun == [6, 8], begun
    assert digest(ours.model.parameters()) == wanted


def killed_saving(output: str, plain: dict[str, Any], *, weights: bool) -> None:
    class Killed(EverystepTrainer):  # type: ignore[misc]
        def _save_rng_state(self, output_dir: str) -> None:
            if self.state.global_step == 8:
                if weights:
                    die()
                faults.install(*faults.parse("rename:1:kill"))
            super()._save_rng_state(output_dir)

    trainer = trainer_of(output, **plain)
    trainer.__class__ = Killed
    trainer.train(resume_from_checkpoint=True)


def sharded(folder: str) -> None:
    """Under FSDP2: what is in Trainer's own checkpoints, resuming from them, and the best model."""
    plain = {"everystep": None, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    plain["lr_scheduler_type"] = "constant"
    whole = trainer_of(f"{folder}/whole", **plain)
    whole.train()
    wanted = whole_digest(whole.model, whole.optimizer.optimizer)
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        output = f"{folder}/{kind}"
        how = {**plain, "fsdp_config": {"state_dict_type": kind}}
        begun = trainer_of(output, **how, max_steps=6)
        begun.train()
        found = {path.name for path in Path(output, "checkpoint-6").iterdir()}
        assert {"trainer_state.json", "everystep"} <= found, found
        assert not [name for name in found if "fsdp" in name or "optimizer" in name or "rng" in name], found
        if kind == "FULL_STATE_DICT":
            opened = GPT2LMHeadModel.from_pretrained(f"{output}/checkpoint-6")
            for value, theirs in zip(opened.parameters(), begun.model.parameters(), strict=True):
                assert torch.equal(value, full(theirs))
        resumed = trainer_of(output, **how)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 15
        assert whole_digest(resumed.model, resumed.optimizer.optimizer) == wanted, kind

    best = trainer_of(f"{folder}/best", **plain, load_best_model_at_end=True, learning_rate=0.5)
    best.train()
    opened = GPT2LMHeadModel.from_pretrained(best.state.best_model_checkpoint)
    for value, theirs in zip(opened.parameters(), best.model.parameters(), strict=True):
        assert torch.equal(value, full(theirs))
    assert best.state.best_global_step < 15, "the last step was the best: this shows nothing"
    wide = trainer_of(f"{folder}/whole", width=20, **plain)
    refused("transformer.wte.weight", lambda: wide.train(resume_from_checkpoint=True))
    print("sharded: ok", flush=True)


if __name__ == "__main__":
    command, place, *rest = sys.argv[1:]
    if command == "exact":
        exact(train, place, list(map(int, rest)))
    elif command in ("train", "restored"):
        call: Any = {"train": train, "restored": restored}[command]
        print("\n" + json.dumps(call(place, *map(int, rest))), flush=True)
    elif command == "sharded":
        sharded(place)
    else:
        own(place)
