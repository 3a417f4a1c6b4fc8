"""The training program of the demo: a small character model, checkpointed after every step.

It runs as a process of its own, so that it can be killed without mercy, and reports to its parent with one
JSON message per line on standard output. It owns the model, the data and the loop; `demo` owns the story
(who is killed when, and what is compared).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch

TEXT = "data/keepers-book.txt"
CONTEXT = 64
BATCH = 16
WIDTH = 96
HEADS = 4
LAYERS = 3


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The model exists and the run has been looked into: training goes on after `completed` steps."""

    completed: int
    parameters: int


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """One optimizer step is done and its checkpoint is durable."""

    step: int
    loss: float
    save_seconds: float


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """All steps are done. The digest is taken from live memory, without any part of Holdfast."""

    step: int
    digest: str


Message = Started | Stepped | Finished


class Batches:
    """The data loader: draws random windows of the text, and knows how to go on where it stopped."""

    def __init__(self, text: str, seed: int) -> None:
        import torch

        self.alphabet = sorted(set(text))
        index = {character: place for place, character in enumerate(self.alphabet)}
        self._text = torch.tensor([index[character] for character in text])
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn = 0

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        starts = torch.randint(len(self._text) - CONTEXT, (BATCH, 1), generator=self._generator)
        windows = self._text[starts + torch.arange(CONTEXT + 1)]
        self._drawn += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = state["drawn"]
        self._generator.set_state(state["generator"])


class GlobalRandomness:
    """torch's global generator, which dropout draws from; without it a resumed run would go another way."""

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {"cpu": torch.get_rng_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        import torch

        torch.set_rng_state(state["cpu"])


def build_model(alphabet_size: int) -> torch.nn.ModuleDict:
    """The parts of a decoder-only transformer; output and input embedding share one weight."""
    from torch import nn

    block = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
    )
    token = nn.Embedding(alphabet_size, WIDTH)
    head = nn.Linear(WIDTH, alphabet_size, bias=False)
    nn.init.normal_(token.weight, std=0.02)
    head.weight = token.weight
    return nn.ModuleDict(
        {
            "token": token,
            "place": nn.Embedding(CONTEXT, WIDTH),
            "blocks": nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False),
            "head": head,
        }
    )


def loss_of(model: torch.nn.ModuleDict, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    import torch
    from torch import nn

    places = torch.arange(inputs.shape[1])
    mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
    hidden = model["blocks"](model["token"](inputs) + model["place"](places), mask=mask, is_causal=True)
    return nn.functional.cross_entropy(model["head"](hidden).flatten(0, 1), targets.flatten())


def digest_of(*state_dicts: Mapping[str, Any]) -> str:
    """SHA-256 over every tensor byte and every plain value, in order."""
    import torch

    total = hashlib.sha256()

    def feed(value: object) -> None:
        if isinstance(value, torch.Tensor):
            plain = value.detach().contiguous().flatten()
            total.update(f"{value.dtype}{tuple(value.shape)}".encode())
            total.update(plain.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                total.update(repr(key).encode())
                feed(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                feed(inner)
        else:
            total.update(repr(value).encode())

    feed(state_dicts)
    return total.hexdigest()


def train(run: Path, *, steps: int, seed: int, kill_at: int | None) -> None:
    """Trains up to `steps`, resuming whatever `run` holds; with `kill_at`, dies inside that step's save."""
    import torch

    import holdfast

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = Batches(resources.files("holdfast.study").joinpath(TEXT).read_text("utf-8"), seed)
    model = build_model(len(data.alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    randomness = GlobalRandomness()
    state = {"model": model, "optimizer": optimizer, "data": data, "rng": randomness}

    with holdfast.Checkpointer(run, state, mode="sync", keep=holdfast.Keep(last=3)) as checkpointer:
        completed = checkpointer.restore()
        report(Started(completed, sum(parameter.numel() for parameter in model.parameters())))
        for step in range(completed + 1, steps + 1):
            loss = loss_of(model, *data.draw())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step == kill_at:
                arm_kill()
            begin = time.perf_counter()
            checkpointer.save(step, metrics={"loss": loss.item()})
            report(Stepped(step, loss.item(), time.perf_counter() - begin))
    digest = digest_of(model.state_dict(), optimizer.state_dict(), data.state_dict(), randomness.state_dict())
    report(Finished(steps, digest))


def arm_kill() -> None:
    """From here on, the first attempt to sync a file ends this process with SIGKILL.

    By then the data has been written but not one byte of it is promised: the middle of a save.
    """
    from holdfast.engine import faults

    faults.install(faults.Fault("sync", 1, "kill"))


def report(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m holdfast.study.demo_train", description=train.__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=20240613)
    parser.add_argument("--kill-at", type=int)
    arguments = parser.parse_args()
    train(arguments.run, steps=arguments.steps, seed=arguments.seed, kill_at=arguments.kill_at)


if __name__ == "__main__":
    main()
