"""The model and the data that `ddp.py` and `fsdp2_tp.py` train: a small character transformer.

Nothing about checkpoints is in here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

CONTEXT = 64
WIDTH = 64
HEADS = 4
HEAD_WIDTH = WIDTH // HEADS


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # As many heads as are here: with tensor parallelism each rank has some of them.
        query, key, value = (
            part(x).view(batch, length, -1, HEAD_WIDTH).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm_2(x)))))


class Transformer(nn.Module):
    def __init__(self, alphabet: int, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(alphabet, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, alphabet, bias=False)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.token(characters) + self.place(torch.arange(characters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text:
    """The text that comes with Everystep's demo, as numbers."""

    def __init__(self) -> None:
        text = Path(__file__).parent.joinpath("demo", "keepers-book.txt").read_text("utf-8")
        self.alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(self.alphabet)}
        self._characters = torch.tensor([index[character] for character in text])

    def batch(self, step: int, rank: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        """What a rank trains on in a step. It follows from both, so there is no position to be saved."""
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        starts = torch.randint(len(self._characters) - CONTEXT, (size, 1), generator=generator)
        windows = self._characters[starts + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
