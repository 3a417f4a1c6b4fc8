"""`check_spec`: does a spec fit a checkpoint, and which rule takes which parameter."""

from __future__ import annotations

import os
from dataclasses import dataclass

from everystep.errors import CheckpointNotFound, SpecError
from everystep.paths import local_path
from everystep.universal.recognition import describe, find_reader, recognise
from everystep.universal.spec import Explanation, Spec
from everystep.universal.whole_source import parameters_of


@dataclass(frozen=True, slots=True)
class SpecCheck:
    """`parameters` says which rule takes each. `problem` is the first thing that does not fit, if any."""

    kind: str
    parameters: tuple[Explanation, ...]
    problem: str | None

    @property
    def unmatched(self) -> tuple[str, ...]:
        return tuple(found.name for found in self.parameters if found.rule is None)

    def unused(self, spec: Spec) -> tuple[int, ...]:
        """The numbers of the rules that take nothing."""
        used = {found.number for found in self.parameters}
        return tuple(number for number in range(1, len(spec.rules) + 1) if number not in used)


def check_spec(spec: Spec, path: str | os.PathLike[str]) -> SpecCheck:
    """Tries a spec on a foreign checkpoint: its names, and the shapes if all names have a rule."""
    where = local_path(path)
    if not os.path.exists(where):
        raise CheckpointNotFound(f"there is no checkpoint at {where}")
    kind = recognise(where)
    explained = spec.explain(parameter_names(where))
    problem: str | None = None
    try:
        spec.assign(found.name for found in explained)
        describe(where, spec=spec)
    except SpecError as error:
        problem = str(error)
    return SpecCheck(kind, explained, problem)


def parameter_names(path: str) -> list[str]:
    """The names that rules are asked for: those of the system's own files."""
    reader = find_reader(path)
    if reader is not None and reader.parameters is not None:
        return list(reader.parameters(path))
    return parameters_of(describe(path))
