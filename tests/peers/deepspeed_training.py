"""Trains tiny models with real DeepSpeed on the CPU and saves them; run by torchrun in its environment.

    torchrun --nproc_per_node=N deepspeed_training.py OUT CASES

CASES is JSON: a list of cases, each with a ``name`` (the directory below OUT) and what differs from DEFAULTS.
Beside each checkpoint every rank leaves ``live_R.pt``: the weights and the pieces of states that it had in
memory. This file imports nothing of everystep.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

DEFAULTS: dict[str, Any] = {
    "model": "plain",
    "stage": 1,
    "dtype": "fp32",
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "config": {},
    "steps": 3,
    "tp": 1,
    "pp": 1,
    "info": True,
    "exclude_frozen": False,
    "one_group": False,
    "train_all": False,
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLIENT = {"note": "hello", "sizes": [1, 2, 3], "nested": {"a": 1.5}}


class Plain(nn.Module):
    """Two groups, a tied head, frozen parameters, a buffer, and a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(3, 3))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 11)
        self.norm = nn.LayerNorm(11)
        self.frozen = nn.Linear(11, 3)
        self.frozen.requires_grad_(False)
        self.down = nn.Linear(11, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(self.embed(tokens)).relu())
        hidden = hidden + self.frozen(hidden).sum() * 0.01
        return nn.functional.cross_entropy(
            (self.head(self.down(hidden)) * self.scale).float().flatten(0, 1), tokens.flatten()
        )


# --- tensor parallel: each element is trained by itself, so the ranks' slices follow the whole parameter

HEADS = ((6, 4), (2, 4), (2, 4))
WHOLE: dict[str, tuple[int, ...]] = {
    "embed.weight": (8, 3),  # 7 words, padded
    "attention.qkv.weight": (10, 4),  # 6 + 2 + 2
    "mlp.gate_up.weight": (12, 3),
    "mlp.up.weight": (6, 5),
    "mlp.up.bias": (6,),
    "mlp.odd.weight": (5, 2),
    "mlp.down.weight": (3, 8),
    "mlp.down.bias": (3,),
    "norm.weight": (5,),
    "router.weight": (2, 3),
}
INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 7,
    "padded_vocab_size": 8,
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "tp_replicated_parameter_patterns": [r"norm\.weight", r"mlp\.down\.bias"],
    "parameter_to_average_patterns": [r"router\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"mlp\.gate_up\.weight"],
    "parameter_with_sub_params": [
        {"patterns": [r"attention\.qkv\.weight"], "shape": ((6, 2, 2), 4), "partition_dim": 0}
    ],
    "parameter_with_row_parallelism_patterns": [r"mlp\.down\.weight"],
}


