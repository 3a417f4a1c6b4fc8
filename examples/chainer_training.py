"""Chainer with a durable checkpoint after every iteration. Needs chainer: see docs/integrations.md

    python examples/chainer_training.py runs/chainer

Stop it at any moment (Ctrl-C, kill -9) and start it again: it ends with the same bits as if never stopped.
"""

from __future__ import annotations

import argparse
import random

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

import everystep.integrations.chainer


class Regression(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.hidden = L.Linear(16, 64)
            self.norm = L.BatchNormalization(64)
            self.out = L.Linear(64, 1)

    def forward(self, batch: np.ndarray) -> chainer.Variable:
        found = self.out(F.dropout(F.relu(self.norm(self.hidden(batch))), 0.1))
        loss = F.mean_squared_error(found, batch.sum(1, keepdims=True))
        chainer.report({"loss": loss}, self)
        return loss


def main(run: str, epochs: int) -> None:
    random.seed(3)
    np.random.seed(3)
    data = np.random.RandomState(1).randn(256, 16).astype(np.float32)
    model = Regression()
    optimizer = chainer.optimizers.Adam(alpha=1e-2).setup(model)
    updater = training.updaters.StandardUpdater(chainer.iterators.SerialIterator(data, 16), optimizer)
    trainer = training.Trainer(updater, (epochs, "epoch"), out=run)
    trainer.extend(extensions.ExponentialShift("alpha", 0.9), trigger=(4, "iteration"))
    trainer.extend(everystep.integrations.chainer.snapshot(run))  # the one line
    trainer.run()
    print(f"iteration {updater.iteration}: weights sum to {sum(p.array.sum() for p in model.params())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="runs/chainer")
    parser.add_argument("--epochs", type=int, default=2)
    main(**vars(parser.parse_args()))
