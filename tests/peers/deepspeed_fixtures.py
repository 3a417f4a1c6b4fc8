"""Makes the fixtures of `tests/universal/fixtures/deepspeed_variants` from runs of `test_deepspeed.py`.

    .venv/bin/python tests/peers/deepspeed_fixtures.py RUNS

RUNS is the directory that the tests leave (``pytest -m peers tests/peers/test_deepspeed.py --basetemp DIR``).
The scripts that DeepSpeed puts beside a checkpoint are left out: fixtures have no code.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

CHOSEN = ("bf16_optimizer", "z1_fp16", "z2_round_robin", "tp_dp_bf16", "pp_tp", "moe_z2")
FIXTURES = Path(__file__).parents[1] / "universal" / "fixtures" / "deepspeed_variants"
EXPERTS_OF_A_RANK, EXPERT_PARALLEL = 2, 2


def truth_of(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What DeepSpeed says of each parameter: its tools where they are right, else the memory of ranks."""
    truth = torch.load(run / "truth.pt", weights_only=False)
    if run.name == "z2_round_robin":  # `ds_to_universal` goes by wrong mappings
        return {name: {"fp32": value} for name, value in truth["fp32"].items()}
    if run.name != "moe_z2":
        return dict(truth["universal"])
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(run.glob("live_*.pt")):
        live = torch.load(path)
        for name, states in live["pieces"].items():
            shape = live["weights"][name].shape
            known = global_name(name, int(path.stem.removeprefix("live_")))
            for state, (start, piece) in states.items():
                whole = found.setdefault(known, {}).setdefault(state, torch.full(shape, torch.nan))
                whole.view(-1)[start : start + piece.numel()] = piece
    return found


def global_name(name: str, rank: int) -> str:
    parts = name.split(".")
    if "deepspeed_experts" in parts:
        place = parts.index("deepspeed_experts") + 1
        parts[place] = str(int(parts[place]) + rank % EXPERT_PARALLEL * EXPERTS_OF_A_RANK)
    return ".".join(parts)


def main(runs: Path) -> None:
    for name in CHOSEN:
        target = FIXTURES / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(
            runs / name,
            target,
            ignore=shutil.ignore_patterns("*.py", "live_*", "truth.pt", "latest_universal"),
        )
        truth = {
            parameter: {state: value.clone() for state, value in states.items()}
            for parameter, states in truth_of(runs / name).items()
        }
        torch.save(truth, target / "truth.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
