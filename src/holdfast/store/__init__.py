"""store: checkpoints on disk. The commit protocol, runs, recovery, retention, recycling, verification.

`commit` is how a checkpoint becomes durable, `run` what a run's directory holds and who may change it,
`checkpoint` an open checkpoint, `verification` the full check, with `decodable` for what is no array,
`metrics` the numbers that go with one, `api` the calls that users know.

Reading: `opening` finds a checkpoint and its manifest, `parts` has what each rank wrote, `wanted` says which
boxes of leaves go where, `fetching` which files they come from, `shards` reads one part's files and
`scattering` takes apart what goes to several places.

Several ranks: `crew` is what stays from save to save, `shares` who writes what, `calls` the messages of a
save, `together` its protocol, `writing` a rank's own files, `volumes` directories elsewhere. `loading`
restores on all ranks, `commons` and `handing` read once per node what several want; `unison` and `outcomes`
make what one rank meets the result of all.
"""

from __future__ import annotations

from holdfast.store.api import Options, checked_options, load, open, save
from holdfast.store.calls import Conversation
from holdfast.store.checkpoint import Checkpoint, LeafInfo, is_checkpoint, resolve
from holdfast.store.commit import CheckpointInfo, Commit, check_step
from holdfast.store.crew import Crew, muster
from holdfast.store.lazy import LazyLeaf
from holdfast.store.metrics import plain_metrics
from holdfast.store.partial import Spare, Target
from holdfast.store.run import FollowedRun, WritableRun, list_steps, step_name
from holdfast.store.shards import Problem
from holdfast.store.verification import Report, verify
from holdfast.store.watch import Watch

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "Commit",
    "Conversation",
    "Crew",
    "FollowedRun",
    "LazyLeaf",
    "LeafInfo",
    "Options",
    "Problem",
    "Report",
    "Spare",
    "Target",
    "Watch",
    "WritableRun",
    "check_step",
    "checked_options",
    "is_checkpoint",
    "list_steps",
    "load",
    "muster",
    "open",
    "plain_metrics",
    "resolve",
    "save",
    "step_name",
    "verify",
]
