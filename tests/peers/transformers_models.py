"""Runs in the environment of transformers: writes tiny models as its tools do, and opens what we wrote.

python transformers_models.py write FOLDER
python transformers_models.py check FOLDER < {"model": ["directory", ...]}
python transformers_models.py resume MODEL FOLDER CHECKPOINT...
python transformers_models.py families
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

GPT2 = {
    "n_embd": 16,
    "n_layer": 11,
    "n_head": 2,
    "n_positions": 16,
    "vocab_size": 40,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 16,
}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2-untied": lambda: transformers.GPT2Config(**GPT2, tie_word_embeddings=False),
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "llama-tied": lambda: transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
}
# Types whose order of parameters our table claims to know.
ORDERED = """
gpt2 llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi3 olmo olmo2 granite cohere smollm3 stablelm
gptj gpt_neo codegen gpt_neox opt distilbert
"""


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def clones(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def batches() -> list[dict[str, torch.Tensor]]:
    words = torch.arange(8 * 6).reshape(8, 6) % 40
    return [{"input_ids": row, "labels": row} for row in words]


def write(folder: Path) -> None:
    for name in CONFIGS:
        model, place = make(name), folder / name
        model.save_pretrained(place / "hf")
        model.save_pretrained(place / "sharded", max_shard_size="10KB")
        model.save_pretrained(place / "variant", variant="fp16")
        state = model.state_dict()
        (place / "bin").mkdir()
        model.config.save_pretrained(place / "bin")
        torch.save(state, place / "bin" / "pytorch_model.bin")
        torch.save(state, place / "state.pt")
        torch.save({f"module._orig_mod.{key}": value for key, value in state.items()}, place / "wrapped.pt")
        torch.save(clones(state), place / "truth.pt")
        train(make(name), place)
        lightning(make(name), place)


def train(model: torch.nn.Module, place: Path) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=str(place / "trainer"),
        max_steps=2,
        save_steps=2,
        per_device_train_batch_size=4,
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=batches())
    trainer.train()
    torch.save(clones(model.state_dict()), place / "trainer-truth.pt")


def lightning(model: torch.nn.Module, place: Path) -> None:
    trainer, _ = fitted(model, place, steps=2)
    trainer.save_checkpoint(place / "lightning.ckpt")
    torch.save(clones(model.state_dict()), place / "lightning-truth.pt")


def fitted(model: torch.nn.Module, place: Path, steps: int, resume: Path | None = None) -> tuple[Any, Any]:
    """A trainer of Lightning and its module, trained up to a step."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> object:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    module = Module()
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(place),
    )
    loader = torch.utils.data.DataLoader(batches(), batch_size=4)
    trainer.fit(module, loader, ckpt_path=None if resume is None else str(resume))
    return trainer, module


def resume(name: str, place: Path, *files: Path) -> None:
    """Goes on from checkpoints of Lightning, and compares how that ends bit by bit."""
    ends = []
    for file in files:
        trainer, module = fitted(make(name), place, steps=4, resume=file)
        ends.append((clones(module.state_dict()), trainer.optimizers[0].state_dict(), trainer.global_step))
    for weights, optimizer, step in ends[1:]:
        assert step == ends[0][2] == 4
        assert all(torch.equal(weights[key], tensor) for key, tensor in ends[0][0].items())
        for number, entries in ends[0][1]["state"].items():
            for key, tensor in entries.items():
                assert torch.equal(optimizer["state"][number][key], tensor), (number, key)
    print("resumed", len(ends))


def check(wanted: list[dict[str, str]]) -> None:
    """Opens directories, and compares them with the truth bit by bit."""
    for one in wanted:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            one["path"], output_loading_info=True, dtype=one.get("dtype", "auto")
        )
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not info[key], (one, key, info[key])
        truth = torch.load(one["truth"], weights_only=True)
        state = model.state_dict()
        assert state.keys() == truth.keys(), one
        for name, tensor in truth.items():
            expected = tensor.to(state[name].dtype)
            assert torch.equal(state[name], expected), (one, name)
        if "dtype" in one:
            assert all(str(tensor.dtype) == f"torch.{one['dtype']}" for tensor in state.values()), one
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert (embedding.data_ptr() == head.data_ptr()) == model.config.tie_word_embeddings, one
        print("opened", one["path"])


def families() -> None:
    """The names of parameters in the order of the model, and where its base lies."""
    found = {}
    for kind in ORDERED.split():
        config = transformers.AutoConfig.for_model(kind)
        for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if hasattr(config, key):
                setattr(config, key, 11 if kind == "gpt_neo" else 12)
        if kind == "gpt_neo":
            config.num_layers, config.attention_types = 12, [[["global", "local"], 6]]
            config.attention_layers = config.expand_attention_types_params(config.attention_types)
        causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
        auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
        with torch.device("meta"):
            model = auto.from_config(config)
        found[kind] = {
            "base": model.base_model_prefix,
        }
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    elif sys.argv[1] == "check":
        check(json.loads(Path(sys.argv[2]).read_text()))
    elif sys.argv[1] == "resume":
        resume(sys.argv[2], *map(Path, sys.argv[3:]))
    else:
        families()
