"""What a worker keeps from order to order, and the orders that come before all others.

These describe the framework (`hello`), prepare a mechanism and build a training. What is then done with it is
left to the other modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from everystep_study.costs import wall_seconds
from everystep_study.frameworks.api import Framework, LoopFramework, Mechanism, Training

_SHOWN = ("key", "title", "always_durable", "weights_only_possible", "optimizer_possible")


class Context:
    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.mechanisms = {mechanism.key: mechanism for mechanism in framework.mechanisms}
        self.built: tuple[str, bool, int] = ("", False, 0)
        """Model, quick and seed of the training."""
        self.digests: dict[str, str] = {}
        """Of what was saved, by directory."""
        self.filled: Training | None = None
        """The training that was loaded into, kept for the next load."""
        self._training: Training | None = None

    @property
    def training(self) -> Training:
        if self._training is None:
            raise RuntimeError("nothing has been built")
        return self._training

    def build(self, model: str, quick: bool, seed: int) -> Training:
        self._training, self.built = self.framework.build(model, quick, seed), (model, quick, seed)
        self.filled = None
        return self._training

    def opened(
        self,
        mechanism: str,
        directory: str,
        *,
        durable: bool,
        weights_only: bool = False,
        slots: int = 1,
        training: Training | None = None,
    ) -> AbstractContextManager[Mechanism]:
        """A mechanism in a directory, closed at the end; of the training that was built, unless another is
        given.
        """
        place = Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        kind = self.mechanisms[mechanism]
        weights_only = weights_only or not kind.optimizer_possible
        return closing(
            kind(training or self.training, place, durable=durable, weights_only=weights_only, slots=slots)
        )


def hello(context: Context) -> dict[str, Any]:
    framework = context.framework
    return {
        "versions": framework.versions(),
        "models": list(framework.models),
        "loop": isinstance(framework, LoopFramework),
        "mechanisms": [
            {**{name: getattr(each, name) for name in _SHOWN}, "missing": each.missing()}
            for each in framework.mechanisms
        ],
        "defaults": [
            {"key": each.key, "title": each.title, "ours": each.ours, "missing": each.missing()}
            for each in framework.defaults
        ],
    }


def prepare(context: Context, mechanism: str) -> dict[str, Any]:
    context.mechanisms[mechanism].prepare()
    return {}


def build(context: Context, model: str, quick: bool, seed: int) -> dict[str, float]:
    """Builds a model and takes steps until memory and thread pools are there."""
    training = context.build(model, quick, seed)
    for _ in range(2):
        training.step()
    seconds = wall_seconds(training.step)
    return {
        "weights_nbytes": nbytes_of(training.weights()),
        "optimizer_nbytes": nbytes_of(training.optimizer_arrays()),
        "step_seconds": seconds,
    }


def nbytes_of(arrays: Mapping[str, NDArray[Any]]) -> int:
    return sum(array.nbytes for array in arrays.values())
