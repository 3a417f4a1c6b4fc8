"""A small GPT with the module names of Megatron, and its data. Every layout trains this model.

Nothing about ranks or checkpoints is in here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

LAYERS, WIDTH, HEADS, WORDS, CONTEXT, BATCH = 4, 32, 4, 128, 32, 8
HEAD_WIDTH = WIDTH // HEADS


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)  # head by head: its query, its key, its value
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # As many heads as are here: with tensor parallelism, each rank has some of them.
        fused = self.query_key_value(x).unflatten(-1, (-1, 3, HEAD_WIDTH)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(*fused.unbind(3), is_causal=True)
        return self.dense(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attention = Attention()
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(
            {"dense_h_to_4h": nn.Linear(WIDTH, 4 * WIDTH), "dense_4h_to_h": nn.Linear(4 * WIDTH, WIDTH)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        hidden = nn.functional.gelu(self.mlp["dense_h_to_4h"](self.post_attention_layernorm(x)))
        return x + self.mlp["dense_4h_to_h"](hidden)


class GPT(nn.Module):
    """The stage of a pipeline: layers from `first` to `last`, and the ends that belong to these."""

    def __init__(self, first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding = {
            "word_embeddings": nn.Embedding(WORDS, WIDTH),
            "position_embeddings": nn.Embedding(CONTEXT, WIDTH),
        }
        blocks = {str(number): Block() for number in range(LAYERS)}  # all of them: the same random numbers
        output = nn.Linear(WIDTH, WORDS, bias=False)
        encoder: dict[str, nn.Module] = {
            "layers": nn.ModuleDict({str(number): blocks[str(number)] for number in range(first, last)})
        }
        parts: dict[str, nn.Module] = {}
        self.begins, self.ends = first == 0, last == LAYERS
        if self.begins:
            parts["embedding"] = nn.ModuleDict(embedding)
        if self.ends:
            encoder["final_layernorm"] = nn.LayerNorm(WIDTH)
            parts["output_layer"] = output
        self.language_model = nn.ModuleDict({**parts, "encoder": nn.ModuleDict(encoder)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens or activations in, activations or logits out."""
        parts, encoder = self.language_model, self.language_model["encoder"]
        if self.begins:
            places = torch.arange(x.shape[1])
            x = parts["embedding"]["word_embeddings"](x) + parts["embedding"]["position_embeddings"](places)
        for block in encoder["layers"].values():
            x = block(x)
        return parts["output_layer"](encoder["final_layernorm"](x)) if self.ends else x


def batch(step: int) -> torch.Tensor:
    """The sequences of a step, the same in all layouts: pieces of this file."""
    text = torch.tensor(list(Path(__file__).read_bytes())) % WORDS
    starts = torch.randint(
        len(text) - CONTEXT - 1, (BATCH,), generator=torch.Generator().manual_seed(1000 + step)
    )
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
