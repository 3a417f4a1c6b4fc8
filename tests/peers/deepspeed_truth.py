"""What DeepSpeed's own tools make of checkpoints: run in its environment.

    python deepspeed_truth.py RUN...

Leaves ``truth.pt`` in each run: ``fp32`` (`zero_to_fp32`), ``universal`` (`ds_to_universal`: by parameter,
then by state), and ``refused``: what a tool said that does not read this checkpoint. This file imports
nothing of everystep.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


def universal(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    tag = (run / "latest").read_text().strip()
    out = run / "universal"
    settings = argparse.Namespace(
        input_folder=str(run / tag),
        output_folder=str(out),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=False,
        inject_missing_state=True,
    )
    try:
        ds_to_universal.main(settings)
        found: dict[str, dict[str, torch.Tensor]] = {}
        for path in sorted((out / "zero").rglob("*.pt")):
            name = path.parent.relative_to(out / "zero").as_posix()
            if name != ".":
                entry = torch.load(path, weights_only=False)
                value = entry["param"] if isinstance(entry, dict) else entry
                found.setdefault(name, {})[path.stem] = torch.as_tensor(value).clone()
        return found
    finally:
        shutil.rmtree(out, ignore_errors=True)
        (run / "latest_universal").unlink(missing_ok=True)


def main(runs: list[str]) -> None:
    for run in map(Path, runs):
        print("run", run.name, flush=True)
        truth: dict[str, Any] = {"fp32": {}, "universal": {}, "refused": {}}
        for name, make in (("fp32", get_fp32_state_dict_from_zero_checkpoint), ("universal", universal)):
            try:
                truth[name] = dict(make(run))
            except Exception as error:
                truth["refused"][name] = f"{type(error).__name__}: {error}"
                print("  refused:", name, truth["refused"][name])
        torch.save(truth, run / "truth.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
