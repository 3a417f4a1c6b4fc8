"""Specs as TOML files: text to rules. docs/universal-spec.md is the grammar."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Mapping
from typing import Any

from everystep.errors import SpecError
from everystep.paths import local_path
from everystep.universal.rules import (
    Flat,
    Fused,
    FusedPart,
    Layout,
    Pad,
    Partial,
    Rename,
    Replicated,
    Rule,
    Shard,
    Tied,
    Unique,
    fused,
    rule,
)

_MAX_NBYTES = 4 << 20
_TOP = {"preset", "rule"}


def read_spec(path: str | os.PathLike[str]) -> tuple[Rule, ...]:
    """The rules of a file. Every error names it."""
    with open(local_path(path), "rb") as file:
        data = file.read(_MAX_NBYTES + 1)
    if len(data) > _MAX_NBYTES:
        raise SpecError(f"{os.fspath(path)}: larger than {_MAX_NBYTES >> 20} MiB")
    try:
        return parse_spec(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise SpecError(f"{os.fspath(path)}: not UTF-8 text") from None
    except SpecError as error:
        raise SpecError(f"{os.fspath(path)}: {error}", names=error.names) from None


def parse_spec(text: str) -> tuple[Rule, ...]:
    """The rules of a text: its own, then those of the preset that it names."""
    document = _parse_toml(text)
    _require_keys("the file", document, _TOP)
    entries = document.get("rule", [])
    if not isinstance(entries, list):
        raise SpecError("rules are written as [[rule]] tables")
    rules: list[Rule] = []
    for number, entry in enumerate(entries, 1):
        try:
            rules.extend(_rules(entry))
        except SpecError as error:
            raise SpecError(f"rule {number}: {error}") from None
    if "preset" in document:
        rules.extend(_preset(document["preset"]))
    if not rules:
        raise SpecError("no rules, and no preset")
    return tuple(rules)


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        tomllib = importlib.import_module("tomllib")
    except ModuleNotFoundError:
        raise SpecError("spec files need Python 3.11 or newer; on 3.10, write the spec in Python") from None
    try:
        parsed: dict[str, Any] = tomllib.loads(text)
        return parsed
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not TOML: {error}") from None


def _preset(given: object) -> tuple[Rule, ...]:
    from everystep.universal.presets import preset_rules

    if isinstance(given, str):
        return preset_rules(given, {})
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise SpecError('preset is a name, or a table with a name: { name = "llama", ... }')
    return preset_rules(given["name"], {key: value for key, value in given.items() if key != "name"})


def _rules(entry: object) -> list[Rule]:
    if not isinstance(entry, dict):
        raise SpecError("rules are written as [[rule]] tables")
    patterns = entry.get("match")
    if isinstance(patterns, str):
        patterns = [patterns]
    if not isinstance(patterns, list) or not patterns or not all(isinstance(p, str) for p in patterns):
        raise SpecError("match is a pattern, or a list of patterns")
    what: list[Layout | Pad | Rename | Tied] = []
    for key, value in entry.items():
        if key == "match":
            continue
        if key not in _KEYS:
            raise SpecError(f"{key!r} is no rule; rules are {', '.join(_KEYS)}")
        what.extend(_KEYS[key](value))
    return [rule(pattern, *what) for pattern in patterns]


def _flag(name: str, layout: Layout) -> Any:
    def read(value: object) -> list[Layout]:
        if value is not True:
            raise SpecError(f"{name} = true, or leave it out")
        return [layout]

    return read


def _read_partial(value: Any) -> list[Layout]:
    return [Partial(value)]


def _read_shard(value: Any) -> list[Layout]:
    if isinstance(value, dict):
        _require_keys("shard", value, {"dim", "pieces"}, needed={"dim"})
        return [Shard(value["dim"], value.get("pieces"))]
    return [Shard(value)]


def _read_fused(value: Any) -> list[Layout]:
    if not isinstance(value, dict):
        raise SpecError("fused = { dim = 0, parts = [...] }")
    _require_keys("fused", value, {"dim", "parts", "shares"}, needed={"dim"})
    parts, shares = value.get("parts"), value.get("shares")
    made: Fused = fused(
        value["dim"],
        parts if isinstance(parts, int) or parts is None else _read_parts(parts),
        shares=None if shares is None else _read_parts(shares),
    )
    return [made]


def _read_parts(value: Any) -> list[FusedPart]:
    if not isinstance(value, list):
        raise SpecError("the parts of fused are a list of sizes, or the number of equal ones")
    parts: list[FusedPart] = []
    for found in value:
        if isinstance(found, dict):
            _require_keys("a part", found, {"size", "pieces"}, needed={"size"})
            parts.append(FusedPart(found["size"], found.get("pieces")))
        else:
            parts.append(FusedPart(found))
    return parts


def _read_pad(value: Any) -> list[Pad]:
    pads: list[Pad] = []
    for found in value if isinstance(value, list) else [value]:
        if not isinstance(found, dict):
            raise SpecError("pad = { dim = 0, to = 50257 }")
        _require_keys("pad", found, {"dim", "to"}, needed={"dim", "to"})
        pads.append(Pad(found["dim"], found["to"]))
    return pads


def _read_name(key: str, kind: type[Rename] | type[Tied]) -> Any:
    def read(value: object) -> list[Rename | Tied]:
        if not isinstance(value, str) or not value:
            raise SpecError(f"{key} takes a name, not {value!r}")
        return [kind(value)]

    return read


_KEYS: Mapping[str, Any] = {
    "unique": _flag("unique", Unique()),
    "replicated": _flag("replicated", Replicated()),
    "partial": _read_partial,
    "shard": _read_shard,
    "fused": _read_fused,
    "flat": _flag("flat", Flat()),
    "pad": _read_pad,
    "tied": _read_name("tied", Tied),
    "rename": _read_name("rename", Rename),
}


def _require_keys(
    what: str, table: Mapping[str, object], known: Collection[str], needed: Collection[str] = ()
) -> None:
    unknown, missing = set(table) - set(known), set(needed) - set(table)
    if unknown:
        raise SpecError(
            f"{what} has {', '.join(sorted(unknown))}, which is not one of {', '.join(sorted(known))}"
        )
    if missing:
        raise SpecError(f"{what} lacks {', '.join(sorted(missing))}")
