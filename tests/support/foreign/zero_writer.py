"""Writes a ZeRO-3 checkpoint of any size in the form of DeepSpeed's files, without DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import torch


def write_zero3(path: Path, whole: dict[str, torch.Tensor], ranks: int, step: int = 5) -> Path:
    """Each parameter is cut into equal pieces, the last one padded; moments are multiples of the weight."""
    folder = path / f"global_step{step}"
    folder.mkdir(parents=True)
    for rank in range(ranks):
        pieces = []
        for tensor in whole.values():
            part = -(-tensor.numel() // ranks)
            piece = tensor.flatten()[rank * part : (rank + 1) * part]
            pieces.append(torch.nn.functional.pad(piece, (0, part - len(piece))))
        flat = torch.cat(pieces)
        model = {
            "module": {name: torch.empty(0) for name in whole},
            "buffer_names": [],
            "param_shapes": [{name: tensor.shape for name, tensor in whole.items()}],
            "frozen_param_shapes": None,
            "shared_params": {},
            "frozen_param_fragments": None,
            "lr_scheduler": None,
            "global_steps": step,
            "global_samples": 2 * step,
            "skipped_steps": 0,
            "dp_world_size": ranks,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": "0.19.8",
        }
        moments = {"step": torch.tensor(float(step)), "exp_avg": 2 * flat, "exp_avg_sq": 3 * flat}
        optimizer = {
            "zero_stage": 3,
            "fp32_flat_groups": [flat],
            "optimizer_state_dict": {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        }
        place = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save(model, folder / f"{place}_model_states.pt")
        content = {"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(content, folder / f"{place}_optim_states.pt")
    (path / "latest").write_text(folder.name)
    return path
