"""inspect: what the command ``everystep`` finds out, usable from Python. Nothing here prints.

    from everystep import inspect

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
| `element_values` | elements of every type as numbers |

A function that moves many bytes takes ``progress``, which it calls with the bytes done and the bytes in all.
"""

from __future__ import annotations

from everystep.inspect.comparison import (
    ContainerChange,
    Difference,
    LeafChange,
    Side,
    SubtreeChange,
    ValueChange,
    compare,
)
from everystep.inspect.description import Description, describe
from everystep.inspect.event_summary import (
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
from everystep.inspect.machine import Choice, Device, Diagnosis, Mount, Speed, Torch, diagnose
from everystep.inspect.pruning import Pruned, prune
from everystep.inspect.run_listing import Leftover, ListedCheckpoint, ListedRun, Listing, list_run
from everystep.inspect.safetensors_export import Exported, export
from everystep.inspect.subtrees import Subtotal
from everystep.inspect.verification import verify_all
from everystep.store.stream.progress import Progress

__all__ = [
    "Choice",
    "ContainerChange",
    "Description",
    "Device",
    "Diagnosis",
    "Difference",
    "Distribution",
    "EventSummary",
    "Exported",
    "LeafChange",
    "Leftover",
    "ListedCheckpoint",
    "ListedRun",
    "Listing",
    "MetricPoint",
    "MetricSummary",
    "Mount",
    "NoEvents",
    "PhaseDistributions",
    "Progress",
    "Pruned",
    "Restores",
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
