"""Promise: of a tensor that is spread over ranks, each saves and restores its part exactly, in silence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from everystep.errors import StateMismatch, UnsupportedState
from everystep.format.geometry import Box
from everystep.state import LeafSource, Sharding, flatten
from support.states.memory_store import save
from support.worlds.peerless_meshes import as_saved, contents, numbers, part, restore_parts, world

LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement], tuple[tuple[int, int] | None, ...]]] = {
    "rows": ((4,), [Shard(0)], ((0, 1),)),
    "columns": ((4,), [Shard(-1)], ((1, 1),)),
    "replicated": ((4,), [Replicate()], (None,)),
    "hsdp": ((2, 2), [Replicate(), Shard(0)], (None, (0, 1))),
    "both axes": ((2, 2), [Shard(1), Shard(0)], ((1, 1), (0, 1))),
    "one axis twice": ((2, 2), [Shard(0), Shard(0)], ((0, 1), (0, 1))),
    "strided": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], ((0, 2), (0, 1))),
}


def make(mesh: DeviceMesh, placements: list[Placement], whole: torch.Tensor, rank: int) -> DTensor:
    """What `whole` is on a rank, cut without torch."""
    sizes = tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist())
    words: list[tuple[int, int] | None] = []
    for placement in placements:
        axis = getattr(placement, "dim", None)
        words.append(None if axis is None else (axis % whole.ndim, getattr(placement, "split_factor", 1)))
    local = part(whole.numpy(), Sharding(tuple(whole.shape), *sizes, tuple(words)), rank)
    return DTensor.from_local(
        torch.from_numpy(local), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_leaf_is_the_part_that_is_here_and_says_of_what(kind: str, rank: int) -> None:
    mesh_shape, placements, words = LAYOUTS[kind]
    with world(rank, 4):
        mesh = init_device_mesh("cpu", mesh_shape)
        tensor = make(mesh, placements, numbers((8, 6)), rank)
        (leaf,) = flatten({"w": tensor}).leaves
        assert leaf.sharding == Sharding((8, 6), mesh_shape, (0, 1, 2, 3), words)
        assert leaf.whole_shape == (8, 6)
        assert leaf.shape == tuple(tensor.to_local().shape)
        assert leaf.source.address == tensor._local_tensor.data_ptr(), "copied"
        if kind != "strided":  # torch cuts these only by redistribution
            own = distribute_tensor(numbers((8, 6)), mesh, placements, src_data_rank=None)
            assert np.array_equal(contents(leaf), own.to_local().numpy())


def test_a_parameter_is_no_different() -> None:
    with world(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        parameter = nn.Parameter(distribute_tensor(numbers((5, 2)), mesh, [Shard(0)], src_data_rank=None))
        (leaf,) = flatten([parameter]).leaves
        assert contents(leaf).tolist() == [[6, 7], [8, 9]]
        assert leaf.sharding.shape == (5, 2)


def test_shards_may_be_uneven_and_empty() -> None:
    for rank, rows in enumerate([2, 2, 1, 0]):
        with world(rank, 4):
            mesh = init_device_mesh("cpu", (4,))
            tensor = distribute_tensor(numbers((5, 3)), mesh, [Shard(0)], src_data_rank=None)
            (leaf,) = flatten([tensor]).leaves
            assert (leaf.shape, leaf.nbytes) == ((rows, 3), rows * 12)


def test_a_rank_outside_of_the_mesh_has_the_node_but_no_leaf() -> None:
    trees = []
    for rank in range(3):
        with world(rank, 3):
            tensor = distribute_tensor(
                numbers((4,)), DeviceMesh("cpu", [0, 2]), [Shard(0)], src_data_rank=None
            )
            flat = flatten({"w": tensor, "b": numbers((2,))})
            trees.append(flat.tree)
            assert [leaf.name for leaf in flat.leaves] == (["b"] if rank == 1 else ["w", "b"])
            if rank == 1:
                made = restore_parts(
                    {"w": tensor, "b": torch.zeros(2)}, *_saved(flat, {"w": (4,), "b": (2,)}), 1
                )
                assert list(made.destinations) == ["b"]
    assert trees[0] == trees[1] == trees[2]


def _saved(flat: Any, shapes: dict[str, tuple[int, ...]]) -> Any:
    wholes = {name: numbers(shape, 100.0 * n).numpy() for n, (name, shape) in enumerate(shapes.items())}
    return as_saved(flat, wholes), wholes


def test_partial_sums_are_refused_with_advice() -> None:
    with world(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(UnsupportedState, match=r"model\.w.*Redistribute it to Replicate or Shard"):
            flatten({"model": {"w": tensor}})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, bias=False)
        self.second = nn.Linear(3, 5, bias=False)
        self.second.weight = self.first.weight
        self.other = nn.Linear(3, 5, bias=False)


@pytest.mark.parametrize("rank", [0, 3])
def test_tied_parameters_are_tied_on_every_rank_also_where_they_are_empty(rank: int) -> None:
    with world(rank, 4):
        module = Tied()
        fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
        flat = flatten(module)
        assert flat.aliases == (("second.weight", "first.weight"),)
        assert [leaf.name for leaf in flat.leaves] == ["first.weight", "other.weight"]
        assert all(leaf.nbytes == (0 if rank == 3 else 24) for leaf in flat.leaves)


def test_a_dtensor_and_its_own_part_are_two_leaves_and_come_back() -> None:
    with world(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(numbers((4,)), mesh, [Shard(0)], src_data_rank=None)
        state = {"whole": tensor, "part": tensor._local_tensor}
        flat = flatten(state)
        assert flat.aliases == ()
        wholes = {"whole": np.float32([5, 6, 7, 8]), "part": np.float32([7, 8])}
        restore_parts(state, as_saved(flat, wholes), wholes, 1)
        assert tensor._local_tensor.tolist() == [7, 8]


# --- without a mesh -----------------------------------------------------------------------------------------


def boxed(shape: tuple[int, ...], boxes: list[Box], rank: int = 0) -> Any:
    """A ShardedTensor of zeros; `boxes` are on this rank."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

    here = [ShardMetadata(list(b.start), list(b.shape), f"rank:{rank}/cpu") for b in boxes]
    # What is not here is said to be on the next rank, in one piece after the other.
    left = [ShardMetadata([at, 0], [1, shape[1]], f"rank:{rank + 1}/cpu") for at in range(shape[0])]
    taken = {at for b in boxes for at in range(b.start[0], b.stop[0])}
    metadata = ShardedTensorMetadata(
        [*here, *(m for m in left if m.shard_offsets[0] not in taken)],
        torch.Size(shape),
        TensorProperties(dtype=torch.float32),
    )
    shards = [LocalShard(torch.zeros(m.shard_sizes), m) for m in here]
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)


