"""Mixtures of experts: which rank holds which experts, and what they are called.

A rank numbers its own experts from 0. Their files, and we, number them through all ranks: expert-parallel
rank ``e`` with ``n`` experts has those from ``e * n`` on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everystep.universal.deepspeed.files import Folder
from everystep.universal.deepspeed.names import CONFIG

_NAME = re.compile(r"((?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Experts:
    """`local` is how many experts of a layer one rank holds, by the name up to the expert's number."""

    local: Mapping[str, int]
    data_first: bool

    @classmethod
    def of(cls, folder: Folder, names: Iterable[Iterable[str]]) -> Experts:
        numbers: dict[str, set[int]] = {}
        for group in names:
            for name in group:
                if match := _NAME.fullmatch(name):
                    numbers.setdefault(match[1], set()).add(int(match[2]))
        config = folder.model(0).get(CONFIG)
        first = isinstance(config, Mapping) and config.get("use_data_before_expert_parallelism") is True
        return cls({prefix: len(found) for prefix, found in numbers.items()}, first)

    @staticmethod
    def is_expert(name: str) -> bool:
        return _NAME.fullmatch(name) is not None

    @staticmethod
    def number(name: str) -> int:
        """The number of the expert in a name; -1 if it is none."""
        match = _NAME.fullmatch(name)
        return -1 if match is None else int(match[2])

    @staticmethod
    def prefix(name: str) -> str:
        """The name up to the expert's number, which differs between layers."""
        match = _NAME.fullmatch(name)
        return "" if match is None else match[1]

    def global_name(self, name: str, expert_rank: int) -> str:
        """The name of a parameter that an expert-parallel rank calls `name`."""
        match = _NAME.fullmatch(name)
        if match is None:
            return name
        return f"{match[1]}{expert_rank * self.local[match[1]] + int(match[2])}{match[3]}"

    def members(self, data: int, degree: int) -> list[tuple[Sequence[int], int]]:
        """For each expert-parallel rank, the data-parallel ranks that hold its experts."""
        each = data // degree
        if self.data_first:
            return [(range(rank * each, (rank + 1) * each), rank) for rank in range(degree)]
        return [(range(rank, data, degree), rank) for rank in range(degree)]
