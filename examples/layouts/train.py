"""Trains the GPT in one layout, from its start or from a checkpoint of another layout. Run by torchrun:

    torchrun --nproc-per-node 8 train.py --tp 2 --pp 2 --dp 2 --losses all.json --save-at 30 --megatron DIR
    torchrun --nproc-per-node 2 train.py --fsdp 2 --resume-from DIR --losses fsdp.json

With ``--megatron``, ranks write what Megatron writes: a file for each tensor- and pipeline-parallel rank.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import BATCH, CONTEXT, GPT, LAYERS, WIDTH, WORDS, batch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import everystep

BLOCK = "language_model.encoder.layers.*"
CUTS = {
    "language_model.embedding.word_embeddings": RowwiseParallel(input_layouts=Replicate()),
    f"{BLOCK}.self_attention.query_key_value": ColwiseParallel(),
    f"{BLOCK}.self_attention.dense": RowwiseParallel(),
    f"{BLOCK}.mlp.dense_h_to_4h": ColwiseParallel(),
    f"{BLOCK}.mlp.dense_4h_to_h": RowwiseParallel(),
    "language_model.output_layer": ColwiseParallel(output_layouts=Replicate()),
}
LAYER = "language_model.encoder.layers."


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Training:
    def __init__(self, pp: int, dp: int, tp: int, *, fsdp: bool) -> None:
        mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        self.mesh, self.fsdp = mesh, fsdp
        self.stage, self.data, self.tensor = (mesh.get_local_rank(name) for name in ("pp", "dp", "tp"))
        self.first = LAYERS // pp * self.stage
        self.model = GPT(self.first, self.first + LAYERS // pp)
        if tp > 1:
            here = {
                path: cut
                for path, cut in CUTS.items()
                if "layers" in path or path.split(".")[1] in self.model.language_model
            }
            parallelize_module(self.model, mesh["tp"], here)
        if fsdp:
            fully_shard(self.model, mesh=mesh["dp"])
        # Some weights are sharded and some are not: no single kernel updates them all.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)

    def step(self, number: int) -> float | None:
        """The loss over all sequences of the step, on ranks of the last stage."""
        dp, pp = self.mesh["dp"].size(), self.mesh["pp"].size()
        mine = batch(number).chunk(dp)[self.data]
        x = mine[:, :-1]
        if self.stage > 0:
            x = torch.empty(len(mine), CONTEXT, WIDTH)
            dist.recv(x, self._rank_of(self.stage - 1))
            x.requires_grad_()
        y = self.model(x)
        loss: torch.Tensor | None = None
        if self.stage == pp - 1:
            total = torch.nn.functional.cross_entropy(y.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
            loss = total * dp / (BATCH * CONTEXT)  # the average over ranks is that over all sequences
            loss.backward()
        else:
            dist.send(y.detach().contiguous(), self._rank_of(self.stage + 1))
            gradient = torch.empty_like(y)
            dist.recv(gradient, self._rank_of(self.stage + 1))
            y.backward(gradient)
        if self.stage > 0:
            dist.send(x.grad.contiguous(), self._rank_of(self.stage - 1))
        if dp > 1 and not self.fsdp:
            for parameter in self.model.parameters():
                average(local(parameter.grad), self.mesh["dp"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None if loss is None else average(loss.detach().clone(), self.mesh["dp"]).item()

    def _rank_of(self, stage: int) -> int:
        return int(self.mesh.mesh[stage, self.data, self.tensor])

    def write_megatron(self, path: Path, iteration: int) -> None:
        """The file of this rank, as Megatron lays it out: layers of a stage count from 0."""
        if self.data == 0:
            names = {parameter: name for name, parameter in self.model.named_parameters()}
            state = self.optimizer.state_dict()
            model = {self._in_stage(name): local(parameter.detach()) for parameter, name in names.items()}
            kept: dict[int, Any] = {
                index: {key: local(value) for key, value in entries.items()}
                for index, entries in state["state"].items()
            }
            content = {
                "args": argparse.Namespace(
                    tensor_model_parallel_size=self.mesh["tp"].size(),
                    pipeline_model_parallel_size=self.mesh["pp"].size(),
                    vocab_size=WORDS,
                    untie_embeddings_and_output_weights=True,
                ),
                "checkpoint_version": 3.0,
                "iteration": iteration,
                "model": model,
                "optimizer": {"optimizer": {"state": kept, "param_groups": state["param_groups"]}},
            }
            stage = f"_{self.stage:03d}" if self.mesh["pp"].size() > 1 else ""
            folder = path / f"iter_{iteration:07d}" / f"mp_rank_{self.tensor:02d}{stage}"
            folder.mkdir(parents=True)
            torch.save(content, folder / "model_optim_rng.pt")
        if dist.get_rank() == 0:
            (path / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")

    def _in_stage(self, name: str) -> str:
        if not name.startswith(LAYER):
            return name
        number, rest = name.removeprefix(LAYER).split(".", 1)
        return f"{LAYER}{int(number) - self.first}.{rest}"


def average(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    dist.all_reduce(tensor, group=mesh.get_group())
    return tensor.div_(mesh.size())


def main(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    dp = options.fsdp or options.dp
    training = Training(options.pp, dp, options.tp, fsdp=bool(options.fsdp))
    state = {"model": training.model, "optimizer": training.optimizer}
    completed = 0
    if options.resume_from:
        # Every rank reads the bytes of its own shards, out of whatever layout wrote them.
        run = options.losses.with_suffix(".run")
        with everystep.Checkpointer(run, state) as ckpt:
            completed = ckpt.restore(init_from=options.resume_from, continue_steps=True)
    losses: dict[int, float] = {}
    for step in range(completed, options.steps):
        loss = training.step(step)
        if loss is not None:
            losses[step + 1] = loss
        if step + 1 == options.save_at:
            training.write_megatron(options.megatron, step + 1)
    if training.stage == options.pp - 1 and training.data == training.tensor == 0:
        options.losses.write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--fsdp", type=int, default=0, help="ranks that share all weights (FSDP2)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--losses", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--resume-from", help="a checkpoint of any system that Everystep reads")
    parser.add_argument("--save-at", type=int, default=0)
    parser.add_argument("--megatron", type=Path, help="where to write the checkpoint")
    main(parser.parse_args())
