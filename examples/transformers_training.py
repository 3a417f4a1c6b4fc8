"""Trainer of transformers with a durable checkpoint per step. Needs: pip install 'everystep[transformers]'

    python examples/transformers_training.py runs/trainer     # or, with two ranks:
    torchrun --nproc-per-node 2 examples/transformers_training.py runs/trainer

Stop it at any moment (Ctrl-C, kill -9) and start it again: it ends with the same bits as if never stopped.
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from everystep.integrations.transformers import EverystepTrainer


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 40, (count,), generator=generator)
    return [{"input_ids": ids, "labels": ids} for ids in starts[:, None] + torch.arange(12)]


def main(output: str, epochs: int) -> None:
    set_seed(3)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir=output,
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        save_steps=10,  # checkpoint-10, ...: with what from_pretrained reads
        save_total_limit=2,
        use_cpu=True,
        report_to=[],
    )
    trainer = EverystepTrainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=texts(256),
        everystep={"every": 1},  # and every step, while the next one runs
    )
    trainer.train(resume_from_checkpoint="auto")
    if trainer.is_world_process_zero():
        total = sum(p.sum().item() for p in trainer.model.parameters())
        print(f"step {trainer.state.global_step}: weights sum to {total}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("output", nargs="?", default="runs/trainer")
    parser.add_argument("--epochs", type=int, default=2)
    main(**vars(parser.parse_args()))
