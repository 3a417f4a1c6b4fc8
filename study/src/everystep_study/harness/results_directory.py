"""The directory of a study: one file of JSON lines, appended to as parts of the study end.

The first line is a `Header`, every other one an `Entry`: one suite, framework and model with its raw
repetitions. A line that was cut off by a crash is dropped, and its part measured again. Of two entries for
the same part the later counts.
"""

from __future__ import annotations

import fcntl
import os
import warnings
from pathlib import Path
from typing import BinaryIO

import msgspec

from everystep import EverystepError
from everystep_study.harness.results import Machine, Result

FORMAT = "everystep-study/1"
FILE = "results.jsonl"


class StudyError(EverystepError, ValueError):
    """A results directory that cannot be used; the message says why and what to do."""


class Part(msgspec.Struct, frozen=True):
    """What is measured in one go, and skipped when a study is continued."""

    suite: str
    framework: str
    model: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.suite, self.framework, self.model)))


class Header(msgspec.Struct, frozen=True):
    created: float
    quick: bool
    seed: int
    everystep: str
    machine: Machine
    format: str = FORMAT


class Entry(msgspec.Struct, frozen=True):
    """`versions` are those in the framework's own environment."""

    part: Part
    versions: dict[str, str]
    result: Result

    @property
    def missing(self) -> bool:
        """Whether the framework was not installed: then it is tried again."""
        rows = self.result.rows
        return bool(rows) and all(row.status == "not installed" for row in rows)


class ResultsDirectory:
    """Opened for reading with `read`, or for measuring with `open`, which locks it."""

    def __init__(self, path: Path, header: Header, entries: dict[Part, Entry], file: BinaryIO | None) -> None:
        self.path, self.header, self._entries, self._file = path, header, entries, file

    @classmethod
    def read(cls, path: Path) -> ResultsDirectory:
        file = path / FILE
        if not file.is_file():
            raise StudyError(
                f"{path} has no {FILE}: `everystep study run --out {path}` measures and writes it"
            )
        header, entries, _ = _decode(file)
        return cls(path, header, entries, None)

    @classmethod
    def open(cls, path: Path, header: Header) -> ResultsDirectory:
        """Makes it, or goes on with what is there; StudyError if that was measured in another way."""
        path.mkdir(parents=True, exist_ok=True)
        name = path / FILE
        file = name.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise StudyError(
                f"another study writes to {path}: wait for it, or name another directory"
            ) from None
        entries: dict[Part, Entry] = {}
        try:
            if name.stat().st_size:
                found, entries, nbytes = _decode(name)
                if (found.quick, found.seed) != (header.quick, header.seed):
                    raise StudyError(
                        f"{path} holds a {'quick' if found.quick else 'full'} study with seed {found.seed}: "
                        "continue it with the same options, or name another directory"
                    )
                header = found
                file.truncate(nbytes)
            else:
                _append(file, header)
        except BaseException:
            file.close()
            raise
        return cls(path, header, entries, file)

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def has(self, part: Part) -> bool:
        found = self._entries.get(part)
        return found is not None and not found.missing

    def append(self, entry: Entry) -> None:
        assert self._file is not None
        _append(self._file, entry)
        self._entries[entry.part] = entry

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _append(file: BinaryIO, line: Header | Entry) -> None:
    file.write(msgspec.json.encode(line) + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _decode(file: Path) -> tuple[Header, dict[Part, Entry], int]:
    """Header, entries, and how many bytes of the file are whole lines."""
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        warnings.warn(f"{file}: the last line was cut off and is dropped", stacklevel=3)
    lines = data[:whole].splitlines()
    version = _format_of(lines[0] if lines else b"", file)
    if version != FORMAT:
        raise StudyError(
            f"{file} was written as {version!r}, and this Everystep reads {FORMAT!r}: "
            "read it with the Everystep that wrote it, or measure into another directory"
        )
    entries: dict[Part, Entry] = {}
    number = 1
    try:
        header = msgspec.json.decode(lines[0], type=Header)
        for number, line in enumerate(lines[1:], 2):  # noqa: B007  (the message below has it)
            entry = msgspec.json.decode(line, type=Entry)
            entries.pop(entry.part, None)
            entries[entry.part] = entry
    except msgspec.MsgspecError as error:
        raise StudyError(f"{file}, line {number}: {error}") from None
    return header, entries, whole


def _format_of(line: bytes, file: Path) -> object:
    try:
        found: object = msgspec.json.decode(line).get("format")
    except (msgspec.MsgspecError, AttributeError):
        raise StudyError(f"{file} is not a file of a study: its first line is no header") from None
    return found
