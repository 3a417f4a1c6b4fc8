"""JAX in the suite ``determinism``: a small training with all kinds of state, and the usual checkpoints."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn

from everystep_study.frameworks.api import (
    Arrays,
    DefaultCheckpoint,
    Images,
    Probe,
    capture_random,
    restore_random,
)


class _Model(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (3, 3))(x))
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(x))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


_OPTIMIZER = optax.inject_hyperparams(optax.sgd)(learning_rate=0.05, momentum=0.9)


def _loss(params: Any, stats: Any, images: Any, labels: Any, key: Any) -> tuple[Any, Any]:
    found, changed = _Model().apply(
        {"params": params, "batch_stats": stats}, images, True, rngs={"dropout": key}, mutable=["batch_stats"]
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(found, labels).mean()
    return loss, changed["batch_stats"]


@jax.jit
def _train(state: dict[str, Any], images: Any, labels: Any, rate: Any) -> tuple[dict[str, Any], Any]:
    key, dropout = jax.random.split(jax.random.wrap_key_data(state["key"]))
    (loss, stats), gradients = jax.value_and_grad(_loss, has_aux=True)(
        state["params"], state["batch_stats"], images, labels, dropout
    )
    state["opt_state"].hyperparams["learning_rate"] = rate
    updates, opt_state = _OPTIMIZER.update(gradients, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    found = {"params": params, "batch_stats": stats, "opt_state": opt_state, "step": state["step"] + 1}
    return {**found, "key": jax.random.key_data(key)}, loss


@jax.jit
def _validate(state: dict[str, Any], images: Any, labels: Any) -> Any:
    variables = {"params": state["params"], "batch_stats": state["batch_stats"]}
    found = _Model().apply(variables, images, False)
    return optax.softmax_cross_entropy_with_integer_labels(found, labels).mean()


class JaxProbe(Probe):
    ingredients: ClassVar[Mapping[str, str]] = {
        "key": "the random key (dropout)",
        "numpy_rng": "numpy's random numbers (noise on images)",
        "python_rng": "Python's random numbers (mirrored images)",
        "opt_state": "optimizer (momentum)",
        "step": "step (the schedule of the learning rate)",
        "data": "position in the shuffled data",
        "batch_stats": "statistics of BatchNorm",
    }

    def __init__(self, seed: int) -> None:
        np.random.seed(seed)
        random.seed(seed)
        self.data = Images(seed, channels_first=False)
        begin, key = jax.random.split(jax.random.key(seed))
        variables = _Model().init(begin, self.data.images[:1], False)
        self.state: dict[str, Any] = {
            **variables,
            "opt_state": _OPTIMIZER.init(variables["params"]),
            "step": 0,
            "key": jax.random.key_data(key),
        }

    def step(self) -> float:
        """The loss of the step, and that of a validation, which sees the statistics of BatchNorm."""
        images, labels = self.data.take()
        rate = 0.05 * 0.7 ** (int(self.state["step"]) // 3)
        self.state, loss = _train(self.state, images, labels, rate)
        return float(loss) + float(_validate(self.state, *self.data.seen))

    def weights(self) -> Arrays:
        tree = {"params": self.state["params"], "batch_stats": self.state["batch_stats"]}
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}

    def capture(self) -> dict[str, Any]:
        found = jax.tree.map(np.array, self.state)
        found["weights"] = found.pop("params")
        return {**found, "data": self.data.state_dict(), **capture_random()}

    def restore(self, captured: Mapping[str, Any]) -> None:
        names = {"weights": "params", **{name: name for name in self.state}}
        self.state = {
            **self.state,
            **{own: captured[name] for name, own in names.items() if name in captured},
        }
        if "data" in captured:
            self.data.load_state_dict(captured["data"])
        restore_random(captured)


class OrbaxTrainState(DefaultCheckpoint):
    """What a Flax `TrainState` with batch statistics has: step, weights, optimizer, statistics."""

    key, title = "train-state", "Orbax, of Flax's TrainState"
    names = ("params", "opt_state", "step", "batch_stats")

    def save(self, probe: JaxProbe, directory: Path) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory.absolute() / "state", self._tree(probe))

    def load(self, probe: JaxProbe, directory: Path) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(directory.absolute() / "state", self._tree(probe))
        probe.state = {**probe.state, **found}

    def _tree(self, probe: JaxProbe) -> dict[str, Any]:
        return {name: probe.state[name] for name in self.names}


class EverystepTree(DefaultCheckpoint):
    """`integrations.jax.pytree` of the state, the position in the data and `everystep.rng` in the tree."""

    key, title, ours = "everystep", "Everystep, as in its documentation", True

    def save(self, probe: JaxProbe, directory: Path) -> None:
        import everystep
        from everystep.integrations.jax import pytree

        with everystep.Checkpointer(directory / "run", preemption=False) as checkpointer:
            checkpointer.save(1, pytree(self._tree(probe)))

    def load(self, probe: JaxProbe, directory: Path) -> None:
        import everystep
        from everystep.integrations.jax import pytree

        with everystep.Checkpointer(directory / "run", preemption=False) as checkpointer:
            _, found = checkpointer.restore(into=pytree(self._tree(probe)))
        probe.state = found["state"]

    def _tree(self, probe: JaxProbe) -> dict[str, Any]:
        import everystep

        return {"state": probe.state, "data": probe.data, "rng": everystep.rng()}
