"""The demo: train, be killed in the middle of a save, resume, and prove that the result is the same.

    python examples/demo          (or: make demo)

`train` is the training, `race` the comparison with torch.save. Exit code 1 unless both trainings end equal.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from everystep import inspect

TRAIN = Path(__file__).with_name("train.py")
TIMEOUT_SECONDS = 300
RACE_NBYTES = 256 << 20


class DemoFailed(Exception):
    """A training did not do what the demo needs."""


@dataclass
class Training:
    """What one training process printed before it ended."""

    exit_code: int
    started_after: int = 0
    digest: str = ""
    losses: dict[int, float] = field(default_factory=dict)


def demo(directory: Path, steps: int, kill_at: int, repeats: int) -> bool:
    """The demo, in order. Whether the killed and the undisturbed training ended equal."""
    killed, undisturbed = directory / "killed", directory / "undisturbed"
    for run in (killed, undisturbed):
        if run.exists():
            raise DemoFailed(f"{run} exists: remove it, or name another directory")
    print(f"1. Train a small transformer for {steps} steps, with a durable checkpoint after every step.")
    print(f"   SIGKILL in the save of step {kill_at}.")
    first = train(killed, steps, kill_at)
    last = max(first.losses, default=0)
    if first.exit_code != -signal.SIGKILL or last != kill_at - 1:
        raise DemoFailed(
            f"the training should have been killed in the save of step {kill_at}, "
            f"but ended with exit code {first.exit_code} after step {last}"
        )
    print(f"   The process died inside the save. Last step it reported durable: {last}. In the run:")
    for entry in sorted(killed.glob("step-*")):
        print(f"     {entry.name}{'   not a checkpoint' if entry.suffix == '.partial' else ''}")

    print("2. Start the same program again. It finds the newest whole checkpoint by itself.")
    second = finished(train(killed, steps))
    print(f"   Resumed after step {second.started_after}, went on to step {steps}.")

    print("3. Train once more from the start, undisturbed, and compare.")
    third = finished(train(undisturbed, steps))
    found = inspect.compare(killed, undisturbed)
    problems = differences(found, last, first, second, third)
    print(f"   SHA-256 of the live state, resumed:     {second.digest[:32]}...")
    print(f"   SHA-256 of the live state, undisturbed: {third.digest[:32]}...")
    for problem in problems:
        print(f"   NOT EQUAL: {problem}")
    if not problems:
        print(f"   Equal, bit for bit: {found.identical} leaves, {found.a.nbytes:,} bytes, and every loss.")
    if repeats:
        show_speed(directory, repeats)
    return not problems


def train(run: Path, steps: int, kill_at: int | None = None) -> Training:
    """One training process, from its start to its end."""
    command = [sys.executable, str(TRAIN), str(run), "--steps", str(steps)]
    if kill_at is not None:
        command += ["--kill-at", str(kill_at)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if done.returncode not in (0, -signal.SIGKILL):
        raise DemoFailed(f"training ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    training = Training(done.returncode)
    for line in done.stdout.splitlines():
        facts = json.loads(line)
        training.started_after = facts.get("started_after", training.started_after)
        training.digest = facts.get("digest", training.digest)
        if "step" in facts:
            training.losses[facts["step"]] = facts["loss"]
    return training


def finished(training: Training) -> Training:
    if training.exit_code != 0:
        raise DemoFailed(f"training did not finish: exit code {training.exit_code}")
    return training


def differences(
    found: inspect.Difference, last: int, first: Training, second: Training, third: Training
) -> list[str]:
    """Everything that shows the interruption; empty if nothing does."""
    problems = [f"leaf {change.name}: {change.change}" for change in found.leaves]
    problems += [f"value {change.name}" for change in found.values]
    if found.structure:
        problems.append("the containers around leaves and values differ")
    if found.a.step != found.b.step:
        problems.append(f"the last checkpoints are of step {found.a.step} and {found.b.step}")
    # One step more is right, too: the kill may fall behind the commit.
    if second.started_after not in (last, last + 1):
        problems.append(f"resumed after step {second.started_after}, not {last}")
    if {**first.losses, **second.losses} != third.losses:
        problems.append("the losses differ")
    if second.digest != third.digest:
        problems.append("the live states at the end have different digests")
    return problems


def show_speed(directory: Path, repeats: int) -> None:
    from race import race

    print(f"4. Speed: {RACE_NBYTES >> 20} MiB, {repeats} times each, in turns, both durable.")
    seconds = race(directory, RACE_NBYTES, repeats)
    for name, (save, load) in seconds.items():
        rates = [RACE_NBYTES / spent / 1e9 for spent in (save, load)]
        print(f"   {name:12} save {rates[0]:5.2f} GB/s   load {rates[1]:5.2f} GB/s")
    (save, load), (their_save, their_load) = seconds["everystep"], seconds["torch.save"]
    print(f"   {'ratio':12} save {their_save / save:5.1f} x      load {their_load / load:5.1f} x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--dir", type=Path, help="keep the runs there; default: a temporary directory here")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill-at", type=int, default=17)
    parser.add_argument("--repeats", type=int, default=5, help="of the speed part; 0 leaves it out")
    options = parser.parse_args()
    try:
        if options.dir is not None:
            options.dir.mkdir(parents=True, exist_ok=True)
            return 0 if demo(options.dir, options.steps, options.kill_at, options.repeats) else 1
        with tempfile.TemporaryDirectory(prefix="everystep-demo-", dir=Path.cwd()) as directory:
            return 0 if demo(Path(directory), options.steps, options.kill_at, options.repeats) else 1
    except DemoFailed as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
