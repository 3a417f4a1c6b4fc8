"""Trainings with JAX, Flax and Optax, in an environment without torch. Called by `test_jax.py`.

trees FOLDER                          all kinds of leaves, on eight devices, two and four; what does not fit
plain FOLDER                          arrays in states of `everystep.save`, `Checkpointer` and `Shelf`
exact FOLDER STEP...                  whole, and killed after each step and then resumed; one JSON line each
save FOLDER, load FOLDER              a tree on all devices of all processes, written; read and compared
train RUN STEPS [STEP]                once; with STEP, the last process is killed when it has been saved

The last three take PROCESS WORLD PORT in JAX_PROCESSES, if there are several, and the number of devices of
each process in JAX_DEVICES.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={os.environ.get('JAX_DEVICES', 8)}"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import everystep
from everystep.integrations.jax import load, process_group, pytree, save
from everystep.store.read.checkpoint import open_checkpoint

assert "torch" not in sys.modules
warnings.filterwarnings("ignore", message="os.fork")
Moments = namedtuple("Moments", "mu nu count")


# --- trees


def bits(leaf: Any) -> Any:
    """What must be the same: type, shape, bytes, and what JAX knows besides."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), bits(jax.random.key_data(leaf))
    array = np.asarray(leaf)
    return array.dtype.name, array.shape, array.tobytes(), getattr(leaf, "weak_type", type(leaf))


def all_kinds(mesh: Mesh, fill: float = 1.0) -> dict[str, Any]:
    def put(array: Any, *spec: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    numbers = jnp.arange(64.0) * fill
    kinds = ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "complex64"]
    kinds += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "uint4"]
    return {
        "params": {"dense": {"kernel": put(numbers.reshape(8, 8), "x", "y"), "bias": put(numbers[:8])}},
        "moments": (
            Moments(put(numbers.reshape(32, 2), ("x", "y")), put(numbers[:6], "y"), jnp.asarray(int(fill))),
            None,
            [put(numbers.reshape(4, 4, 4), None, "y", "x")],
        ),
        "kinds": {kind: (numbers[:5] - 1).astype(kind) for kind in kinds},
        "key": jax.random.key(int(fill)),
        "keys": put(jax.random.split(jax.random.key(int(fill), impl="rbg"), 8), "x"),
        "raw_key": jax.random.PRNGKey(int(fill)),
        "nothing": jnp.zeros((0, 3)),
        "weak": jnp.full((3,), fill),
        "host": np.arange(3.0) * fill,
        "step": int(fill),
        "name": f"run {fill}",
    }


