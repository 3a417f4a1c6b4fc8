"""The trainer extension: a save per iteration that overlaps with the next one, and an exact resume."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from chainer.backends import _cpu
from chainer.training import Extension

from everystep import store
from everystep.checkpointer import Checkpointer, check_options
from everystep.integrations.chainer.serializer import Serialized, leaf_name
from everystep.paths import local_path
from everystep.state.mismatch import offering
from everystep.state.rng import Rng

_ELAPSED = "_snapshot_elapsed_time"


def snapshot(run: str | os.PathLike[str], *, autoload: bool = True, **options: Any) -> Snapshot:
    """A trainer extension that saves after every iteration, or as its trigger says.

    The observations of the iteration are the checkpoint's metrics:
    ``keep=Keep(best=("main/loss", "min", 3))``.

    Args:
        run: The directory of the run.
        autoload: Whether the training goes on from the newest intact checkpoint of the run, if it has one.
        options: Those of `everystep.Checkpointer` (`keep`, `mode`, `preemption`, ...).
    """
    return Snapshot(run, autoload=autoload, **options)


class Snapshot(Extension):
    """What `snapshot` returns. It comes last of all extensions, so that it sees what the others did."""

    trigger = 1, "iteration"
    priority = -100

    def __init__(self, run: str | os.PathLike[str], *, autoload: bool, **options: Any) -> None:
        self._run = local_path(run)
        self._autoload = autoload
        self._options = check_options(options, "snapshot")
        self.checkpointer: Checkpointer | None = None
        """The `Checkpointer` at work, while the trainer runs."""

    def initialize(self, trainer: Any) -> None:
        updater = trainer.updater
        optimizers = updater.get_all_optimizers()
        state = {
            "trainer": _Trainer(trainer),
            "hyperparameters": {name: _Hyperparameters(found) for name, found in optimizers.items()},
            "rng": Rng(_order_generators(updater)),
        }
        hooked = [Announced(optimizer) for optimizer in optimizers.values()]
        self.checkpointer = Checkpointer(self._run, state, **{"optimizers": hooked, **self._options})
        try:
            with offering():
                step = self.checkpointer.restore() if self._autoload else 0
        except BaseException:
            self.finalize()  # the trainer does that only once it has begun
            raise
        if step:
            with store.open(os.path.join(self.checkpointer.path, store.step_name(step))) as checkpoint:
                trainer._snapshot_elapsed_time = checkpoint.metrics.get("elapsed_time", 0.0)

    def __call__(self, trainer: Any) -> None:
        if self.checkpointer is not None:
            metrics = {name: float(value) for name, value in _numbers(trainer.observation)}
            self.checkpointer.save(
                trainer.updater.iteration, metrics={**metrics, "elapsed_time": trainer.elapsed_time}
            )

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            checkpointer.close(exc)

    def finalize(self) -> None:
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            checkpointer.close()


class _Trainer(Serialized):
    """A trainer without the time that it took: that is not a part of the state, but a metric."""

    def state_dict(self) -> dict[str, Any]:
        tree = super().state_dict()
        tree.pop(_ELAPSED, None)
        return tree

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        super().load_state_dict({**tree, _ELAPSED: 0.0})


def _numbers(observation: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in observation.items():
        array = getattr(value, "array", value)  # that of a Variable
        if getattr(array, "size", 1) == 1 and not isinstance(array, (str, bytes)):
            yield name, _cpu._to_cpu(array)


def _order_generators(updater: Any) -> dict[str, np.random.RandomState]:
    """The generators that iterators have for themselves."""
    found: dict[str, np.random.RandomState] = {}
    for name, iterator in getattr(updater, "_iterators", {}).items():
        generator = getattr(getattr(iterator, "order_sampler", None), "_random", None)
        # Without one of its own it uses numpy's, which is saved anyway.
        if isinstance(generator, np.random.RandomState) and generator is not np.random.mtrand._rand:
            found[name] = generator
    return found


class _Hyperparameters:
    """Learning rates and the like, which extensions change, and the scale of the loss."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def _owners(self) -> Iterator[tuple[str, Any]]:
        yield "all", self._optimizer.hyperparam
        for name, parameter in self._optimizer.target.namedparams():
            if getattr(parameter, "update_rule", None) is not None:
                yield leaf_name(name), parameter.update_rule.hyperparam

    def state_dict(self) -> dict[str, Any]:
        own = {
            name: {key: value for key, value in vars(found).items() if key != "_parent"}
            for name, found in self._owners()
        }
        names = ("_loss_scale", "_loss_scaling_isnan_ever")
        scale = {name: getattr(self._optimizer, name) for name in names if hasattr(self._optimizer, name)}
        return {"own": {name: values for name, values in own.items() if values}, "scale": scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, found in self._owners():
            for key, value in state["own"].get(name, {}).items():
                setattr(found, key, value)
        for key, value in state["scale"].items():
            setattr(self._optimizer, key, value)


class Announced:
    """An optimizer as the `Checkpointer` sees it: what it will change, and a call before it does.

    Chainer calls ``update`` with the loss function, and hooks of the kind "pre" after forward and backward.
    """

    def __init__(self, optimizer: Any) -> None:
        self._own = optimizer
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self.state: dict[Any, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        arrays: list[Any] = []
        for parameter in self._own.target.params():
            state = getattr(getattr(parameter, "update_rule", None), "state", None) or {}
            arrays += [parameter.array, *state.values()]
        return [{"params": [array for array in arrays if isinstance(array, np.ndarray)]}]

    def register_step_pre_hook(self, hook: Callable[..., None]) -> _Hook:
        self._own.add_hook(lambda optimizer: hook(optimizer, (), {}), _Hook.name, timing="pre")
        return _Hook(self._own)


class _Hook:
    name = "everystep"

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def remove(self) -> None:
        self._optimizer.remove_hook(self.name)
