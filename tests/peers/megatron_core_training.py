"""Trains a tiny GPT for one step with Megatron-Core on the CPU and saves it; runs in its environment.

    python -m torch.distributed.run --standalone --nproc-per-node N megatron_core_training.py OUT FORM TP

Writes ``OUT/iter_0000007``, and the truth beside it: ``OUT/whole.pt`` has all tensors as Megatron-Core itself
loads them, ``OUT/model.pt`` the state dict of the model, if it is not cut (TP is 1).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def pretend_to_have_a_device() -> None:
    """Megatron-Core asks CUDA for devices, types and synchronization; all tensors here are on the CPU."""
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    kind: Callable[..., Any] = torch.Tensor.type

    def device_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return kind(self, *args, **kwargs)
        return kind(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = device_type
    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, on_the_cpu(getattr(torch, name)))


def on_the_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        device = None if str(device).startswith("cuda") else device
        return make(*args, device=device, **kwargs)

    return made


def make_model(tp: int) -> tuple[Any, Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=12,
        gated_linear_unit=True,
        add_bias_linear=False,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=20,
        max_sequence_length=8,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return config, model.bfloat16()


def train(config: Any, model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, settings, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            weight_decay=0.1,
        ),
        [wrapped],
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in wrapped.parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step()
    return optimizer


def main(out: str, form: str, tp: int) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tp, 1)
    config, model = make_model(tp)
    optimizer = train(config, model)
    content = {"distrib_optim_sharding_type": form}
    weights = model.sharded_state_dict(metadata=content)
    state = {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, metadata=content),
        "iteration": 7,
        "checkpoint_version": 3.0,
        "args": {"num_layers": 2},
    }
    path = os.path.join(out, "iter_0000007")
    if dist.get_rank() == 0:
        os.makedirs(path)
        with open(os.path.join(out, "latest_checkpointed_iteration.txt"), "w", encoding="ascii") as file:
            file.write("7")
    dist.barrier()
    dist_checkpointing.save(state, path, content_metadata=content)
    whole = dist_checkpointing.load_plain_tensors(path)
    if dist.get_rank() == 0:
        torch.save(whole, os.path.join(out, "whole.pt"))
        if tp == 1:
            named = {name: value for name, value in model.state_dict().items() if value is not None}
            torch.save(named, os.path.join(out, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()
    for helper in multiprocessing.active_children():  # of the writer; they would keep this process waiting
        helper.terminate()
        helper.join()


if __name__ == "__main__":
    pretend_to_have_a_device()
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
