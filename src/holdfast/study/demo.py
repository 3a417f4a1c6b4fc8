"""`holdfast demo`: train, die in the middle of a save, resume, and prove that nothing shows.

Owns the story: which training process runs when, what is compared, what is printed. The training itself is
`demo_train`, the small race against torch.save is `demo_speed`.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from holdfast.study.demo_speed import Race, race
from holdfast.study.demo_train import Finished, Message, Started, Stepped

# Far above what a run takes, far below what a person would wait for.
CHILD_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    directory: Path | None = (
        None  # where the runs are written; None: a temporary directory under the current one
    )
    steps: int = 30
    kill_at: int = 17
    race_nbytes: int = 256 << 20
    race_repeats: int = 5


@dataclass(frozen=True, slots=True)
class Training:
    """What one training process told before it ended."""

    exit_code: int
    seconds: float
    started: Started | None
    steps: tuple[Stepped, ...]
    finished: Finished | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The last checkpoints of two runs, held against each other bit by bit."""

    leaves: int
    nbytes: int
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DemoReport:
    equal: bool
    killed_at: int
    resumed_after: int
    comparison: Comparison
    digest_resumed: str
    digest_straight: str
    race: Race | None
    seconds: float
    problems: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, object]:
        """The same as plain data, with the ratios a reader would otherwise have to work out."""
        plain: dict[str, object] = asdict(self)
        if self.race is not None:
            plain["race"] = {
                **asdict(self.race),
                "save_ratio": self.race.save_ratio,
                "load_ratio": self.race.load_ratio,
            }
        return plain


class DemoFailed(Exception):
    """A training process did not do what the story needs; the message has the end of its output."""


def main(options: DemoOptions | None = None, *, console: Console | None = None, as_json: bool = False) -> int:
    """Runs the demo and prints it. 0: the two runs are equal; 1: they are not, or something failed."""
    options = options or DemoOptions()
    console = console or Console(stderr=as_json)
    if importlib.util.find_spec("torch") is None:
        console.print("The demo trains with torch, which is not installed: pip install 'holdfast[torch]'")
        return 1
    try:
        report = tell(options, console)
    except DemoFailed as failure:
        # A traceback is full of square brackets, which must not be taken for markup.
        console.print(
            f"[bold red]The demo failed.[/] {escape(str(failure))}", highlight=False, soft_wrap=True
        )
        return 1
    if as_json:
        print(msgspec.json.encode(report.to_json()).decode())
    return 0 if report.equal else 1


def tell(options: DemoOptions, console: Console) -> DemoReport:
    """The story, in order. Everything it writes is gone when it ends, unless a directory was given."""
    begin = time.monotonic()
    say = _sayer(console)
    with ExitStack() as stack:
        directory = options.directory
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="holdfast-demo-", dir=Path.cwd())
            directory = Path(stack.enter_context(temporary))
        directory.mkdir(parents=True, exist_ok=True)
        interrupted, straight = directory / "interrupted", directory / "straight"
        _require_unused(interrupted, straight)

        say(f"1. Train a small transformer for {options.steps} steps, a durable checkpoint after every step.")
        say(f"   In the save of step {options.kill_at}, SIGKILL: no handler, no goodbye.")
        first = _train(interrupted, options, console, kill_at=options.kill_at)
        last_durable = _require_killed(first, options.kill_at)
        assert first.started is not None
        say(f"   {first.started.parameters:,} parameters. The process died inside the save.")
        say(f"   Last checkpoint it reported durable: step {last_durable}. Left in the run directory:")
        for name in _listing(interrupted):
            say(f"     {name}")

        say("2. Start the same program again. It finds the newest whole checkpoint by itself.")
        second = _train(interrupted, options, console)
        started, finished = _require_finished(second)
        say(f"   Resumed after step {started.completed}, went on to step {finished.step}.")

        say("3. Train once more from the start, undisturbed, and compare.")
        third = _train(straight, options, console)
        _, undisturbed = _require_finished(third)
        problems = _problems(options, last_durable, first, second, third)
        comparison = compare(interrupted, straight, options.steps)
        if comparison.differing:
            problems.append(f"leaves differ: {', '.join(comparison.differing[:5])}")
        _say_verdict(say, comparison, second, third, problems)

        result: Race | None = None
        if options.race_repeats > 0:
            say(f"4. Speed: {options.race_nbytes >> 20} MiB, {options.race_repeats} times each, in turns.")
            with console.status("saving and loading"):
                result = race(directory, nbytes=options.race_nbytes, repeats=options.race_repeats)
            console.print(_speed_table(result))
    seconds = time.monotonic() - begin
    say(f"Done in {seconds:.0f} s.")
    return DemoReport(
        equal=not problems,
        killed_at=options.kill_at,
        resumed_after=started.completed,
        comparison=comparison,
        digest_resumed=finished.digest,
        digest_straight=undisturbed.digest,
        race=result,
        seconds=seconds,
        problems=tuple(problems),
    )


def compare(a: Path, b: Path, step: int) -> Comparison:
    """Reads the checkpoint of `step` from both runs and compares every leaf's bits and every value."""
    import holdfast

    with holdfast.open(_checkpoint(a, step)) as left, holdfast.open(_checkpoint(b, step)) as right:
        differing = sorted(left.leaves.keys() ^ right.leaves.keys())
        nbytes = 0
        for name in left.leaves.keys() & right.leaves.keys():
            mine, other = _bits(left.read(name)[name]), _bits(right.read(name)[name])
            nbytes += len(mine)
            if left.leaves[name] != right.leaves[name] or mine != other:
                differing.append(name)
        if left.values != right.values:
            differing.append("(values)")
        return Comparison(len(left.leaves), nbytes, tuple(differing))


