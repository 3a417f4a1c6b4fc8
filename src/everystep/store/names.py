"""Every name and pattern of a file or directory in a run and in a checkpoint.

``step-000000000120`` is a checkpoint of a run. ``….partial`` is a save that has not finished, ``….retired`` a
checkpoint that retention has removed from the run, whose files the next save may overwrite. The names of
files inside a checkpoint are part of the format (`everystep.format.manifest`, docs/format.md).
"""

from __future__ import annotations

import re

from everystep.engine import atomic_file
from everystep.format.embedded import EMBEDDING_SHARD
from everystep.format.manifest import MANIFEST_NAME

MANIFEST = MANIFEST_NAME
SHARD = EMBEDDING_SHARD
"""The shard of a checkpoint that one process wrote. In a small checkpoint it holds the manifest, too."""

PARTIAL = atomic_file.PARTIAL
RETIRED = ".retired"
LOCK_FILE = ".lock"
LEDGER = ".volumes"
"""The ids of the checkpoints of a run whose shards on volumes are to be removed."""
RULES = ".rules"
"""Which checkpoints of a run stay, as its last training said."""
SAVE_MARK = ".saving"
"""``ID.saving`` in a partial directory names a save that has files there or on volumes."""

CHECKPOINT_ID = re.compile(r"[0-9a-f]{32}")
UNFINISHED_FILES = (LEDGER + PARTIAL, RULES + PARTIAL)
ANY_SHARD = re.compile(r"r[0-9]{5}\.v[0-9]+\.safetensors")

_STEP = re.compile(r"step-([0-9]{12})")
_OF_A_CHECKPOINT = re.compile(r"manifest\.json|r[0-9]{5}(?:\.json|\.v[0-9]+\.safetensors)")
_OF_A_RUN_OR_DCP = re.compile(
    r"step-[0-9]{12}.*|\.lock|\.volumes.*|\.rules|events(?:\.1)?\.jsonl"  # a run
    r"|\.metadata|.*\.distcp"  # a checkpoint of torch DCP's own format
)


def step_name(step: int) -> str:
    return f"step-{step:012d}"


def is_step_name(name: str) -> bool:
    """Whether a checkpoint of that name belongs to the run it is in."""
    return _STEP.fullmatch(name) is not None


def step_of(name: str) -> int:
    """The step that such a name stands for."""
    return int(name.removeprefix("step-"))


def is_leftover(name: str) -> bool:
    """Whether this is a leftover of a run's writer: an unfinished save, or a retired checkpoint."""
    stem, dot, suffix = name.partition(".")
    return bool(dot) and f".{suffix}" in (PARTIAL, RETIRED) and is_step_name(stem)


def is_checkpoint_file(name: str) -> bool:
    """Whether files of a checkpoint have such names."""
    return _OF_A_CHECKPOINT.fullmatch(name) is not None


def is_run_or_dcp_file(name: str) -> bool:
    """Whether a directory that holds this is a run, or a checkpoint of torch DCP's own format."""
    return _OF_A_RUN_OR_DCP.fullmatch(name) is not None


def sendable(text: str) -> str:
    """Text that a message can hold: names of files need not be UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