def test_a_sharded_tensor_is_the_box_that_is_here() -> None:
    with world(0, 2):
        tensor = boxed((4, 3), [Box((1, 0), (2, 3))])
        flat = flatten({"w": tensor})
        (leaf,) = flat.leaves
        assert (leaf.shape, leaf.whole_shape) == ((2, 3), (4, 3))
        assert leaf.sharding == Sharding((4, 3), box=Box((1, 0), (2, 3)))
        local = tensor.local_shards()[0].tensor
        assert leaf.source.address == local.data_ptr()
        wholes = {"w": numbers((4, 3)).numpy()}
        made = restore_parts({"w": tensor}, as_saved(flat, wholes), wholes, 0)
        assert list(made.parts) == ["w"]
        assert local.tolist() == [[3, 4, 5], [6, 7, 8]]


def test_a_sharded_tensor_with_nothing_here_has_a_node_only() -> None:
    with world(0, 2):
        tensor = boxed((4, 3), [])
        flat = flatten({"w": tensor})
        assert (flat.tree, flat.leaves) == ({"w": {"$leaf": "w"}}, ())
        wholes = {"w": numbers((4, 3)).numpy()}
        assert not restore_parts({"w": tensor}, as_saved(flat, wholes), wholes, 0).destinations


def test_a_sharded_tensor_in_several_pieces_here_is_refused() -> None:
    with world(0, 2):
        tensor = boxed((4, 3), [Box((0, 0), (1, 3)), Box((2, 0), (1, 3))])
        with pytest.raises(UnsupportedState, match=r"w.*2 shards on this rank"):
            flatten({"w": tensor})


