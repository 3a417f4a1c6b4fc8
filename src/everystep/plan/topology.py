"""On which node and socket each rank runs, and which ranks write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Writers = Literal["all", "node", "socket"] | int


def check_writers(choice: Writers) -> None:
    """Raises unless it is one of the choices."""
    if choice not in ("all", "node", "socket") and (type(choice) is not int or choice < 1):
        raise ValueError(f'writers must be "all", "node", "socket" or a number from 1 on, not {choice!r}')


@dataclass(frozen=True, slots=True)
class Topology:
    """The node of every rank, and its socket inside that node. Numbers need not be consecutive."""

    nodes: tuple[int, ...]
    sockets: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.nodes or len(self.nodes) != len(self.sockets):
            raise ValueError(
                f"{len(self.nodes)} nodes and {len(self.sockets)} sockets for the ranks of a world"
            )

    @classmethod
    def regular(cls, world: int, ranks_per_node: int | None = None, sockets_per_node: int = 1) -> Topology:
        """Ranks numbered node by node, and socket by socket inside; by default all on one node."""
        per_node = ranks_per_node or world
        per_socket = -(-per_node // sockets_per_node)
        return cls(
            tuple(rank // per_node for rank in range(world)),
            tuple(rank % per_node // per_socket for rank in range(world)),
        )

    @property
    def world(self) -> int:
        return len(self.nodes)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's node, itself included, ascending."""
        node = self.nodes[rank]
        return tuple(other for other, its in enumerate(self.nodes) if its == node)

    def writers(self, choice: Writers) -> npt.NDArray[np.bool_]:
        """Which ranks write: all, the first of every node or socket, or N taken evenly from all nodes."""
        check_writers(choice)
        if choice == "all":
            return np.ones(self.world, dtype=np.bool_)
        chosen = np.zeros(self.world, dtype=np.bool_)
        if choice == "node":
            chosen[list({node: rank for rank, node in reversed(list(enumerate(self.nodes)))}.values())] = True
        elif choice == "socket":
            places = zip(self.nodes, self.sockets, strict=True)
            chosen[list({place: rank for rank, place in reversed(list(enumerate(places)))}.values())] = True
        elif isinstance(choice, int):
            chosen[self._evenly()[:choice]] = True
        return chosen

    def _evenly(self) -> list[int]:
        """Ranks in an order of which every beginning uses nodes, then their sockets, as evenly as can be."""
        in_socket: dict[tuple[int, int], int] = {}
        in_node: dict[tuple[int, int], int] = {}
        keys: list[tuple[int, int, int, int]] = []
        for rank, place in enumerate(zip(self.nodes, self.sockets, strict=True)):
            turn = in_socket[place] = in_socket.get(place, -1) + 1
            # The how-manieth socket of its node to have a rank at this turn.
            nth = in_node[place[0], turn] = in_node.get((place[0], turn), -1) + 1
            keys.append((turn, nth, place[0], rank))
        return [key[3] for key in sorted(keys)]