def cut(name: str, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    if name in ("norm.weight", "mlp.down.bias", "router.weight"):
        return whole
    if name == "attention.qkv.weight":
        return torch.cat([part.chunk(tp)[rank] for part in whole.split([6, 2, 2])])
    if name == "mlp.gate_up.weight":
        return torch.cat([part.chunk(tp)[rank] for part in whole.chunk(2)])
    return whole.chunk(tp, 1 if name == "mlp.down.weight" else 0)[rank]


class Holder(nn.Module):
    """A module to hang parameters on by dotted names. ZeRO-3 gathers what a module has when that one runs."""

    def forward(self, weight: torch.Tensor, targets: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
        total = weight.sum() * 0
        for name, parameter in self.named_parameters(recurse=False):
            gap = parameter.float() - targets[f"{prefix}.{name}"]
            total = total + (gap * gap * weight.mean().float()).sum()
        for name, child in self.named_children():
            total = total + child(weight, targets, f"{prefix}.{name}")
        return total


class Cut(nn.Module):
    def __init__(self, tp: int, rank: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(1)
        self.targets: dict[str, torch.Tensor] = {}
        for name, shape in WHOLE.items():
            first = torch.randn(shape, generator=made)
            target = torch.randn(shape, generator=made)
            if name == "router.weight":
                target = target + rank  # each rank goes its own way
            *path, last = name.split(".")
            at: nn.Module = self
            for part in path:
                if part not in dict(at.named_children()):
                    at.add_module(part, Holder())
                at = at.get_submodule(part)
            at.register_parameter(last, nn.Parameter(cut(name, first, tp, rank).clone()))
            self.targets[name] = cut(name, target, tp, rank).clone()
        self.frozen = nn.Parameter(torch.full((2, 2), 3.0 + rank), requires_grad=False)
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        children = self.named_children()
        return sum((child(weight, self.targets, name) for name, child in children), weight.sum() * 0)


class Grid:
    """The `mpu` object of a data- and tensor-parallel world: neighbours are tensor-parallel."""

    def __init__(self, tp: int) -> None:
        self.tp, self.rank, world = tp, dist.get_rank(), dist.get_world_size()
        self.dp = world // tp
        for first in range(self.dp):
            ranks = list(range(first * tp, (first + 1) * tp))
            group = dist.new_group(ranks)
            if self.rank in ranks:
                self.model_group = group
        for first in range(tp):
            ranks = list(range(first, world, tp))
            group = dist.new_group(ranks)
            if self.rank in ranks:
                self.data_group = group

    def get_model_parallel_rank(self) -> int:
        return self.rank % self.tp

    def get_model_parallel_world_size(self) -> int:
        return self.tp

    def get_model_parallel_group(self) -> Any:
        return self.model_group

    def get_data_parallel_rank(self) -> int:
        return self.rank // self.tp

    def get_data_parallel_world_size(self) -> int:
        return self.dp

    def get_data_parallel_group(self) -> Any:
        return self.data_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


# --- pipeline, with tensor-parallel blocks


class _Spread(torch.autograd.Function):
    """Before a cut layer: the gradient is the sum over tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Gather(torch.autograd.Function):
    """Behind a cut layer: the value is the sum over tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        value = value.contiguous().clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class Block(nn.Module):
    """``x + down(relu(up(norm(x))))``, with `up` cut by rows and `down` by columns."""

    topology: Any = None
    tp = 1

    def __init__(self, number: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(10 + number)
        first, second = torch.randn(8, 4, generator=made), torch.randn(4, 8, generator=made)
        rank = Block.topology.get_coord(dist.get_rank()).model if Block.tp > 1 else 0
        self.norm = nn.LayerNorm(4)
        self.up = nn.Parameter(first.chunk(Block.tp, 0)[rank].clone())
        self.down = nn.Parameter(second.chunk(Block.tp, 1)[rank].clone())
        self.register_buffer("seen", torch.full((2,), float(number)))
        self.group: Any = None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(value)
        if Block.tp > 1:
            hidden = _Spread.apply(hidden, self.group)
        hidden = torch.relu(hidden @ self.up.t()) @ self.down.t()
        if Block.tp > 1:
            hidden = _Gather.apply(hidden, self.group)
        return value + hidden


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(7, 4, generator=made))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


def as_head(words: Words, value: torch.Tensor) -> torch.Tensor:
    return value @ words.weight.t()


def pipeline(case: dict[str, Any]) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

    world, pp, tp = dist.get_world_size(), case["pp"], case["tp"]
    dp = world // pp // tp
    topology: Any = PipeDataParallelTopology(pp, dp)
    if tp > 1:
        topology = PipeModelDataParallelTopology(pp, tp, dp)
    Block.topology, Block.tp = topology, tp
    layers = [
        TiedLayerSpec("words", Words, tied_weight_attr="weight"),
        LayerSpec(Block, 0),
        torch.relu,
        LayerSpec(Block, 1),
        LayerSpec(nn.LayerNorm, 4),
        TiedLayerSpec("words", Words, tied_weight_attr="weight", forward_fn=as_head),
    ]

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.float().flatten(0, 1), label.flatten())

    module = PipelineModule(layers, topology=topology, loss_fn=loss, partition_method="uniform")
    for block in module.modules():
        if isinstance(block, Block):
            block.group = module.mpu().get_slice_parallel_group() if tp > 1 else None
    if case["info"]:
        module.universal_checkpoint_info = {
            "universal_checkpoint_version": 0.2,
            "pipeline_replicated_parameter_patterns": [r"tied_modules\.words\.weight"],
            "tp_replicated_parameter_patterns": [
                r"tied_modules\.words\.weight",
                r"\d+\.norm\..*",
                r"4\..*",
            ],
            "parameter_with_row_parallelism_patterns": [r"\d+\.down"],
        }
    return module


# --- mixture of experts


class Sparse(nn.Module):
    def __init__(self, experts: int, ep: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.first = nn.Linear(4, 4)
        self.moe = MoE(
            4,
            nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)),
            num_experts=experts,
            ep_size=ep,
            k=1,
        )
        self.last = nn.Linear(4, 2)
        rank = dist.get_rank() % ep
        for number, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            made = torch.Generator().manual_seed(100 + rank * (experts // ep) + number)
            for parameter in expert.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=made))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden, loss, _ = self.moe(self.first(value))
        return self.last(hidden).float().square().mean() + loss * 0.01


# --- one case


def settings(case: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": case["optimizer"],
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": case["stage"]},
        "zero_allow_untested_optimizer": True,
    }
    if case["dtype"] != "fp32":
        made[case["dtype"]] = {"enabled": True}
    for key, value in case["config"].items():
        made[key] = {**made[key], **value} if isinstance(made.get(key), dict) else value
    return made


def train(out: Path, case: dict[str, Any]) -> None:
    torch.manual_seed(0)
    rank, kind = dist.get_rank(), TYPES[case["dtype"]]
    config = settings(case)
    mpu = None
    groups: Any = None
    if case["model"] == "pipe":
        model = pipeline(case)
        groups = list(model.parameters())
    elif case["model"] == "cut":
        mpu = Grid(case["tp"])
        model = Cut(case["tp"], mpu.get_model_parallel_rank())
        if case["info"]:
            model.universal_checkpoint_info = INFO
    elif case["model"] == "moe":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        model = Sparse(case["experts"], case["ep"])
        groups = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "parameters"}
        )
    else:
        model = Plain()
        if case["train_all"]:
            model.requires_grad_(True)
    if groups is None:
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained}]
        if not case["one_group"]:
            groups = [
                {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
            ]
    made = None
    if case["optimizer"]["type"].startswith("torch."):
        made = getattr(torch.optim, case["optimizer"]["type"][6:])(groups, **case["optimizer"]["params"])
        groups = None
        del config["optimizer"]
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=groups, mpu=mpu, optimizer=made, dist_init_required=False
    )
    feed = torch.Generator().manual_seed(7 + (mpu.get_data_parallel_rank() if mpu else rank))
    for _ in range(case["steps"]):
        if case["model"] == "pipe":
            torch.manual_seed(11)
            tokens = torch.randint(0, 7, (2, 3))
            engine.train_batch(data_iter=iter([(tokens, tokens)] * engine.gradient_accumulation_steps()))
            continue
        for _ in range(config.get("gradient_accumulation_steps", 1)):
            if case["model"] == "plain":
                loss = engine(torch.randint(0, 7, (2, 3), generator=feed))
            elif case["model"] == "cut":
                loss = engine(torch.rand(2, 3, generator=feed).to(kind))
            else:
                loss = engine(torch.randn(2, 3, 4, generator=feed).to(kind))
            engine.backward(loss)
            engine.step()
    folder = out / case["name"]
    engine.save_checkpoint(str(folder), client_state=CLIENT, exclude_frozen_parameters=case["exclude_frozen"])
    torch.save(live(engine, case), folder / f"live_{rank}.pt")
    dist.barrier()