def _bits(array: object) -> bytes:
    import torch

    assert isinstance(array, torch.Tensor)
    plain: bytes = array.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return plain


def _checkpoint(run: Path, step: int) -> Path:
    return run / f"step-{step:012d}"


def _listing(run: Path) -> list[str]:
    """The run's directories, and of an unfinished one how much of it was written."""
    lines = []
    for entry in sorted(run.glob("step-*")):
        note = ""
        if entry.suffix == ".partial":
            written = sum(file.stat().st_size for file in entry.iterdir())
            note = f"   {written:,} bytes, never committed: not a checkpoint"
        lines.append(entry.name + note)
    return lines


def _train(run: Path, options: DemoOptions, console: Console, *, kill_at: int | None = None) -> Training:
    """One training process, from start to its end, with a bar that follows its messages."""
    command = [sys.executable, "-m", "holdfast.study.demo_train", str(run), "--steps", str(options.steps)]
    if kill_at is not None:
        command += ["--kill-at", str(kill_at)]
    begin = time.monotonic()
    bar = Progress(
        TextColumn("   {task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    started: Started | None = None
    finished: Finished | None = None
    steps: list[Stepped] = []
    decoder = msgspec.json.Decoder(Message)
    with (
        tempfile.TemporaryFile() as errors,
        bar,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as child,
    ):
        overdue = threading.Timer(CHILD_SECONDS, child.kill)
        overdue.start()
        task = bar.add_task("starting", total=options.steps, loss="-")
        try:
            assert child.stdout is not None
            for line in child.stdout:
                match decoder.decode(line):
                    case Started() as started:
                        bar.update(task, description="training", completed=started.completed)
                    case Stepped() as stepped:
                        steps.append(stepped)
                        bar.update(task, completed=stepped.step, loss=f"{stepped.loss:.3f}")
                    case Finished() as finished:
                        pass
            exit_code = child.wait()
        finally:
            overdue.cancel()
            child.kill()
        errors.seek(0)
        complaint = errors.read().decode(errors="replace").strip()
    if exit_code not in (0, -signal.SIGKILL):
        raise DemoFailed(f"Training ended with exit code {exit_code}:\n{complaint[-4000:]}")
    return Training(exit_code, time.monotonic() - begin, started, tuple(steps), finished)


def _require_unused(*runs: Path) -> None:
    """A training would go on where an earlier demo ended, and be done before it could be killed."""
    used = [str(run) for run in runs if run.is_dir() and any(run.iterdir())]
    if used:
        raise DemoFailed(
            f"There are runs of an earlier demo: {', '.join(used)}. Remove them, or name another directory."
        )


def _require_killed(training: Training, kill_at: int) -> int:
    """The last step reported durable before the kill."""
    last = training.steps[-1].step if training.steps else 0
    if training.exit_code != -signal.SIGKILL or last != kill_at - 1:
        raise DemoFailed(
            f"The process should have been killed in the save of step {kill_at}, but it ended with exit code "
            f"{training.exit_code} after step {last}."
        )
    return last


def _require_finished(training: Training) -> tuple[Started, Finished]:
    if training.exit_code != 0 or training.started is None or training.finished is None:
        raise DemoFailed(f"Training did not finish: exit code {training.exit_code} (-9: it took too long).")
    return training.started, training.finished


def _problems(
    options: DemoOptions, last_durable: int, first: Training, second: Training, third: Training
) -> list[str]:
    """What does not fit, in words; empty when the interruption left no trace."""
    problems = []
    assert second.started is not None
    # One step more is legal (the kill may fall after the commit), one step less is a broken promise.
    if second.started.completed not in (last_durable, last_durable + 1):
        problems.append(f"resumed after step {second.started.completed}, not {last_durable}")
    losses = {stepped.step: stepped.loss for stepped in third.steps}
    for stepped in (*first.steps, *second.steps):
        if losses[stepped.step] != stepped.loss:
            problems.append(f"loss of step {stepped.step}: {stepped.loss!r} and {losses[stepped.step]!r}")
            break
    if second.finished != third.finished:
        problems.append("the live states at the end have different digests")
    if {stepped.step for stepped in third.steps} != set(range(1, options.steps + 1)):
        problems.append("the undisturbed run did not take every step")
    return problems


def _say_verdict(
    say: Callable[[str], None],
    comparison: Comparison,
    second: Training,
    third: Training,
    problems: list[str],
) -> None:
    assert second.finished is not None
    assert third.finished is not None
    say(f"   SHA-256 of the live state at the end, resumed:     {second.finished.digest[:32]}...")
    say(f"   SHA-256 of the live state at the end, undisturbed: {third.finished.digest[:32]}...")
    if problems:
        for problem in problems:
            say(f"   [bold red]NOT EQUAL[/]: {escape(problem)}")
    else:
        say(
            f"   [bold green]Equal, bit for bit[/]: {comparison.leaves} leaves, {comparison.nbytes:,} bytes"
            " in the last checkpoints, and every loss on the way."
        )


def _speed_table(result: Race) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for title in ("save", "load"):
        table.add_column(f"{title} GB/s", justify="right")
    for speed in (result.holdfast, result.torch):
        table.add_row(
            f"   {speed.name}",
            f"{result.nbytes / speed.save_seconds / 1e9:.2f}",
            f"{result.nbytes / speed.load_seconds / 1e9:.2f}",
        )
    table.add_row("   holdfast is", f"{result.save_ratio:.1f} x", f"{result.load_ratio:.1f} x", style="bold")
    return table


def _sayer(console: Console) -> Callable[[str], None]:
    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    return say


if __name__ == "__main__":
    sys.exit(main())
