"""`Batches`: arrays in batches, in an order that depends on a seed and the epoch only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from everystep.integrations.data import Sampler
from everystep.integrations.data.sampler import check_order


class Batches(keras.utils.PyDataset):
    """Arrays, or nested arrays, in batches: ``fit(batches, shuffle=False)`` instead of ``fit(x, y)``.

    The order of an epoch depends on `seed` and the epoch only, so a resumed training has the same, with every
    backend. Give it to `EverystepCallback` as well, which sets its epoch.

    Args:
        x: Arrays, or nested arrays, of the same length.
        y: The targets, in the same form.
        sample_weight: A weight for each sample.
        batch_size: Samples in a batch. The last batch of an epoch may have fewer.
        shuffle: Whether each epoch has an order of its own.
        seed: What the orders follow from.
        options: Those of ``keras.utils.PyDataset``.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._arrays = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
        lengths = {len(array) for array in keras.tree.flatten(self._arrays)}
        if len(lengths) != 1:
            raise ValueError(f"all arrays must have the same length, not {sorted(lengths)}")
        self._sampler = Sampler(lengths.pop(), shuffle=shuffle, seed=seed)
        self.batch_size = batch_size
        self.epoch = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch, self._order = epoch, self._sampler.order(epoch)

    def __len__(self) -> int:
        return -(-self._sampler.length // self.batch_size)

    def __getitem__(self, index: int) -> Any:
        chosen = self._order[index * self.batch_size : (index + 1) * self.batch_size]
        return keras.tree.map_structure(lambda array: array[chosen], self._arrays)

    def state_dict(self) -> dict[str, Any]:
        order = {**self._sampler.describe(), "batch_size": self.batch_size}
        return {"seed": self._sampler.seed, "order": order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The saved seed replaces the given one. Other data, or other batches, raise a `StateMismatch`."""
        check_order(state["order"], self.state_dict()["order"])
        self._sampler.seed = state["seed"]