# --- restoring ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_part_is_read_into_the_memory_of_the_local_tensor(kind: str) -> None:
    mesh_shape, placements, _ = LAYOUTS[kind]
    for rank in range(4):
        with world(rank, 4):
            mesh = init_device_mesh("cpu", mesh_shape)
            wanted = make(mesh, placements, numbers((7, 5), 1.0), rank)
            target = make(mesh, placements, torch.zeros(7, 5), rank)
            local, version = target._local_tensor, target._version
            wholes = {"w": numbers((7, 5), 1.0).numpy()}
            into = {"w": target}
            made = restore_parts(into, as_saved(flatten(into), wholes), wholes, rank)
            assert into["w"] is target
            assert target._local_tensor is local
            assert torch.equal(local, wanted._local_tensor)
            assert made.fresh == ()
            if local.numel():
                assert made.destinations["w"].address == local.data_ptr()
                assert made.parts["w"][1] == tuple(local.shape)
                assert target._version > version, "autograd was not told"


def test_whole_types_are_compared() -> None:
    with world(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        target = {"w": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)], src_data_rank=None)}
        saved = save({"w": torch.zeros(2, 2)})  # the shape of the part
        with pytest.raises(StateMismatch, match=r"checkpoint F32\[2,2\], target F32\[4,2\]"):
            restore_parts(target, saved, {}, 0)
        with pytest.raises(StateMismatch, match=r"checkpoint F64\[4,2\], target F32\[4,2\]"):
            restore_parts(target, save({"w": torch.zeros(4, 2, dtype=torch.float64)}), {}, 0)


def test_tied_in_the_checkpoint_and_apart_here_is_read_once_and_copied() -> None:
    with world(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        saved = save((lambda w: {"a": w, "b": w})(numbers((4, 2))))
        assert saved.aliases == {"b": "a"}
        into = {k: distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)], src_data_rank=None) for k in "ab"}
        made = restore_parts(into, saved, {"a": numbers((4, 2)).numpy()}, 1)
        assert list(made.destinations) == ["a"]
        for tensor in into.values():
            assert tensor._local_tensor.tolist() == [[4, 5], [6, 7]]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_tied_in_the_checkpoint_but_spread_differently_here_is_read_for_each(order: str) -> None:
    with world(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        whole = numbers((4, 2))
        saved = save({"a": whole, "b": whole, "c": whole})
        spread: dict[str, Any] = {
            order[0]: distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)], src_data_rank=None),
            order[1]: distribute_tensor(torch.zeros(4, 2), mesh, [Shard(1)], src_data_rank=None),
            "c": torch.zeros(4, 2),
        }
        made = restore_parts(spread, saved, {"a": whole.numpy()}, 1)
        assert spread[order[0]]._local_tensor.tolist() == [[4, 5], [6, 7]]
        assert spread[order[1]]._local_tensor.tolist() == [[1], [3], [5], [7]]
        assert torch.equal(spread["c"], whole)
        assert len(made.destinations) == 3


def test_a_leaf_wanted_whole_and_in_part_is_read_for_both() -> None:
    with world(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        whole = numbers((4,))
        saved = save({"a": whole, "b": whole})
        into = {"a": distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None), "b": None}
        made = restore_parts(into, saved, {"a": whole.numpy()}, 1)
        assert made.fresh == ("a",)
        assert into["a"]._local_tensor.tolist() == [2, 3]
        assert torch.equal(into["b"], whole)


def test_parts_that_cannot_be_written_in_place_go_through_memory_of_their_size() -> None:
    with world(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        buffer = torch.zeros(6)
        # Two views of one buffer that overlap: what is read last must not be torn.
        into = {
            "a": DTensor.from_local(buffer[0:2], mesh, [Shard(0)], run_check=False),
            "b": DTensor.from_local(buffer[1:3], mesh, [Shard(0)], run_check=False),
        }
        wholes = {"a": np.float32([1, 2, 3, 4]), "b": np.float32([2, 3, 4, 5])}
        made = restore_parts(into, as_saved(flatten(into), wholes), wholes, 1)
        assert made.fresh == ()
        assert buffer.tolist() == [3, 4, 5, 0, 0, 0]


# --- modules and optimizers ---------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, dtype=dtype)
        self.down = nn.Linear(8, 6, dtype=dtype)
        self.register_buffer("scale", torch.ones(3))


def shard_fsdp(net: nn.Module) -> None:
    fully_shard(net, mesh=init_device_mesh("cpu", (4,)))


def shard_tp(net: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (4,))
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard_fsdp_tp(net: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])


