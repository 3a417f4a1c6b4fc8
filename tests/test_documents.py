"""The documents: their examples run, their links lead somewhere, and those for newcomers stay short."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from everystep.integrations.data import Loader

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)

TESTED_ELSEWHERE = {
    "docs/distributed.md": "tests/examples/test_distributed.py",
    "docs/format.md": "tests/format/test_doc_reader.py",
    "docs/shelf.md": "tests/shelf/test_documentation.py",
    "docs/sklearn.md": "tests/integrations/sklearn/test_documentation.py",
    "docs/universal.md": "tests/universal/test_documentation.py",
    "docs/universal-spec.md": "tests/universal/test_spec_documentation.py",
}
ONLY_COMPILED = {
    "docs/integrations.md": "needs the frameworks; the same calls run in tests/peers",
    "docs/randomness.md": "starts worker processes; the same loop runs in tests/integrations/data",
}


def blocks(name: str, language: str) -> list[str]:
    found = FENCE.findall((ROOT / name).read_text("utf-8"))
    return [text for _, kind, text in found if kind == language]


WITH_PYTHON = [name for name in NAMES if blocks(name, "python")]


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_every_example_compiles(name: str) -> None:
    assert all(ast.parse(block).body for block in blocks(name, "python"))


def small_training() -> dict[str, Any]:
    """What the examples take for granted: a model, an optimizer, data, and names for them."""
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return super().forward(x).square().mean()

    model = Model(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}

    def train_one_step() -> None:
        model(torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {
        "everystep": everystep,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "dataset": torch.ones(8, 4),
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loader": Loader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=2),
        "batches": iter(lambda: torch.ones(2, 4), None),
        "state": state,
        "train_one_step": train_one_step,
        "steps": 2,
        "weights": np.ones((30, 2)),
        "live_state": {"weights": np.zeros((30, 2)), "epoch": 0},
    }


def shortened(code: str) -> str:
    """The loops of the examples run for thousands of steps."""
    return re.sub(r"range\((ckpt\.restore\(\)|first), (10_000|2000)\)", r"range(\1, 3)", code)


def run_the_examples(name: str, names: dict[str, Any]) -> None:
    for number, block in enumerate(blocks(name, "python")):
        exec(compile(shortened(block), f"{name}, example {number}", "exec"), names)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save_a_run(names: dict[str, Any]) -> None:
    with everystep.Checkpointer("runs/lm", names["state"]) as ckpt:
        for step in range(ckpt.restore(), 2):
            names["train_one_step"]()
            ckpt.save(step + 1, metrics={"loss": 1.0})


@pytest.mark.parametrize(
    "name", ["README.md", "docs/getting-started.md", "docs/preemption.md", "docs/save_and_load.md"]
)
def test_the_examples_run(name: str, tmp_path: Path) -> None:
    run_the_examples(name, small_training())
    assert any(tmp_path.rglob("*.safetensors"))


class Killed(Exception):
    """In the place of a kill."""


def test_the_first_example_of_the_readme_resumes_exactly_with_shuffled_data_and_dropout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    example = compile(blocks("README.md", "python")[0], "README.md", "exec")

    class Model(torch.nn.Sequential):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return super().forward(x).square().mean()

    def train(seed: int, killed_at: int = 0) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = Model(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        steps = 0

        def count(*_: object) -> None:
            nonlocal steps
            steps += 1
            if steps == killed_at:
                raise Killed

        optimizer.register_step_post_hook(count)
        names = {"model": model, "optimizer": optimizer, "dataset": torch.arange(400.0).reshape(100, 4)}
        exec(example, names)
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": names["step"]}

    def place(name: str) -> None:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)

    place("undisturbed")
    expected = train(seed=0)
    place("killed")
    with pytest.raises(Killed):
        train(seed=0, killed_at=14)
    found = train(seed=1)
    everystep.save(tmp_path / "a", expected)
    everystep.save(tmp_path / "b", found)
    assert found["step"] == 40
    assert everystep.inspect.compare(tmp_path / "a", tmp_path / "b").equal


@pytest.mark.parametrize("name", ["docs/inspecting.md", "docs/weights.md", "docs/view.md"])
def test_the_examples_on_a_run_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = small_training()
    save_a_run(names)
    run_the_examples(name, names)
    assert capsys.readouterr().out


def test_the_examples_of_the_training_page_run() -> None:
    names = small_training()
    loop, wait, errors, schedules = blocks("docs/training.md", "python")
    exec(shortened(loop), names)
    with everystep.Checkpointer("runs/more", names["state"]) as ckpt:
        names |= {"ckpt": ckpt, "step": ckpt.restore()}
        exec(wait, names)
        assert names["info"].step == 1
        assert names["error"] is None
        names["step"] = 1
        exec(errors, names)
    made: list[everystep.Checkpointer] = []

    def checkpointer(run: str, *arguments: Any, **settings: Any) -> None:
        made.append(everystep.Checkpointer(f"{run}-{len(made)}", *arguments, **settings))
        names["ckpt"] = made[-1]

    exec(schedules, names | {"Checkpointer": checkpointer, "run": "runs/schedule"})
    assert len(made) == 5
    for one in made:
        one.close()


@pytest.mark.filterwarnings("ignore:the state holds no optimizer")
def test_the_example_of_a_program_that_returns_a_new_state_runs() -> None:
    names: dict[str, Any] = {
        "everystep": everystep,
        "state": (np.zeros(3), 0),
        "train_step": lambda state: (state[0] + 1, state[1] + 1),
    }
    run_the_examples("docs/overlap.md", names)
    weights, steps = everystep.load("runs/x")
    assert (weights.tolist(), steps) == ([3.0] * 3, 3)


def test_the_example_of_the_page_on_disk_space_runs() -> None:
    names = small_training() | {"Checkpointer": everystep.Checkpointer}
    run_the_examples("docs/disk-space.md", names)
    assert Path("runs/lm").is_dir()


@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_dcp_run() -> None:
    names = small_training()
    import torch.distributed.checkpoint as dcp

    names |= {"state": {"weight": names["torch"].ones(4)}, "path": "runs/y/step-000000000001"}
    dcp.save(names["state"], checkpoint_id="old/step-100")
    one_way, more, failures, other_way = blocks("docs/dcp.md", "python")
    exec(one_way, names)
    names["future"].result()
    for block in (more, failures, other_way):
        exec(block, names)
    assert sorted(path.name for path in Path("runs/x").glob("step-*")) == [
        "step-000000000100",
        "step-000000000200",
        "step-000000000300",
    ]


def test_no_page_with_examples_is_forgotten() -> None:
    here = Path(__file__).read_text("utf-8")
    for name in WITH_PYTHON:
        assert name in TESTED_ELSEWHERE or name in ONLY_COMPILED or f'"{name}"' in here, name
    for name, test in TESTED_ELSEWHERE.items():
        assert name.rpartition("/")[2] in (ROOT / test).read_text("utf-8")


@pytest.mark.parametrize(("exit_code", "requeued"), [(0, False), (75, True), (1, False)])
def test_the_slurm_script_queues_a_preempted_job_again(
    tmp_path: Path, exit_code: int, requeued: bool
) -> None:
    (script,) = blocks("docs/preemption.md", "bash")
    for name, text in (("srun", f"exit {exit_code}"), ("scontrol", 'echo "$@" > requeued')):
        command = tmp_path / name
        command.write_text(f"#!/bin/bash\n{text}\n")
        command.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, check=False)
    assert done.returncode == exit_code
    written = tmp_path / "requeued"
    assert (written.read_text() if written.exists() else None) == ("requeue 7\n" if requeued else None)


# Links

LINK = re.compile(r"(?<!!)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """As GitHub and the site make them of headings."""
    text = FENCE.sub("", page.read_text("utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    for groups in LINK.findall(text):
        link = groups[0] or groups[1]
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}"


LIMITS = [("README.md", 700), ("docs/training.md", 1200), ("ARCHITECTURE.md", 2500), ("CHANGELOG.md", 700)]


@pytest.mark.parametrize(("name", "limit"), LIMITS)
def test_a_newcomer_reads_the_first_pages_quickly(name: str, limit: int) -> None:
    assert len((ROOT / name).read_text("utf-8").split()) <= limit


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/internals.md"])
def test_files_and_modules_that_are_named_exist(name: str) -> None:
    text = FENCE.sub("", (ROOT / name).read_text("utf-8"))
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_0-9.]+)+)`", text))
    found = {path for path in named if not path.startswith(("build/", "run/"))}
    assert found
    bases = (ROOT, ROOT / "src/everystep", ROOT / "study/src")
    for path in sorted(found):
        names = (path, path.replace("study/", "everystep_study/"))
        places = (base / f"{one}{end}" for one in names for base in bases for end in ("", ".py"))
        assert any(place.exists() for place in places), f"{name} names {path}"
