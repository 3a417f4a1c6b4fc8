"""The one registry of the systems that are measured beside Everystep.

`storing` has those that save and load a state, alone or as one of several ranks; `limits` the device's own
limit; `training` those that checkpoint a running training. A suite picks its cases from here by key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from everystep_study.peers.base import Peer
from everystep_study.peers.limits import RawDevice, RawHugePages
from everystep_study.peers.storing import (
    DistributedCheckpoint,
    Everystep,
    Pickle,
    RecycledEverystep,
    Safetensors,
    Savez,
    TorchSave,
    TorchSaveWithoutCrc,
)
from everystep_study.peers.training import (
    CheckFreq,
    DcpAsync,
    NoCheckpoints,
    Overlap,
    Snapshot,
    Sync,
    TorchSaveEachStep,
    TrainingPeer,
)

T = TypeVar("T")

STORING: Mapping[str, type[Peer]] = {
    peer.key: peer
    for peer in (
        RawDevice,
        Everystep,
        RecycledEverystep,
        RawHugePages,
        Safetensors,
        TorchSaveWithoutCrc,
        TorchSave,
        DistributedCheckpoint,
        Pickle,
        Savez,
    )
}
"""In the order of the tables. Everystep is next to the limit that it is compared with, so that in every round
the two are measured within moments of each other."""

TRAINING: Mapping[str, type[TrainingPeer]] = {
    peer.key: peer
    for peer in (NoCheckpoints, Overlap, Snapshot, Sync, CheckFreq, DcpAsync, TorchSaveEachStep)
}


def choose(keys: Sequence[str], among: Mapping[str, T], always: Sequence[str] = ()) -> dict[str, T]:
    """Those with these keys, in the order of the tables; all of them when none is named."""
    unknown = sorted(set(keys) - set(among))
    if unknown:
        raise ValueError(f"unknown system {', '.join(unknown)}; there are: {', '.join(among)}")
    return {key: peer for key, peer in among.items() if not keys or key in keys or key in always}
