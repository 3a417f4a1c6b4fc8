"""Trainings with Chainer, in its own environment. Called by `test_chainer.py`.

exact FOLDER STEP...    whole, and killed when each iteration is saved and then resumed; one JSON line each
objects FOLDER          the serializer by itself: links, optimizers, trainers, and what does not fit
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

import everystep
import everystep.integrations.chainer

assert "torch" not in sys.modules
warnings.filterwarnings("ignore")


class Net(chainer.Chain):
    """Everything that an inexact resume would change: dropout, statistics, parameters of unknown size."""

    def __init__(self, width: int = 24, *, deep: bool = True) -> None:
        super().__init__()
        with self.init_scope():
            self.hidden = L.Linear(None, width)
            self.norm = L.BatchNormalization(width)
            if deep:
                self.out = L.Linear(width, 1)

    def forward(self, batch: np.ndarray) -> chainer.Variable:
        hidden = F.dropout(F.relu(self.norm(self.hidden(batch))), 0.3)
        loss = F.mean((self.out(hidden) if hasattr(self, "out") else hidden) ** 2)
        chainer.report({"loss": loss}, self)
        return loss


class Kill(training.Extension):
    """After the snapshot of an iteration: when it is durable, or while it is being written."""

    priority = -200

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration

    def __call__(self, trainer: Any) -> None:
        if trainer.updater.iteration == self._iteration:
            if self._iteration % 2:
                trainer.get_extension("Snapshot").checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(net: Any, folder: str, optimizer: Any = None, **iteration: Any) -> Any:
    data = np.random.RandomState(1).randn(20, 8).astype(np.float32)
    optimizer = (optimizer or chainer.optimizers.Adam(alpha=1e-2)).setup(net)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
    sampler = chainer.iterators.ShuffleOrderSampler(np.random.RandomState(4))
    iterator = chainer.iterators.SerialIterator(data, 4, order_sampler=sampler)
    updater = training.updaters.StandardUpdater(iterator, optimizer)
    return training.Trainer(updater, (3, "epoch"), out=folder)


def train(run: str, kill: int = 0, optimizer: Any = None) -> dict[str, Any]:
    np.random.seed(7)
    net = Net()
    trainer = trainer_of(net, f"{run}/out", optimizer)
    rate = "alpha" if optimizer is None else "lr"
    trainer.extend(extensions.ExponentialShift(rate, 0.8), trigger=(2, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(3, "iteration")))
    trainer.extend(everystep.integrations.chainer.snapshot(f"{run}/run", keep=everystep.Keep(last=100)))
    if kill:
        trainer.extend(Kill(kill))
    trainer.run()
    digest = hashlib.sha256()
    for _, parameter in sorted(net.namedparams()):
        for array in (parameter.array, *(parameter.update_rule.state or {}).values()):
            digest.update(array.tobytes())
    digest.update(net.norm.avg_mean.tobytes() + net.norm.avg_var.tobytes())
    log = trainer.get_extension("LogReport").log
    return {
        "iteration": trainer.updater.iteration,
        "epoch": trainer.updater.epoch,
        "digest": digest.hexdigest(),
        "rate": getattr(trainer.updater.get_optimizer("main"), rate),
        "losses": [float(entry["main/loss"]) for entry in log],
        "random": float(np.random.rand()),
        "order": trainer.updater.get_iterator("main")._state.order.tolist(),
    }


def in_child(run: str, kill: int = 0) -> None:
    """A process of its own, without the seconds that importing takes."""
    pid = os.fork()
    if pid == 0:
        try:
            print("\n" + json.dumps(train(run, kill)), flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(pid, 0)


def exact(folder: str, steps: list[int]) -> None:
    in_child(f"{folder}/whole")
    for step in steps:
        in_child(f"{folder}/{step}", step)
        in_child(f"{folder}/{step}")


def raises(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    found = ""
    try:
        call()
    except kind as error:
        found = str(error)
    assert text in found, found


def objects(folder: str) -> None:
    np.random.seed(1)
    net = Net()
    trainer = trainer_of(net, folder)
    trainer.run(show_loop_exception_msg=False)
    snapshot = everystep.integrations.chainer.save(f"{folder}/trainer", trainer)
    assert snapshot.leaves > 10

    # The same through Chainer's own serializer is what a trainer of fresh objects must become.
    chainer.serializers.save_npz(f"{folder}/theirs.npz", trainer)
    ours, theirs = Net(), Net()
    for other, load in (
        (ours, lambda it: everystep.integrations.chainer.load(f"{folder}/trainer", it)),
        (theirs, lambda it: chainer.serializers.load_npz(f"{folder}/theirs.npz", it)),
    ):
        again = trainer_of(other, folder)
        load(again)
        assert again.updater.iteration == 15
        assert again.updater.get_iterator("main").epoch == 3
    for (name, mine), (_, its) in zip(ours.namedparams(), theirs.namedparams(), strict=True):
        assert mine.array.tobytes() == its.array.tobytes(), name
        for key, value in mine.update_rule.state.items():
            assert value.tobytes() == its.update_rule.state[key].tobytes(), (name, key)
    assert ours.norm.avg_mean.tobytes() == net.norm.avg_mean.tobytes()

    # A model by itself, and out of a trainer's checkpoint.
    everystep.integrations.chainer.save(f"{folder}/net", net)
    with everystep.open(f"{folder}/net") as opened:
        assert opened["hidden.W"].shape == (24, 8)
    single = Net()
    everystep.integrations.chainer.load(f"{folder}/net", single)
    assert single.out.W.array.tobytes() == net.out.W.array.tobytes()
    inside = Net()
    everystep.integrations.chainer.load(f"{folder}/trainer", inside, at="updater.model:main")
    assert inside.out.W.array.tobytes() == net.out.W.array.tobytes()

    def load(other: Any, path: str = "net") -> Callable[[], None]:
        return lambda: everystep.integrations.chainer.load(f"{folder}/{path}", other)

    elsewhere = f"{folder}/trainer"
    raises(
        everystep.StateMismatch,
        "'updater.net'",
        lambda: everystep.integrations.chainer.load(elsewhere, net, at="updater.net"),
    )
    wide, shallow = Net(25), Net(deep=False)
    raises(everystep.StateMismatch, "24], target float32[", load(wide))
    raises(everystep.StateMismatch, "out.W, out.b: in the checkpoint only", load(shallow))
    everystep.integrations.chainer.save(f"{folder}/shallow", shallow)
    raises(everystep.StateMismatch, ": not in the checkpoint", load(Net(), "shallow"))
    train(f"{folder}/wide")
    other = trainer_of(Net(25), folder)
    other.extend(everystep.integrations.chainer.snapshot(f"{folder}/wide/run"))
    raises(everystep.StateMismatch, "updater.", other.run)

    # A trainer that does not want what is there, and one that starts over.
    raises(
        everystep.errors.RunInUse,
        "restore",
        lambda: _run_with(
            folder, everystep.integrations.chainer.snapshot(f"{folder}/wide/run", autoload=False)
        ),
    )
    _run_with(
        folder, everystep.integrations.chainer.snapshot(f"{folder}/wide/run", autoload=False, start_over=True)
    )
    one = train(f"{folder}/sgd", optimizer=chainer.optimizers.MomentumSGD(lr=0.1))
    assert one["iteration"] == 15
    print("objects: ok")


def _run_with(folder: str, extension: Any) -> None:
    trainer = trainer_of(Net(), folder)
    trainer.extend(extension, trigger=(3, "iteration"))
    trainer.run(show_loop_exception_msg=False)


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    exact(folder, [int(step) for step in rest]) if what == "exact" else objects(folder)
