"""store: checkpoints on disk.

| folder or module | what it owns |
|---|---|
| `commit` | how a checkpoint becomes durable |
| `read` | from a path to verified bytes in memory |
| `stream` | the bytes of many leaves through bounded memory, for exports, conversions, comparisons |
| `ranks` | saving and loading by all ranks of a process group |
| `api` | the calls that users know: `save`, `load`, `open` |
| `run` | a run as its one writer sees it: recovery, retirement, recycling |
| `options` | how to write and read |
| `names`, `locks` | names of files; locks on directories |
| `metrics` | metrics as plain numbers |
| `save_errors` | typed errors for saves whose system calls failed |

`read` never imports `commit` or `ranks`, and `commit` never imports `ranks`.
"""

from __future__ import annotations

from everystep.store.api import load, open, save
from everystep.store.commit.driver import Commit
from everystep.store.commit.info import CheckpointInfo, check_step
from everystep.store.commit.observer import SaveObserver
from everystep.store.commit.share import whole
from everystep.store.commit.transaction import Spare, Transaction
from everystep.store.metrics import plain_metrics
from everystep.store.names import step_name
from everystep.store.options import Options, checked_options
from everystep.store.ranks.group import RankGroup, join_group
from everystep.store.ranks.save_round import SaveRound
from everystep.store.read.checkpoint import Checkpoint
from everystep.store.read.lazy_leaf import LazyLeaf
from everystep.store.read.listing import is_checkpoint, list_steps
from everystep.store.read.open import resolve
from everystep.store.read.parts import LeafInfo
from everystep.store.read.references import locate
from everystep.store.read.shard_reader import VerifyProblem
from everystep.store.read.verify import VerifyReport, verify
from everystep.store.run import FollowedRun, WritableRun

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "Commit",
    "FollowedRun",
    "LazyLeaf",
    "LeafInfo",
    "Options",
    "RankGroup",
    "SaveObserver",
    "SaveRound",
    "Spare",
    "Transaction",
    "VerifyProblem",
    "VerifyReport",
    "WritableRun",
    "check_step",
    "checked_options",
    "is_checkpoint",
    "join_group",
    "list_steps",
    "load",
    "locate",
    "open",
    "plain_metrics",
    "resolve",
    "save",
    "step_name",
    "verify",
    "whole",
]
