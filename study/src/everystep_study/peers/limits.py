"""The raw device, to compare with: as many bytes as the state has.

On a new file and from normal pages, no checkpoint can beat that.
"""

from __future__ import annotations

from pathlib import Path

from everystep_study.peers.base import Done, Peer
from everystep_study.raw_device import raw_read, raw_write
from everystep_study.states import State


class RawDevice(Peer):
    """The bare loop of `raw_device`, which takes its own time, from open to synced."""

    key = "raw"
    title = "raw device"
    cost_is_ours = False  # most of it goes into making and filling the buffer
    huge_pages = False

    def save(self, path: Path, state: State) -> Done:
        if self.member.rank:
            return Done(path)
        return Done(path, seconds=raw_write(path, state.nbytes, huge_pages=self.huge_pages))

    def load(self, path: Path, into: State | None = None) -> Done:
        if self.member.rank:
            return Done(path)
        nbytes = path.stat().st_size
        return Done(path, seconds=raw_read(path, nbytes, huge_pages=self.huge_pages))


class RawHugePages(RawDevice):
    """The same from huge pages: a device that gathers 4 KiB pieces one by one is faster with 2 MiB ones.

    No memory layout can beat this; the limit above is what memory as programs have it can reach.
    """

    key = "raw-huge"
    title = "raw, huge pages"
    huge_pages = True
