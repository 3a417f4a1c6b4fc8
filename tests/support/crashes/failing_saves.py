"""Saves to be made to fail: what is durable before, the save, and what must hold after it, failed or not."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from pathlib import Path

import everystep
from everystep.store import list_steps, step_name
from support.crashes.recovery import leftovers
from support.states.identified_states import blank_state, identify, load_identity, make_state


class Scenario(ABC):
    """Constructed, everything is prepared and healthy; `act` is the save that a fault may hit."""

    def __init__(self, root: Path, options: everystep.Options) -> None:
        self.root = root
        self.options = options
        self.prepare()

    @abstractmethod
    def prepare(self) -> None: ...

    @abstractmethod
    def act(self) -> None: ...

    @abstractmethod
    def check(self, *, failed: bool) -> None:
        """What was durable is whole; the new one is there, or there is no trace of it."""

    @abstractmethod
    def check_readable(self) -> None:
        """Weaker: what can be seen is whole, and what was durable is among it, or what should replace it."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """What is there besides checkpoints, and should not be after a failure."""

    @abstractmethod
    def again(self) -> None:
        """Without a fault the same save works, and leaves nothing but itself."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        pass


class Fresh(Scenario):
    """`everystep.save` to a new path, beside another checkpoint."""

    def prepare(self) -> None:
        everystep.save(self.root / "old", make_state(1), step=1, options=self.options)

    def act(self) -> None:
        everystep.save(self.root / "new", make_state(2), step=2, options=self.options)

    def check(self, *, failed: bool) -> None:
        assert load_identity(str(self.root / "old")) == (1, 0)
        if failed:
            assert not os.path.lexists(self.root / "new")
        else:
            assert load_identity(str(self.root / "new")) == (2, 0)

    def check_readable(self) -> None:
        assert load_identity(str(self.root / "old")) == (1, 0)
        if os.path.lexists(self.root / "new"):
            assert load_identity(str(self.root / "new")) == (2, 0)

    def leftovers(self) -> list[str]:
        return sorted(set(os.listdir(self.root)) - {"old", "new"})

    def again(self) -> None:
        if os.path.lexists(self.root / "new"):
            return  # the dead device kept it, and did not let go of it again
        self.act()
        self.check(failed=False)
        assert self.leftovers() == []


class Replacing(Scenario):
    """`everystep.save` with ``overwrite=True``."""

    def prepare(self) -> None:
        everystep.save(self.root / "model", make_state(1), step=1, options=self.options)

    def act(self) -> None:
        everystep.save(self.root / "model", make_state(2), step=2, overwrite=True, options=self.options)

    def check(self, *, failed: bool) -> None:
        assert load_identity(str(self.root / "model")) == ((1, 0) if failed else (2, 0))

    def check_readable(self) -> None:
        assert load_identity(str(self.root / "model")) in ((1, 0), (2, 0))

    def leftovers(self) -> list[str]:
        return sorted(set(os.listdir(self.root)) - {"model"})

    def again(self) -> None:
        self.act()
        self.check(failed=False)
        assert self.leftovers() == []


class InRun(Scenario):
    """`Checkpointer.save`: after `earlier` saves, one of step `step`."""

    earlier: tuple[int, ...] = (1,)
    step = 2
    keep = everystep.Keep(last=2)

    def prepare(self) -> None:
        self.run = str(self.root / "run")
        self.checkpointer = everystep.Checkpointer(
            self.run, None, keep=self.keep, options=self.options, mode="sync"
        )
        for step in self.earlier:
            self.checkpointer.state = make_state(step)
            self.checkpointer.save(step)
        self.before = list_steps(self.run)

    def act(self) -> None:
        self.checkpointer.state = make_state(self.step, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # retention that failed: the save has not
            self.checkpointer.save(self.step)

    def check(self, *, failed: bool) -> None:
        visible = list_steps(self.run)
        for step in visible:
            version = 1 if step == self.step and not failed else 0
            assert load_identity(os.path.join(self.run, step_name(step))) == (step, version)
        if failed:
            assert visible == self.before
        else:
            assert self.step in visible
            assert self.checkpointer.last_durable == self.step
        self.checkpointer.state = target = blank_state()
        assert self.checkpointer.restore() == visible[-1]
        identify(target)

    def check_readable(self) -> None:
        visible = list_steps(self.run)
        assert visible[-1] >= self.before[-1]
        for step in visible:
            allowed = {(step, 0), (step, 1)} if step == self.step else {(step, 0)}
            assert load_identity(os.path.join(self.run, step_name(step))) in allowed

    def leftovers(self) -> list[str]:
        # Retired checkpoints are spares, which a writer may have.
        return [name for name in leftovers(self.run) if name.endswith(".partial")]

    def again(self) -> None:
        self.act()
        self.check(failed=False)
        self.checkpointer.close()
        target = blank_state()
        with everystep.Checkpointer(self.run, target, options=self.options, mode="sync") as reopened:
            assert leftovers(self.run) == []
            assert reopened.restore() == self.step
            assert identify(target) == (self.step, 1)
            assert reopened.steps[-2:] == sorted({*self.before, self.step})[-2:]

    def close(self) -> None:
        self.checkpointer.close()


class Recycling(InRun):
    """With a spare to write over, and one more checkpoint to retire."""

    earlier = (1, 2, 3, 4)
    step = 5


class SameStep(InRun):
    """With a spare to write over, a step that is there already is replaced."""

    earlier = (1, 2, 3, 4)
    step = 4


SCENARIOS: list[type[Scenario]] = [Fresh, Replacing, InRun, Recycling, SameStep]
