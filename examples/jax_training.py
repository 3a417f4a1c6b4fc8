"""JAX with a durable checkpoint after every step. Needs jax and optax: pip install 'everystep[jax]' optax

    python examples/jax_training.py runs/jax        # or, on eight devices of the CPU:
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/jax_training.py runs/jax

Stop it at any moment (Ctrl-C, kill -9) and start it again: it ends with the same bits as if never stopped.
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import everystep
from everystep.integrations.jax import process_group, pytree

OPTIMIZER = optax.adamw(1e-2)


def loss_of(params: dict, batch: jax.Array, key: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(batch @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden / 0.9, 0.0)
    return jnp.mean((hidden @ params["out"]["kernel"] - batch.sum(1, keepdims=True)) ** 2)


@partial(jax.jit, donate_argnums=0)
def train_step(state: dict, batch: jax.Array) -> tuple[dict, jax.Array]:
    key, dropout = jax.random.split(state["key"])
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch, dropout)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer, "key": key}, loss


def main(run: str, steps: int) -> None:
    mesh = Mesh(jax.devices(), ("devices",))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["devices"], [None, "devices"]))
    init, key, data = jax.random.split(jax.random.key(1), 3)
    # Each device has a part of the first layer, of its optimizer state, and of every batch.
    kernel = jax.device_put(jax.random.normal(init, (16, 64)) * 0.2, columns)
    params = {"hidden": {"kernel": kernel, "bias": jnp.zeros(64)}, "out": {"kernel": jnp.zeros((64, 1))}}
    state = {"params": params, "optimizer": OPTIMIZER.init(params), "key": key}
    with everystep.Checkpointer(run, process_group=process_group()) as ckpt:
        first, state = ckpt.restore(into=pytree(state))
        for step in range(first, steps):
            batch = jax.random.normal(jax.random.fold_in(data, step), (32, 16))
            state, loss = train_step(state, jax.device_put(batch, rows))
            ckpt.save(step + 1, pytree(state), metrics={"loss": float(loss)})
    print(f"steps {first} to {steps}: the kernel sums to {state['params']['hidden']['kernel'].sum()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="runs/jax")
    parser.add_argument("--steps", type=int, default=32)
    main(**vars(parser.parse_args()))
