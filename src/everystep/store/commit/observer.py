"""What a caller learns, and may do, while a checkpoint is being written."""

from __future__ import annotations

from collections.abc import Sequence

from everystep.engine import WriteJob
from everystep.plan import ShardPlan


class SaveObserver:
    """Does nothing; subclasses override what they need."""

    def writing(self, files: Sequence[tuple[ShardPlan, WriteJob]]) -> None:
        """The engine reads the sources from now on."""

    def written(self) -> None:
        """The engine has let go of the sources. What is raised here fails the save."""

    def committing(self) -> None:
        """All is synced, and the rename that commits it comes next. What is raised here fails the save."""

    def committed(self) -> None:
        """It is durable, and nobody has been told so yet."""
