"""transformers' `Trainer` in the suite ``cost``: its own checkpoints, and those of `EverystepTrainer`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers

from everystep_study.frameworks.api import Framework, LoopMechanism, LoopOverlap, LoopSync
from everystep_study.frameworks.models import Gpt, Size
from everystep_study.frameworks.torch_training import TorchTraining
from everystep_study.harness.files import sync_tree


class Own(LoopMechanism):
    key, title = "trainer", "Trainer's own"


class Clock(transformers.TrainerCallback):
    """When each step began; and, if asked to, syncs what was saved."""

    def __init__(self, durable: bool) -> None:
        self.begun: list[float] = []
        self._durable = durable

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.begun.append(time.perf_counter())

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._durable:
            sync_tree(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def loop(size: Size, mechanism: str, durable: bool, every: int, steps: int, directory: Path) -> float:
    from everystep.integrations.transformers import EverystepTrainer

    assert isinstance(size, Gpt)
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=size.vocabulary, n_embd=size.width, n_layer=size.layers, n_head=size.width // 64
    )
    ids = torch.randint(size.vocabulary, (size.sequence,))
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=steps + 2,
        per_device_train_batch_size=size.batch,
        save_strategy="steps" if mechanism == "trainer" else "no",
        save_steps=every,
        save_total_limit=2,
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        report_to=[],
    )
    clock = Clock(durable and mechanism == "trainer")
    common: dict[str, Any] = {
        "model": transformers.GPT2LMHeadModel(config),
        "args": arguments,
        "train_dataset": [{"input_ids": ids, "labels": ids}] * size.batch * (steps + 2),
        "callbacks": [clock],
    }
    if mechanism.startswith("everystep"):
        mode = mechanism.removeprefix("everystep-")
        trainer = EverystepTrainer(**common, everystep={"every": every, "mode": mode})
    else:
        trainer = transformers.Trainer(**common)
    trainer.train()
    return clock.begun[1 + steps] - clock.begun[1]


FRAMEWORK = Framework(
    packages={"transformers": "transformers", "torch": "torch"},
    training=TorchTraining,
    mechanisms=(Own, LoopSync, LoopOverlap),
    models=("gpt2",),
    loop=loop,
)
