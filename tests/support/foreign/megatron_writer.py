"""Writes a small model as Megatron does: tensor-parallel x pipeline-parallel rank files, with torch.save.

The layouts are written out by hand here and not by `everystep.universal.split`: they are what is tested
against.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HIDDEN, HEADS, GROUPS, FFN, WORDS, PADDED, PLACES = 8, 4, 2, 12, 21, 24, 5
LAYERS = 4
HEAD_SIZE = HIDDEN // HEADS
QKV = GROUPS * (HEADS // GROUPS + 2) * HEAD_SIZE  # group by group: its queries, its key, its value

Cut = Callable[[torch.Tensor, int, int], torch.Tensor]


def rows(whole: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    return whole.chunk(tp, 0)[rank]


def columns(whole: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    return whole.chunk(tp, 1)[rank]


def same(whole: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    return whole


def gate_up(whole: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    gate, up = whole.chunk(2, 0)
    return torch.cat([rows(gate, rank, tp), rows(up, rank, tp)])


def padded_rows(whole: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    more = torch.full((PADDED - WORDS, *whole.shape[1:]), -1.0)
    return rows(torch.cat([whole, more]), rank, tp)


class Model:
    """Whole parameters by name, and how a rank cuts each. Layer names have ``{}`` for the number."""

    def __init__(self, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made)

        self.cuts: dict[str, Cut] = {}
        self.whole: dict[str, torch.Tensor] = {}
        embedding, encoder = "language_model.embedding.", "language_model.encoder."
        self._add(f"{embedding}word_embeddings.weight", random(WORDS, HIDDEN), padded_rows)
        self._add(f"{embedding}position_embeddings.weight", random(PLACES, HIDDEN), same)
        for number in range(LAYERS):
            layer = f"{encoder}layers.{number}."
            self._add(f"{layer}input_layernorm.weight", random(HIDDEN), same)
            self._add(f"{layer}input_layernorm.bias", random(HIDDEN), same)
            self._add(f"{layer}self_attention.query_key_value.weight", random(QKV, HIDDEN), rows)
            self._add(f"{layer}self_attention.query_key_value.bias", random(QKV), rows)
            self._add(f"{layer}self_attention.dense.weight", random(HIDDEN, HIDDEN), columns)
            self._add(f"{layer}self_attention.dense.bias", random(HIDDEN), same)
            self._add(f"{layer}mlp.dense_h_to_4h.weight", random(2 * FFN, HIDDEN), gate_up)
            self._add(f"{layer}mlp.dense_4h_to_h.weight", random(HIDDEN, FFN), columns)
        self._add(f"{encoder}final_layernorm.weight", random(HIDDEN), same)

    def _add(self, name: str, whole: torch.Tensor, cut: Cut) -> None:
        self.whole[name], self.cuts[name] = whole, cut

    def local(self, name: str, rank: int, tp: int) -> torch.Tensor:
        return self.cuts[name](self.whole[name], rank, tp).clone()

    def moment(self, name: str, kind: str) -> torch.Tensor:
        """A state of the optimizer for a parameter, whole."""
        return self.whole[name] * {"exp_avg": 2.0, "exp_avg_sq": 3.0, "fp32": 5.0}[kind]


def write_megatron(
    path: Path,
    model: Model,
    *,
    tp: int = 2,
    pp: int = 2,
    chunks: int = 1,
    step: int = 100,
    optimizer: bool = True,
    change: Callable[[dict[str, Any], int, int], None] | None = None,
) -> Path:
    """Writes a checkpoint. `chunks` are model chunks per stage. `change` is given every file's content."""
    folder = path / f"iter_{step:07d}"
    for rank in range(tp):
        for stage in range(pp):
            content = _content(model, rank, stage, tp, pp, chunks, step, optimizer)
            if change is not None:
                change(content, rank, stage)
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            (folder / name).mkdir(parents=True)
            torch.save(content, folder / name / "model_optim_rng.pt")
    (path / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")
    return path


def _content(
    model: Model, rank: int, stage: int, tp: int, pp: int, chunks: int, step: int, optimizer: bool
) -> dict[str, Any]:
    each = LAYERS // (pp * chunks)
    trees: list[dict[str, Any]] = []
    order: list[
        tuple[str, torch.Tensor]
    ] = []  # as the model lists its parameters: name in the whole model, tensor
    for chunk in range(chunks):
        first = (chunk * pp + stage) * each
        names: dict[str, str] = {}  # local -> whole
        for name in model.whole:
            parts = name.split(".")
            if "layers" in parts:
                number = int(parts[3])
                if first <= number < first + each:
                    names[name.replace(f"layers.{number}.", f"layers.{number - first}.")] = name
            elif ("embedding" in name and stage == 0 and chunk == 0) or (
                "final" in name and stage == pp - 1 and chunk == chunks - 1
            ):
                names[name] = name
        tensors = {local: model.local(name, rank, tp) for local, name in names.items()}
        order += [(names[local], tensor) for local, tensor in tensors.items()]
        if pp > 1 and stage == pp - 1 and chunk == chunks - 1:
            tied = "language_model.embedding.word_embeddings.weight"
            tensors["word_embeddings_for_head.weight"] = model.local(tied, rank, tp)
            order.append((tied, tensors["word_embeddings_for_head.weight"]))
        trees.append(_nested(tensors))
    content: dict[str, Any] = {
        "args": argparse.Namespace(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            vocab_size=WORDS,
            padded_vocab_size=PADDED,
            swiglu=True,
            params_dtype=torch.float32,
        ),
        "checkpoint_version": 3.0,
        "iteration": step,
    }
    content.update(
        {"model": trees[0]} if chunks == 1 else {f"model{n}": tree for n, tree in enumerate(trees)}
    )
    if optimizer:
        content["optimizer"] = _optimizer(model, order, rank, tp)
        content["opt_param_scheduler"] = {"max_lr": 0.01, "num_steps": step}
    return content


def _nested(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As Megatron nests: by module down to ``encoder``, and dotted names below."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        at = tree
        depth = 2 if ".encoder." in name else name.count(".")
        *path, last = name.split(".", depth)
        for part in path:
            at = at.setdefault(part, {})
        at[last] = tensor
    return tree


def _optimizer(model: Model, order: list[tuple[str, torch.Tensor]], rank: int, tp: int) -> dict[str, Any]:
    plain = [name.endswith(".bias") or tensor.dim() == 1 for name, tensor in order]
    groups = [
        [pair for pair, is_plain in zip(order, plain, strict=True) if is_plain is kind]
        for kind in (False, True)
    ]
    state: dict[int, dict[str, Any]] = {}
    found: list[dict[str, Any]] = []
    masters: list[list[torch.Tensor]] = []
    for decay, group in zip((0.1, 0.0), groups, strict=True):
        indices = [len(state) + at for at in range(len(group))]
        for index, (name, _) in zip(indices, group, strict=True):
            cut = model.cuts[name]
            state[index] = {
                kind: cut(model.moment(name, kind), rank, tp).clone() for kind in ("exp_avg", "exp_avg_sq")
            }
            state[index]["step"] = 7
        masters.append([model.cuts[name](model.moment(name, "fp32"), rank, tp).clone() for name, _ in group])
        found.append({"lr": 0.01, "weight_decay": decay, "params": indices})
    return {"optimizer": {"state": state, "param_groups": found}, "fp32_from_fp16_params": masters}