def check(found: Any, wanted: Any, like: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    leaves = map(jax.tree_util.tree_leaves_with_path, (found, wanted, like))
    for (path, mine), (_, its), (_, place) in zip(*leaves, strict=True):
        assert bits(mine) == bits(its), path
        if isinstance(place, (jax.Array, jax.ShapeDtypeStruct)):
            assert mine.sharding == place.sharding, path
            assert mine.committed == getattr(place, "committed", True), path


def trees(folder: str) -> None:
    def mesh_of(*shape: int) -> Mesh:
        count = shape[0] * shape[1]
        return Mesh(np.array(jax.devices()[:count]).reshape(shape), ("x", "y"))

    eight, two, four = mesh_of(4, 2), mesh_of(1, 2), mesh_of(2, 2)
    original = tree = all_kinds(eight)
    for number, mesh in enumerate([eight, two, four]):
        save(f"{folder}/{number}", tree)
        like = all_kinds(mesh, 3.0)
        before = jax.tree.map(bits, like)
        tree = load(f"{folder}/{number}", like)
        check(tree, original, like)
        assert jax.tree.map(bits, like) == before  # what says what it is like stays as it is
        described = jax.tree.map(
            lambda leaf: (
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
                if isinstance(leaf, jax.Array)
                else leaf
            ),
            like,
        )
        check(load(f"{folder}/{number}", described), original, described)

    # Without JAX it is nested dicts of numpy arrays under readable names, stored shard by shard.
    with everystep.open(f"{folder}/0") as opened:
        assert opened["params.dense.kernel"][2:4].tolist() == np.arange(16.0, 32.0).reshape(2, 8).tolist()
        assert opened.values["step"] == 1
        assert opened.values["_jax.keys.keys"] == "rbg"
    plain = everystep.load(f"{folder}/0")
    assert plain["moments"]["0"]["mu"].tolist() == np.arange(64.0).reshape(32, 2).tolist()
    assert plain["kinds"]["bfloat16"].dtype == jnp.bfloat16
    assert everystep.verify(f"{folder}/0").problems == ()

    # As one entry of a larger state.
    everystep.save(f"{folder}/entry", {"tree": pytree(original), "position": 3})
    state = {"tree": pytree(all_kinds(two, 3.0)), "position": 0}
    assert everystep.load(f"{folder}/entry", into=state) is state
    check(state["tree"].value, original, all_kinds(two, 3.0))
    assert state["position"] == 3

    # From a checkpoint that JAX did not write.
    everystep.save(f"{folder}/numpy", {"w": np.arange(16.0, dtype=np.float32)})
    split = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(eight, P("x")))
    assert load(f"{folder}/numpy", {"w": split})["w"].tolist() == list(range(16))

    refused(
        "params.dense.bias: checkpoint F32[8], target F32[9]", {"params.dense.bias": jnp.zeros(9)}, folder
    )
    refused("moments.0.count: checkpoint I32[], target F32[]", {"moments.0.count": jnp.zeros(())}, folder)
    refused("raw_key: checkpoint holds a plain array, target random keys of threefry2x32",
            {"raw_key": jax.random.key(0)}, folder)  # fmt: skip
    refused("key: checkpoint holds random keys of threefry2x32, target a plain array",
            {"key": jax.random.PRNGKey(0)}, folder)  # fmt: skip
    refused(
        "keys: checkpoint U32[8,4], target U32[8,2]", {"keys": jax.random.split(jax.random.key(0), 8)}, folder
    )
    refused("kinds.int4: checkpoint holds elements of type int4, target elements of type uint4",
            {"kinds.int4": jnp.zeros(5, "uint4")}, folder)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more = {**all_kinds(eight, 3.0), "new": jnp.full(3, 7.0), "raw_key": jnp.zeros(3)}
        found = load(f"{folder}/0", more, strict=False)
    assert found["new"].tolist() == [7.0] * 3
    assert found["raw_key"].tolist() == [0.0] * 3
    assert bits(found["params"]["dense"]["kernel"]) == bits(original["params"]["dense"]["kernel"])
    less = {key: leaf for key, leaf in original.items() if key != "weak"}
    raises(everystep.StateMismatch, "weak", lambda: load(f"{folder}/0", less))

    gone = {"params": jnp.zeros(1000)}
    jax.jit(lambda tree: jax.tree.map(jnp.exp, tree), donate_argnums=0)(gone)
    raises(
        everystep.UnsupportedState, "'params': this array is deleted", lambda: save(f"{folder}/gone", gone)
    )

    @jax.jit
    def inside(array: jax.Array) -> jax.Array:
        traced = {"array": array}
        raises(everystep.UnsupportedState, "'array': a tracer", lambda: save(f"{folder}/traced", traced))
        return array

    inside(jnp.zeros(3))
    print("trees: ok")


