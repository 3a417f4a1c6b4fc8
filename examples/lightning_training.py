"""Lightning with a durable checkpoint after every step. Needs lightning: pip install 'everystep[lightning]'

    python examples/lightning_training.py runs/lightning     # or, with two ranks:
    torchrun --nproc-per-node 2 examples/lightning_training.py runs/lightning

Stop it at any moment (Ctrl-C, kill -9) and start it again: it ends with the same bits as if never stopped.
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
from torch import nn

from everystep.integrations.data import Loader
from everystep.integrations.lightning import EverystepCallback


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Loader:
        data = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return Loader(data, batch_size=16, shuffle=True, seed=2, rank=rank, world=world)


def main(run: str, epochs: int) -> None:
    lightning.seed_everything(3)
    model = Regression()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        callbacks=[EverystepCallback(run)],  # the one line
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model)
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}: weights sum to {sum(p.sum().item() for p in model.parameters())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="runs/lightning")
    parser.add_argument("--epochs", type=int, default=2)
    main(**vars(parser.parse_args()))
