"""``everystep bench --convert``: conversions of DeepSpeed checkpoints, beside DeepSpeed's own converter.

DeepSpeed runs in an environment of its own (``make peers``) and makes the checkpoints with a step of training
on two ranks. Both converters run as commands, from the start of the interpreter to its end, after the page
cache has been emptied of the source. Everystep's result is durable; DeepSpeed's is not synced.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from everystep import inspect
from everystep_study.harness import results
from everystep_study.harness.files import files_below
from everystep_study.harness.results import GB, MIB, SECONDS, Bar, Result, Row, exactly, judge, promised
from everystep_study.harness.suite import Case, Group, Needs, Suite, Turn
from everystep_study.report.elements import TIMES, Columns, View

DEEPSPEED = Path("build/peers/deepspeed/bin/python")
RANKS_BEFORE, RANKS_AFTER = 2, 3
SHAPES = {16: (384, 4), 67: (768, 7), 268: (1280, 12)}
"""Width and layers of the model with so many millions of parameters."""
LINEAR = 1.25
"""A byte of the largest checkpoint may take so many times as long as one of the next smaller."""
_SECONDS = 1800.0
_PROGRAMS = Path(__file__).parents[1] / "programs"


class Command(Case):
    """One converter on one checkpoint. `section` is what its row is compared in."""

    titles: ClassVar[dict[str, str]] = {
        "everystep": "everystep convert",
        "everystep-universal": "everystep convert --to ds-universal",
        "deepspeed": "ds_to_universal",
    }

    def __init__(self, key: str, kind: str, source: Path, python: Path, section: str = "convert") -> None:
        self.key = key if section == "convert" else source.name
        self.title = self.titles[key] if section == "convert" else f"{source.name} M parameters"
        self.sections = (section,)
        self._kind, self._source, self._python = key, source, python
        self._stage = kind
        self._bare_nbytes = 0.0
        self._written = Path()

    def setup(self, directory: Path) -> None:
        program = "print(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])"
        self._bare_nbytes = 1024 * float(_run([self._interpreter, "-c", program], directory))
        self._bytecode = directory / "bytecode"

    def measure(self, turn: Turn) -> None:
        turn.empty_cache(files_below(self._source))
        self._written = turn.directory / "converted"
        said, cost = turn.time(lambda: _run(self._command(), self._bytecode))
        inside = msgspec.json.decode(said.strip().splitlines()[-1], type=dict[str, float])
        readings = {SECONDS: cost[SECONDS], **inside}
        readings["process_nbytes"] -= self._bare_nbytes
        readings["kept_nbytes"] = float(sum(file.stat().st_size for file in files_below(self._written)))
        readings["source_nbytes"] = float(sum(file.stat().st_size for file in files_below(self._source)))
        turn.record(self.sections[0], readings)

    def check(self) -> None:
        if self._kind == "everystep" and not inspect.compare(self._source, self._written).equal:
            raise RuntimeError("the converted checkpoint differs from its source")
        if self._kind != "everystep" and not any(self._written.glob("zero/*/fp32.pt")):
            raise RuntimeError(f"there are no parameters in {self._written}")

    @property
    def _interpreter(self) -> str:
        return str(self._python) if self._kind == "deepspeed" else sys.executable

    def _command(self) -> list[str]:
        timed = [self._interpreter, str(_PROGRAMS / "timed_command.py")]
        if self._kind == "deepspeed":
            timed += ["deepspeed.checkpoint.ds_to_universal", "main"]
            timed += ["--input_folder", str(self._source / "global_step1")]
            # What a plain model's checkpoint of ZeRO-1 and 2 lacks; ZeRO-3 does without.
            inject = ["--inject_missing_state"] if self._stage != "3" else []
            return [*timed, "--output_folder", str(self._written), *inject]
        to = ["--to", "ds-universal"] if self._kind == "everystep-universal" else []
        return [*timed, "everystep.cli.app", "run", "convert", str(self._source), str(self._written), *to]


class Restore(Case):
    """Ranks of another world size fill their shards; the clock runs inside of them."""

    sections = ("restore",)

    def __init__(self, key: str, source: Path) -> None:
        self.key = key
        self.title = "straight" if key == "everystep" else "convert first, load then"
        self._source = source

    def measure(self, turn: Turn) -> None:
        turn.empty_cache(files_below(self._source))
        answer = turn.directory / "seconds"
        arguments = [str(_PROGRAMS / "restoring_rank.py"), str(self._source), str(answer)]
        if self.key != "everystep":
            arguments.append(str(turn.directory / "converted"))
        turn.time(lambda: _run(_ranks(Path(sys.executable), RANKS_AFTER, arguments), turn.directory))
        turn.record("restore", {SECONDS: float(answer.read_text())})


@dataclass
class ConvertSuite(Suite):
    """`sizes` are millions of parameters; those before the last are compared with DeepSpeed's converter."""

    name = "converting"
    ours = ("everystep", "everystep-universal")
    rounds: int = 5
    python: Path = DEEPSPEED
    compared: int = 67
    sizes: tuple[int, ...] = (16, 67, 268)

    @classmethod
    def quick(cls) -> ConvertSuite:
        return cls(rounds=3, compared=16, sizes=(16, 67))

    def needs(self) -> Needs:
        if not self.python.exists():
            raise RuntimeError(
                f"there is no {self.python}: `make peers` builds an environment with DeepSpeed, and "
                "--deepspeed names the Python of another one"
            )
        largest = max(self.compared, *self.sizes)
        # On disk: all sources (16 bytes a parameter at most), and the largest result. In memory: what the
        # training of the largest needs on two ranks.
        return Needs(
            1_000_000 * 16 * (2 * self.compared + sum(self.sizes) + largest), 1_000_000 * 40 * largest
        )

    def groups(self, folder: Path) -> Iterator[Group]:
        python = self.python.absolute()
        for stage in ("1", "3"):
            source = self._make(folder, python, stage, self.compared)
            kinds = list(Command.titles)
            cases = [Command(kind, stage, source, python) for kind in kinds]
            yield Group(f"ZeRO-{stage}", cases, self.rounds)
        yield Group("restore", [Restore(key, source) for key in ("everystep", "converted")], self.rounds)
        sources = [self._make(folder, python, "3", size) for size in self.sizes]
        sized = [Command("everystep", "3", source, python, "sizes") for source in sources]
        yield Group("sizes", sized, self.rounds)

    def _make(self, folder: Path, python: Path, stage: str, millions: int) -> Path:
        directory = folder / f"zero{stage}" / str(millions)
        if not directory.exists():
            numbers = [stage, *map(str, SHAPES[millions])]
            _run(
                _ranks(python, RANKS_BEFORE, [str(_PROGRAMS / "zero_writer.py"), str(directory), *numbers]),
                folder,
            )
        return directory

    def subject(self) -> str:
        return f"checkpoints of DeepSpeed, {self.compared} M parameters, FP32, AdamW, {RANKS_BEFORE} ranks"

    def views(self, result: Result) -> list[View]:
        columns: Columns = {
            "inside s": lambda row: row.median("inside_seconds"),
            "written GB": lambda row: row.median("written_nbytes", 1 / GB),
            "kept GB": lambda row: row.median("kept_nbytes", 1 / GB),
            "peak MiB": lambda row: f"{(row.peak('process_nbytes') or 0) / MIB:,.0f}",
            f"{TIMES}deepspeed": lambda row: results.faster(row, result.beside(row, "deepspeed")),
        }
        per_gb: Columns = {
            "inside s": lambda row: row.median("inside_seconds"),
            "GB": lambda row: row.median("source_nbytes", 1 / GB),
            "inside s/GB": _seconds_per_gb,
            "peak MiB": lambda row: f"{(row.peak('process_nbytes') or 0) / MIB:,.0f}",
        }
        return [
            View(
                "convert",
                f"convert a checkpoint, {result.page_cache}",
                columns=columns,
                ours=self.ours,
                named_by=lambda row: f"{row.group}: {row.title}",
            ),
            View("restore", f"ZeRO-3 of {RANKS_BEFORE} ranks into the shards of {RANKS_AFTER}"),
            View("sizes", "ZeRO-3 to Everystep, by size", columns=per_gb, ours=()),
        ]

    def notes(self, result: Result) -> list[str]:
        return [
            "Seconds are those of the whole command, 'inside' without the start of the interpreter and its "
            "imports. 'written' is what the process and its children sent to storage, 'kept' what is there "
            "at the end, 'peak' the resident memory of its largest process above that of a bare "
            "interpreter. Everystep's results are synced, checksummed and appear at once; ds_to_universal "
            "syncs nothing, so the disk may still be busy with its bytes when it ends."
        ]

    def bars(self, result: Result) -> list[Bar]:
        found: list[Bar] = []
        converters = (("everystep", 4.0, "Everystep"), ("everystep-universal", 2.0, "its own layout"))
        for group in ("ZeRO-1", "ZeRO-3"):
            theirs = result.row("convert", "deepspeed", group)
            for case, limit, to in converters:
                ours = result.row("convert", case, group)
                promise = f"{group} to {to}, against ds_to_universal"
                found.append(promised(f"{group}-{case}", promise, ">=", limit, theirs, ours))
            found.append(_written_once(result, group))
        rows = [*result.section("convert"), *result.section("sizes")]
        peaks = [
            peak / MIB for row in rows if row.case != "deepspeed" and (peak := row.peak("process_nbytes"))
        ]
        promise = "peak memory of any conversion, above the interpreter"
        found.append(judge("memory", promise, "<=", 512.0, "MiB", exactly(max(peaks, default=None))))
        straight, after = result.row("restore", "everystep"), result.row("restore", "converted")
        promise = "restore straight into another world size, against converting first"
        found.append(promised("restore", promise, "<=", 1.0, straight, after))
        small, large = (result.row("sizes", str(size)) for size in sorted(self.sizes)[-2:])
        sizes = [(row and row.median("source_nbytes")) or 1.0 for row in (small, large)]
        promise = "time for a byte of the largest, against one of the next smaller"
        per_byte: Any = {"reading": "inside_seconds", "factor": sizes[0] / sizes[1]}
        return [*found, promised("linear", promise, "<=", LINEAR, large, small, **per_byte)]


def _written_once(result: Result, group: str) -> Bar:
    row = result.row("convert", "everystep", group)
    written = row.median("written_nbytes") if row else None
    kept = row.median("kept_nbytes") if row else None
    measured = exactly(written / kept if written and kept else None)
    return judge(f"{group}-once", f"{group}: bytes written, of those kept", "<=", 1.01, "x", measured)


def _seconds_per_gb(row: Row) -> float | None:
    seconds, nbytes = row.median("inside_seconds"), row.median("source_nbytes")
    return seconds / nbytes * GB if seconds and nbytes else None


def _ranks(python: Path, ranks: int, arguments: Sequence[str]) -> list[str]:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [str(python), *start, *arguments]


def _run(command: Sequence[str], bytecode: Path) -> str:
    """What a command printed. Both sides find compiled modules, as when they are installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    tools = os.path.dirname(command[0]) + os.pathsep + environment.get("PATH", "")
    environment |= {"DS_ACCELERATOR": "cpu", "PYTHONPYCACHEPREFIX": str(bytecode), "PATH": tools}
    if "torch.distributed.run" in command:
        environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:3])} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
