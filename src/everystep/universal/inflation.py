"""How much more may come out of the files of a checkpoint than is in them.

A few kilobytes can stand for terabytes: compressed zeros, records of an archive that share their bytes,
datasets that are all fill value, tensors that overlap. All formats share one rule.
"""

from __future__ import annotations

from everystep.errors import DecompressionBomb

ALWAYS_NBYTES = 256 << 20
"""This much is always allowed: it does no harm."""


def refuse_bomb(path: str, nbytes: int, stored_nbytes: int, max_inflation: float) -> None:
    """`DecompressionBomb` if `nbytes` are too many to come out of files of `stored_nbytes`."""
    if nbytes <= ALWAYS_NBYTES or nbytes <= max_inflation * stored_nbytes:
        return
    times = -(-nbytes // max(1, stored_nbytes))
    raise DecompressionBomb(
        f"{path}: {stored_nbytes:,} bytes of files would become {nbytes:,} bytes, {times:,} times as many, "
        f"where {max_inflation:g} are allowed: it may be a trap, and nothing was read. If you trust its "
        f"origin, pass options=everystep.Options(max_inflation={times}), or --max-inflation {times}"
    )
