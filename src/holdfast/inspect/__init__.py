"""inspect: what the command ``holdfast`` finds out, usable from Python. Nothing here prints.

    from holdfast import inspect

    inspect.list_run("runs/gpt").checkpoints            # steps, sizes, metrics, damage
    inspect.compare("runs/gpt", "runs/other").equal     # bit by bit, in bounded memory
    inspect.export("runs/gpt", "model.safetensors", select=["model.*"])

| module | what it owns |
|---|---|
| `run_listing` | `list_run`: the checkpoints and leftovers in a directory, or the runs below it |
| `description` | `describe`: what one checkpoint holds, without reading its arrays |
| `comparison` | `compare`: which leaves and values of two checkpoints differ |
| `subtrees` | totals per subtree |
| `verification` | `verify_all`: every byte of a checkpoint, or of all checkpoints of a run |
| `event_summary` | `summarize`: how the saves and restores of a run went |
| `safetensors_export` | `export`: leaves as one file that other tools read |
| `pruning` | `prune`: remove the checkpoints that no rule keeps |
| `machine` | `diagnose`: what this machine and a directory's filesystem can do |
| `safetensors_writer` | one safetensors file out of leaves, for `export` and conversions |
| `leaf_windows`, `leaf_stream` | leaves in bounded memory, at random or in the order of a writer |
| `element_values`, `element_casts` | elements of every type as numbers; one floating-point type to another |

A function that moves many bytes takes ``progress``, which it calls with the bytes done and the bytes in all.
"""

from __future__ import annotations

from holdfast.inspect.comparison import Difference, LeafChange, Side, SubtreeChange, ValueChange, compare
from holdfast.inspect.description import Description, describe
from holdfast.inspect.event_summary import (
    Distribution,
    EventSummary,
    MetricPoint,
    MetricSummary,
    NoEvents,
    PhaseDistributions,
    Restores,
    RunEvents,
    Saves,
    summarize,
)
from holdfast.inspect.machine import Choice, Device, Diagnosis, Mount, Speed, Torch, diagnose
from holdfast.inspect.progress import Progress
from holdfast.inspect.pruning import Pruned, Removed, prune
from holdfast.inspect.run_listing import Entry, Leftover, Listing, RunEntry, list_run
from holdfast.inspect.safetensors_export import Exported, export
from holdfast.inspect.subtrees import Subtotal
from holdfast.inspect.verification import verify_all

__all__ = [
    "Choice",
    "Description",
    "Device",
    "Diagnosis",
    "Difference",
    "Distribution",
    "Entry",
    "EventSummary",
    "Exported",
    "LeafChange",
    "Leftover",
    "Listing",
    "MetricPoint",
    "MetricSummary",
    "Mount",
    "NoEvents",
    "PhaseDistributions",
    "Progress",
    "Pruned",
    "Removed",
    "Restores",
    "RunEntry",
    "RunEvents",
    "Saves",
    "Side",
    "Speed",
    "Subtotal",
    "SubtreeChange",
    "Torch",
    "ValueChange",
    "compare",
    "describe",
    "diagnose",
    "export",
    "list_run",
    "prune",
    "summarize",
    "verify_all",
]