def refused(text: str, changes: dict[str, Any], folder: str) -> None:
    tree = all_kinds(Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y")))
    for name, leaf in changes.items():
        *path, last = name.split(".")
        inner: Any = tree
        if path == ["moments", "0"]:
            tree["moments"] = (tree["moments"][0]._replace(**{last: leaf}), *tree["moments"][1:])
            continue
        for key in path:
            inner = inner[key]
        inner[last] = leaf
    raises(everystep.StateMismatch, text, lambda: load(f"{folder}/0", tree))


def raises(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    found = ""
    try:
        call()
    except kind as error:
        found = str(error)
    assert text in found, found


# --- states of everystep.save and everystep.Checkpointer


def plain(folder: str) -> None:
    """Without pytrees: each array is a leaf, and comes back as a numpy array."""
    kinds = all_kinds(Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")))
    special = {"key", "keys"}
    odd = {"float8_e4m3b11fnuz", "int4", "uint4"}
    state = {key: leaf for key, leaf in kinds.items() if key not in special}
    state["moments"] = tuple(state["moments"][0]), state["moments"][2]
    state["kinds"] = {kind: array for kind, array in kinds["kinds"].items() if kind not in odd}
    state["no_rows"] = jax.device_put(jnp.zeros((0, 8)), kinds["params"]["dense"]["kernel"].sharding)
    everystep.save(f"{folder}/plain", state)
    found = everystep.load(f"{folder}/plain")
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for mine, its in zip(*map(jax.tree.leaves, (found, state)), strict=True):
        assert bits(mine)[:3] == bits(its)[:3]
        assert isinstance(mine, np.ndarray) is hasattr(its, "shape")
    again = jax.tree.map(lambda leaf: leaf, state)  # the leaves stay, their dicts are new
    everystep.load(f"{folder}/plain", into=again)
    check(again, state, state)
    assert again["params"]["dense"]["kernel"] is not state["params"]["dense"]["kernel"]
    # `integrations.jax` names the items of tuples as keys of dicts, so it reads trees of dicts only.
    dicts = jax.tree.map(strong, {key: leaf for key, leaf in state.items() if key != "moments"})
    everystep.save(f"{folder}/dicts", dicts)
    check(load(f"{folder}/dicts", dicts), dicts, dicts)
    assert everystep.verify(f"{folder}/plain").problems == ()

    def unsupported(text: str, call: Callable[[], object]) -> None:
        raises(everystep.UnsupportedState, text, call)

    def save_in(name: str, leaf: Any) -> Callable[[], object]:
        return lambda: everystep.save(f"{folder}/{name}", {"a": [leaf]})

    for name in special:
        unsupported("'a.0': typed random keys. Use everystep.integrations.jax", save_in(name, kinds[name]))
    for name in odd:
        unsupported(f"'a.0': a jax.Array of dtype {name}. Use", save_in(name, kinds["kinds"][name]))
    gone = jnp.zeros(3)
    gone.delete()
    unsupported("'a.0': this array is deleted", save_in("gone", gone))

    def inside(array: jax.Array) -> jax.Array:
        unsupported("'a.0': a tracer has no values", save_in("traced", array))
        return array.sum()

    for transform in (jax.jit, jax.grad, jax.vmap):
        transform(inside)(jnp.ones(3))
    with everystep.Shelf(f"{folder}/shelf") as shelf:
        shelf.a = jnp.arange(3.0)
        assert shelf.a.tolist() == [0, 1, 2]

    live = {"w": jnp.zeros(1000), "kernel": state["params"]["dense"]["kernel"], "steps": 0}
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    with everystep.Checkpointer(f"{folder}/run", live, preemption=False) as ckpt:
        assert ckpt.restore() == 0
        for number in range(1, 4):
            live.update(step({"w": live["w"], "kernel": live["kernel"]}), steps=number)
            ckpt.save(number)
        wanted, live["w"] = dict(live), live["w"] * 0
        assert ckpt.restore() == 3
        check(live, wanted, wanted)
        assert ckpt.restore(2) == 2
        assert (live["w"].tolist(), live["steps"]) == ([2] * 1000, 2)
        live.update(wanted)
    with everystep.Checkpointer(f"{folder}/rebound", {"w": live["w"]}, preemption=False) as ckpt:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ckpt.save(1)
            ckpt.save(2)
        assert any("same as in the checkpoint before" in str(each.message) for each in told), told
    for number in (2, 3):
        found = everystep.load(f"{folder}/run@{number}")
        assert (found["w"].tolist(), found["steps"]) == ([number] * 1000, number)
    target = {"w": live["w"], "kernel": live["kernel"] * 0, "steps": 0}
    step({"kernel": target["kernel"]})  # what a step was given still says where the array belongs
    assert everystep.load(f"{folder}/run", into=target) is target
    check(target, live, live)
    target["w"] = jax.random.key(1)
    unsupported("'w': typed random keys", lambda: everystep.load(f"{folder}/run", into=target))
    target["w"] = jnp.zeros(9)
    raises(everystep.StateMismatch, "w: checkpoint", lambda: everystep.load(f"{folder}/run", into=target))
    target["w"] = live["w"]
    check(load(f"{folder}/run", target), live, live)
    assert "torch" not in sys.modules
    print("plain: ok")


def strong(leaf: Any) -> Any:
    """The same without a weak type, which numpy does not have."""
    return jax.lax.convert_element_type(leaf, leaf.dtype) if isinstance(leaf, jax.Array) else leaf


# --- a training


class Net(nn.Module):
    @nn.compact
    def __call__(self, batch: jax.Array, key: jax.Array) -> jax.Array:
        hidden = nn.relu(nn.Dense(32)(batch))
        hidden = jnp.where(jax.random.bernoulli(key, 0.7, hidden.shape), hidden, 0.0)
        return nn.Dense(1)(hidden)


@partial(jax.jit, donate_argnums=0)
def step_of(state: dict[str, Any], batch: jax.Array) -> dict[str, Any]:
    key, dropout = jax.random.split(state["key"])
    train = state["train"]

    def loss(params: Any) -> jax.Array:
        return jnp.mean(train.apply_fn(params, batch, dropout) ** 2)

    return {"train": train.apply_gradients(grads=jax.grad(loss)(train.params)), "key": key}


def train(run: str, steps: int, kill: int = 0) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    net = Net()

    def split(leaf: Any) -> Any:
        spec = P("data") if np.ndim(leaf) and leaf.shape[0] % mesh.size == 0 else P()
        return jax.make_array_from_callback(
            leaf.shape, NamedSharding(mesh, spec), np.asarray(leaf).__getitem__
        )

    params = jax.tree.map(split, net.init(jax.random.key(1), jnp.zeros((1, 8)), jax.random.key(0)))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 100))
    )
    state = {
        "train": TrainState.create(apply_fn=net.apply, params=params, tx=optimizer),
        "key": jax.random.key(7),
    }
    with everystep.Checkpointer(run, keep=everystep.Keep(last=100), process_group=process_group()) as ckpt:
        first, state = ckpt.restore(into=pytree(state))
        for step in range(first, steps):
            batch = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
            state = step_of(state, split(batch))
            pending = ckpt.save(step + 1, pytree(state))
            if step + 1 == kill and jax.process_index() == jax.process_count() - 1:
                assert pending is not None
                if kill % 2:
                    pending.result(60)
                os.kill(os.getpid(), signal.SIGKILL)
        ckpt.wait()
        assert first == steps or ckpt.mode == "overlap"
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        digest.update(b"".join(np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards))
    report = {"process": jax.process_index(), "step": int(state["train"].step), "first": first}
    return {**report, "digest": digest.hexdigest()}


