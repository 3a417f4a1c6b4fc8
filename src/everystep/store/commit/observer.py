"""What a caller learns, and may do, while a checkpoint is being written."""

from __future__ import annotations

from collections.abc import Sequence

from everystep.engine import WriteJob
from everystep.plan import ShardPlan


class SaveObserver:
    """Does nothing; subclasses override what they need."""

    def writing(self, files: Sequence[tuple[ShardPlan, WriteJob]]) -> None:
        """The engine reads the sources from now on."""

    def advanced(self, nbytes: int) -> None:
        """So many bytes have been handed to the device. Called ten times a second while they are written."""

    def written(self) -> None:
        """The engine has let go of the sources. What is raised here fails the save."""

    def committing(self) -> None:
        """All is synced, and the rename that commits it comes next. What is raised here fails the save."""

    def committed(self) -> None:
        """It is durable. The caller learns it next."""