def local_of(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


WAYS = {"fsdp2": shard_fsdp, "tp": shard_tp, "fsdp2 x tp": shard_fsdp_tp}


def trained(dtype: torch.dtype = torch.float32, seed: int = 3) -> dict[str, Any]:
    """A plain training after a step: the checkpoint that all layouts resume from."""
    torch.manual_seed(seed)
    net = Net(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):  # moments may be finer than their parameters
            state[key] = torch.randn(state[key].shape)
    return {"net": net, "optimizer": optimizer}


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh optimizer", "optimizer with state"])
@pytest.mark.parametrize("way", WAYS)
def test_sharded_trainings_resume_from_a_plain_one(
    way: str, fresh: bool, dtype: torch.dtype, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(dtype)
    saved = save(plain)
    with world(rank, 4):
        torch.manual_seed(0)
        net = Net(dtype)
        WAYS[way](net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
        if not fresh:
            for parameter in net.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        memory = {name: local_of(p).data_ptr() for name, p in net.named_parameters()}
        monkeypatch.setattr(nn.Module, "load_state_dict", _must_not_be_called)
        with CommDebugMode() as save_round:
            made = _restore_bytes({"net": net, "optimizer": optimizer}, saved, rank)
            flatten({"net": net, "optimizer": optimizer})
        assert save_round.get_total_counts() == 0
        assert {name: local_of(p).data_ptr() for name, p in net.named_parameters()} == memory
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert all(name.endswith(".step") for name in made.fresh), "read whole"
        names = dict(plain["net"].named_parameters())
        for name, parameter in net.named_parameters():
            _check(parameter, names[name], rank)
            theirs, own = plain["optimizer"].state[names[name]], optimizer.state[parameter]
            assert own.keys() == theirs.keys()
            for key, value in theirs.items():
                if value.ndim:
                    assert type(own[key]) is type(parameter.data)
                    _check(own[key], value, rank)
                else:
                    assert type(own[key]) is torch.Tensor
                    assert torch.equal(own[key], value)
        if dtype is torch.float32:  # AdamW itself does not take moments of another type
            for parameter in net.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()


def _must_not_be_called(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("all memory is the module's own: there is nothing to load")


def _check(tensor: Any, whole: torch.Tensor, rank: int) -> None:
    assert tensor.dtype == whole.dtype
    assert tensor.shape == whole.shape
    if not isinstance(tensor, DTensor):
        assert torch.equal(tensor.detach(), whole.detach())
        return
    (leaf,) = flatten([tensor]).leaves
    bits = whole.detach().view(torch.int16 if whole.dtype is torch.bfloat16 else torch.int32).numpy()
    expected = part(bits, leaf.sharding, rank)
    assert np.array_equal(local_of(tensor).detach().view(torch.from_numpy(expected).dtype).numpy(), expected)


def _restore_bytes(into: object, saved: Any, rank: int) -> Any:
    sizes = {"F32": np.uint32, "BF16": np.uint16}
    wholes = {
        name: np.frombuffer(saved.data[name], sizes[meta.dtype]).reshape(meta.shape)
        for name, meta in saved.leaves.items()
    }
    return restore_parts(into, saved, wholes, rank)


def test_a_step_count_is_plain_though_the_parameter_is_a_single_number_on_a_mesh() -> None:
    def training(value: Any) -> dict[str, Any]:
        parameter = nn.Parameter(value)
        return {"p": parameter, "optimizer": torch.optim.Adam([parameter])}

    plain = training(torch.tensor(2.0))
    plain["p"].grad = torch.tensor(0.5)
    plain["optimizer"].step()
    with world(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        state = training(DTensor.from_local(torch.tensor(0.0), mesh, [Replicate()], run_check=False))
        _restore_bytes(state, save(plain), 1)
        found = state["optimizer"].state[state["p"]]
        assert type(found["step"]) is torch.Tensor
        assert type(found["exp_avg"]) is DTensor
        assert found["exp_avg"]._local_tensor == plain["optimizer"].state[plain["p"]]["exp_avg"]


def test_what_is_flattened_from_a_sharded_training_has_the_names_of_the_plain_one() -> None:
    plain = trained()
    names = {leaf.name: leaf.shape for leaf in flatten(plain).leaves}
    for shard in WAYS.values():
        with world(2, 4):
            net = Net()
            shard(net)
            optimizer = torch.optim.AdamW(net.parameters())
            for parameter in net.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            leaves: tuple[LeafSource, ...] = flatten({"net": net, "optimizer": optimizer}).leaves
            assert {leaf.name: leaf.whole_shape for leaf in leaves} == names
