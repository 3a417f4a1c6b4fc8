"""JAX in the study: Orbax, Flax's msgpack, Everystep."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from numpy.typing import NDArray

from everystep_study.frameworks import jax_models
from everystep_study.frameworks.api import Arrays, Framework, Training
from everystep_study.frameworks.jax_probe import EverystepTree, JaxProbe, OrbaxTrainState
from everystep_study.frameworks.models import data, size_of
from everystep_study.harness.files import sync_tree
from everystep_study.mechanisms.mechanism import EverystepOverlap, EverystepSync, Mechanism


class Program:
    """A model and its optimizer with the compiled functions, which all trainings of it share."""

    def __init__(self, model: str, quick: bool) -> None:
        self._size = size_of(model, quick)
        self._model, self._optimizer = jax_models.build(self._size)
        self.begin = jax.jit(self._begin)
        self.train = jax.jit(self._train)

    def data(self, seed: int) -> tuple[Any, Any]:
        inputs, targets = data(self._size, seed, channels_first=False)
        return jax.numpy.asarray(inputs), jax.numpy.asarray(targets)

    def _begin(self, begin: Any, dropout: Any, inputs: Any) -> dict[str, Any]:
        variables = self._model.init({"params": begin, "dropout": dropout}, inputs)
        optimizer = self._optimizer.init(variables["params"])
        return {"variables": variables, "optimizer": optimizer, "key": jax.random.key_data(dropout)}

    def _train(self, state: dict[str, Any], inputs: Any, targets: Any) -> tuple[dict[str, Any], Any]:
        key, dropout = jax.random.split(jax.random.wrap_key_data(state["key"]))
        weights = state["variables"]["params"]
        others = {name: value for name, value in state["variables"].items() if name != "params"}

        def loss_of(params: Any) -> tuple[Any, Any]:
            found, changed = self._model.apply(
                {"params": params, **others}, inputs, rngs={"dropout": dropout}, mutable=list(others)
            )
            return optax.softmax_cross_entropy_with_integer_labels(found, targets).mean(), changed

        (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        updates, optimizer = self._optimizer.update(gradients, state["optimizer"], weights)
        variables = {"params": optax.apply_updates(weights, updates), **changed}
        return {"variables": variables, "optimizer": optimizer, "key": jax.random.key_data(key)}, loss


program_of = lru_cache(Program)


class JaxTraining(Training):
    """`state` has all that a step changes: variables (weights, batch statistics), optimizer, random key."""

    def __init__(self, model: str, quick: bool, seed: int) -> None:
        begin, dropout = jax.random.split(jax.random.key(seed))
        self._program = program_of(model, quick)
        self._data = self._program.data(seed)
        self.state: dict[str, Any] = self._program.begin(begin, dropout, self._data[0])

    def step(self) -> float:
        self.state, loss = self._program.train(self.state, *self._data)
        jax.block_until_ready(self.state)
        return float(loss)

    def tree(self, weights_only: bool = False) -> dict[str, Any]:
        return {"variables": self.state["variables"]} if weights_only else self.state

    def weights(self) -> Arrays:
        return named(self.state["variables"])

    def optimizer_arrays(self) -> Arrays:
        return named(self.state["optimizer"])

    def set_weights(self, arrays: Arrays) -> None:
        def replaced(path: Any, leaf: Any) -> Any:
            found = arrays.get(_name(path))
            return leaf if found is None else jax.numpy.asarray(found)

        variables = jax.tree_util.tree_map_with_path(replaced, self.state["variables"])
        self.state = {**self.state, "variables": variables}

    def put(self, tree: dict[str, Any]) -> None:
        self.state = {**self.state, **jax.tree.map(jax.numpy.asarray, tree)}


def named(tree: Any) -> dict[str, NDArray[Any]]:
    return {_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: Any) -> str:
    return str(jax.tree_util.keystr(path, simple=True, separator="."))


class Orbax(Mechanism):
    """`StandardCheckpointer`, which writes behind training; here it is waited for at once."""

    key, title = "orbax", "Orbax"
    subject: JaxTraining

    def open(self) -> None:
        self._checkpointer = ocp.StandardCheckpointer()

    def write(self, target: Path) -> None:
        self._checkpointer.save(target.absolute(), self.subject.tree(self.weights_only), force=True)
        self._checkpointer.wait_until_finished()

    def load(self) -> None:
        self.subject.put(
            self._checkpointer.restore(self.path.absolute(), self.subject.tree(self.weights_only))
        )

    def close(self) -> None:
        self._checkpointer.close()


class OrbaxAsync(Orbax):
    """As its documentation has it: the save is waited for when the next one is due."""

    key, title = "orbax-async", "Orbax, async"
    background = True

    def open(self) -> None:
        super().open()
        self._pool = ThreadPoolExecutor(1)

    def write(self, target: Path) -> None:
        self.wait()
        self._checkpointer.save(target.absolute(), self.subject.tree(self.weights_only), force=True)
        self._pending = self._pool.submit(self._finish, target)

    def close(self) -> None:
        self.wait()
        self._pool.shutdown()
        super().close()

    def _finish(self, target: Path) -> None:
        self._checkpointer.wait_until_finished()
        if self.durable:
            sync_tree(target)


class Msgpack(Mechanism):
    """`flax.serialization.to_bytes` into a file."""

    key, title, suffix = "msgpack", "Flax, msgpack", ".msgpack"
    subject: JaxTraining

    def write(self, target: Path) -> None:
        target.write_bytes(flax.serialization.to_bytes(self.subject.tree(self.weights_only)))

    def load(self) -> None:
        self.subject.put(
            flax.serialization.from_bytes(self.subject.tree(self.weights_only), self.path.read_bytes())
        )


class JaxSync(EverystepSync):
    """`everystep.Checkpointer` with `everystep.integrations.jax.pytree`."""

    subject: JaxTraining
    prefix = "variables."

    def make(self, arguments: dict[str, Any]) -> Any:
        import everystep

        return everystep.Checkpointer(self.run, **arguments)

    def write(self, target: Path) -> None:
        from everystep.integrations.jax import pytree

        self._step += 1
        self._checkpointer.save(self._step, pytree(self.subject.tree(self.weights_only)))

    def resume(self) -> int:
        from everystep.integrations.jax import pytree

        into = pytree(self.subject.tree(self.weights_only))
        self._step, tree = self._checkpointer.restore(into=into)
        self.subject.put(tree)
        return self._step


class JaxOverlap(JaxSync, EverystepOverlap):
    key, title, mode = EverystepOverlap.key, EverystepOverlap.title, EverystepOverlap.mode
    background = True


FRAMEWORK = Framework(
    packages={name: name for name in ("jax", "flax", "optax", "orbax-checkpoint", "numpy")},
    training=JaxTraining,
    probe=JaxProbe,
    mechanisms=(Orbax, OrbaxAsync, Msgpack, JaxSync, JaxOverlap),
    defaults=(OrbaxTrainState, EverystepTree),
)
