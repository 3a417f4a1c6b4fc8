"""The raw device: the engine's bare loop, to compare with.

It writes as many bytes as the state has, from one aligned buffer, past the page cache, into a file that is
preallocated and synced at the end. On a new file and from normal pages, no checkpoint can beat that.
"""

from __future__ import annotations

from pathlib import Path

from everystep_study.peers.base import Done, Peer, missing_everystep
from everystep_study.states import State


class RawDevice(Peer):
    """The engine's loop over one aligned buffer, timed by the engine from open to synced."""

    key = "raw"
    title = "raw device"
    cost_is_ours = False  # most of it goes into making and filling the buffer
    huge_pages = False

    def missing(self) -> str | None:
        return missing_everystep()

    def save(self, path: Path, state: State) -> Done:
        from everystep import engine

        if self.member.rank:
            return Done(path)
        return Done(path, seconds=engine.raw_write(path, state.nbytes, huge_pages=self.huge_pages))

    def load(self, path: Path, into: State | None = None) -> Done:
        from everystep import engine

        if self.member.rank:
            return Done(path)
        nbytes = path.stat().st_size
        return Done(path, seconds=engine.raw_read(path, nbytes, huge_pages=self.huge_pages))


class RawHugePages(RawDevice):
    """The same from huge pages: a device that gathers 4 KiB pieces one by one is faster with 2 MiB ones.

    No memory layout can beat this; the limit above is what memory as programs have it can reach.
    """

    key = "raw-huge"
    title = "raw, huge pages"
    huge_pages = True
