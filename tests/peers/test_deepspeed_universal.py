"""Real DeepSpeed loads the universal layout that we write: at other data-parallel degrees, in all stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from everystep import universal
from everystep.universal.deepspeed import source as deepspeed
from everystep.universal.deepspeed import universal_source as ds_universal
from everystep.universal.source import Source
from support.foreign.source_leaves import assert_same, by_name
from support.processes import peers

SCRIPT = Path(__file__).parent / "deepspeed_universal.py"
RUNS = {"z1": (1, "fp32"), "z2": (2, "bf16"), "z3": (3, "fp32")}
STAGES = (1, 2, 3)
pytestmark = [pytest.mark.peers, pytest.mark.timeout(1800)]


def run(jobs: list[dict[str, Any]], ranks: int) -> None:
    peers.run("deepspeed", SCRIPT, json.dumps(jobs), ranks=ranks, timeout=900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trainings on two ranks, each converted by us and by DeepSpeed's own tool."""
    made = tmp_path_factory.mktemp("universal")
    run(
        [
            {"do": "train", "out": str(made / "zero" / name), "stage": stage, "dtype": dtype}
            for name, (stage, dtype) in RUNS.items()
        ],
        ranks=2,
    )
    for name in RUNS:
        universal.convert(made / "zero" / name, made / "ours" / name, to="ds-universal", verify=True)
        peers.run(
            "deepspeed",
            *("-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
            *("--input_folder", made / "zero" / name / "global_step3"),
            *("--output_folder", made / "its" / name / "global_step3_universal"),
            *("--num_extract_workers", "1", "--num_merge_workers", "1"),
        )
    return made


def states(source: Source) -> dict[str, torch.Tensor]:
    """What the optimizer has, and the weights that it updates."""
    return {name: tensor for name, tensor in by_name(source).items() if name.startswith("optimizer.")}


def assert_same_training(one: Source, other: Source) -> None:
    left, right = states(one), states(other)
    assert set(left) == set(right)
    for name, tensor in left.items():
        assert_same(right[name].reshape(tensor.shape).to(tensor.dtype), tensor, name)
    for name in ("global_steps", "skipped_steps", "lr_scheduler.last_batch_iteration"):
        assert one.values[name] == other.values[name]


@pytest.mark.parametrize("name", RUNS)
def test_what_its_converter_writes_is_the_zero_checkpoint(folder: Path, name: str) -> None:
    zero = deepspeed.describe(folder / "zero" / name)
    its = ds_universal.describe(folder / "its" / name)
    left, right = by_name(zero), by_name(its)
    assert set(left) == set(right)
    for leaf, tensor in left.items():
        assert_same(right[leaf], tensor, leaf)
    assert dict(zero.values) == dict(its.values)


def test_a_tensor_parallel_run_goes_on_without(tmp_path: Path) -> None:
    case = {"name": "cut", "model": "cut", "tp": 2, "stage": 1, "dtype": "bf16"}
    peers.run("deepspeed", SCRIPT.with_name("deepspeed_training.py"), tmp_path, json.dumps([case]), ranks=2)
    for tp in (1, 2):
        universal.convert(tmp_path / "cut", tmp_path / f"ours{tp}", to="ds-universal", tp=tp, verify=True)
    peers.run(
        "deepspeed",
        *("-m", "deepspeed.checkpoint.ds_to_universal", "--no_strict"),
        *("--input_folder", tmp_path / "cut" / "global_step3"),
        *("--output_folder", tmp_path / "its" / "global_step3_universal"),
        *("--num_extract_workers", "1", "--num_merge_workers", "1"),
    )
    names = ["its", "ours1", "ours2"]
    common = {"do": "load_cut", "tp": 1, "dtype": "bf16"}
    places = {(name, stage): tmp_path / f"{name}-{stage}" for name in names for stage in (1, 2)}
    run(
        [
            {**common, "path": str(tmp_path / name), "out": str(out), "stage": stage}
            for (name, stage), out in places.items()
        ],
        ranks=2,
    )
    for (name, stage), out in places.items():
        if name != "its":
            assert_same_training(deepspeed.describe(places["its", stage]), deepspeed.describe(out))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_deepspeed_loads_ours_into_every_stage_and_goes_on_as_with_its_own(folder: Path, ranks: int) -> None:
    jobs = []
    for name, (stage, dtype) in RUNS.items():
        for into in STAGES:
            common = {"do": "load", "stage": into, "dtype": dtype}
            out = folder / f"loaded-{ranks}" / f"{name}-{into}"
            jobs.append({**common, "path": str(folder / "ours" / name), "out": str(out / "ours")})
            # Its own layout is for the stages of one kind only.
            if (stage == 3) == (into == 3):
                jobs.append({**common, "path": str(folder / "its" / name), "out": str(out / "its")})
    run(jobs, ranks)
    for job in jobs:
        out = Path(job["out"])
        zero = deepspeed.describe(folder / "zero" / out.parent.name.split("-")[0])
        loaded = deepspeed.describe(out / "loaded")
        assert_same_training(zero, loaded)
        assert loaded.values["note"] == "hello"
        assert loaded.values["nested.a"] == 1.5
        if out.name == "its":
            ours = deepspeed.describe(out.parent / "ours" / "continued")
            its = deepspeed.describe(out / "continued")
            assert_same_training(its, ours)
            assert ours.values["losses"] == its.values["losses"]
            assert ours.values["global_steps"] == 5