def in_child(run: str, kill: int = 0) -> None:
    """A process of its own, without the seconds that importing takes: JAX has not been used here."""
    pid = os.fork()
    if pid == 0:
        try:
            print("\n" + json.dumps(train(run, 12, kill)), flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(pid, 0)


def exact(folder: str, steps: list[int]) -> None:
    in_child(f"{folder}/whole")
    for step in steps:
        in_child(f"{folder}/{step}", step)
        in_child(f"{folder}/{step}")


# --- several processes


def join() -> None:
    if "JAX_PROCESSES" in os.environ:
        process, world, port = map(int, os.environ["JAX_PROCESSES"].split())
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", world, process)


def spread(folder: str, *, write: bool) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("x", "y"))

    def put(array: np.ndarray[Any, Any], *spec: Any) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P(*spec)), array.__getitem__)

    numbers = np.arange(1 << 16, dtype=np.float32)
    keys = jax.random.split(jax.random.key(5), 16)
    tree = {
        "both": put(numbers.reshape(256, 256), "x", "y"),
        "rows": put(numbers, "x"),
        "copies": put(numbers[:5]),
        "table": put(numbers.reshape(512, 128)),
        "some": put(numbers[:6], "y"),
        "host": jnp.asarray(numbers[:3]),
        "keys": jax.jit(
            lambda: jax.random.split(jax.random.key(5), 16), out_shardings=NamedSharding(mesh, P("x"))
        )(),
        "key": keys[0],
        "step": 3,
    }
    if write:
        save(f"{folder}/spread", tree, step=3)
        if jax.process_count() > 1:
            saved_apart(folder)
    like = jax.tree.map(lambda leaf: leaf, tree)
    found = load(f"{folder}/spread", like)
    for (path, mine), (_, its) in zip(*map(jax.tree_util.tree_leaves_with_path, (found, tree)), strict=True):
        if not isinstance(its, jax.Array):
            assert mine == its, path
            continue
        assert mine.sharding == its.sharding, path
        for one, other in zip(mine.addressable_shards, its.addressable_shards, strict=True):
            assert bits(one.data) == bits(other.data), path
    if jax.process_count() > 1:
        mine = {"host": jnp.full(3, float(jax.process_index()))}
        raises(everystep.errors.RanksDisagree, "host", lambda: save(f"{folder}/apart", mine))
        alone = f"{folder}/alone-{jax.process_index()}"
        parts = {"rows": tree["rows"]}
        text = "'rows': other processes have parts of this jax.Array. Use everystep.integrations.jax"
        raises(everystep.UnsupportedState, text, lambda: everystep.save(alone, parts))
        everystep.save(alone, mine, overwrite=True)
        assert everystep.load(alone)["host"].tolist() == [jax.process_index()] * 3
    assert "torch" not in sys.modules
    print("spread: ok")


def saved_apart(folder: str) -> None:
    """Each process has written the shards that it owns."""
    assert len(list(Path(folder, "spread").glob("r*.safetensors"))) == jax.process_count()
    with open_checkpoint(f"{folder}/spread") as stored:
        for process in range(jax.process_count()):
            held = {leaf.name: leaf for leaf in stored._parts[process].leaves}
            rows = sum(fragment.shape[0] for fragment in held["table"].fragments)
            assert rows == 512 // jax.process_count(), held["table"]
            assert ("copies" in held) is (process == 0), held
    with everystep.open(f"{folder}/spread") as opened:
        assert opened.world == jax.process_count()
        assert opened["table"][511:].tolist() == [list(range(511 * 128, 1 << 16))]
        assert opened["rows"][-1:].tolist() == [(1 << 16) - 1]


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    if what == "exact":
        exact(folder, [int(step) for step in rest])
    else:
        join()
        if what == "trees":
            trees(folder)
        elif what == "plain":
            plain(folder)
        elif what == "train":
            print("\n" + json.dumps(train(folder, *map(int, rest))), flush=True)
        else:
            spread(folder, write=what == "save")