def live(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    """What this rank holds: its weights, and its pieces of states by name (first element, elements)."""
    pieces: dict[str, dict[str, tuple[int, torch.Tensor]]] = {}
    for name, parameter in engine.module.named_parameters():
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            continue
        held = {"fp32": mapping.hp_fragment, **(mapping.optim_fragment or moments(engine, parameter))}
        start = mapping.lp_fragment_address.start
        pieces[name] = {key: (start, value.detach().clone()) for key, value in held.items() if value.dim()}
    if case["stage"] == 3:
        inner = engine.optimizer.optimizer.state
        keys = {
            key: None for state in inner.values() for key, value in state.items() if torch.is_tensor(value)
        }
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:  # whole, by messages between ranks
                whole = {key: safe_get_full_optimizer_state(parameter, key) for key in keys if key != "step"}
                whole["fp32"] = safe_get_full_fp32_param(parameter)
                pieces[name] = {key: (0, value.clone()) for key, value in whole.items()}
    weights: dict[str, torch.Tensor] = {}
    if case["stage"] < 3:
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return {"pieces": pieces, "weights": weights}


def moments(engine: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of experts, which DeepSpeed does not link to their states: from the flat vectors of their group."""
    zero, address = engine.optimizer, parameter._hp_mapping.hp_fragment_address
    for number, group in enumerate(getattr(zero, "bit16_groups", ())):
        if any(one is parameter for one in group):
            state = zero.optimizer.state.get(zero.single_partition_of_fp32_groups[number], {})
            flat = {key: value for key, value in state.items() if torch.is_tensor(value) and value.dim()}
            return {key: value.narrow(0, address.start, address.numel) for key, value in flat.items()}
    return {}


def main() -> None:
    out, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    for case in cases:
        if dist.get_rank() == 0:
            print("case", case["name"], flush=True)
        train(out, {**DEFAULTS, **case})
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of DeepSpeed's own may hang at exit


if __name__ == "__main__":
    main()
