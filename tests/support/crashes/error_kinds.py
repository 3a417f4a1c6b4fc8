"""Which kind of error a rank has met, by the name that the documents use for it."""

from __future__ import annotations

import everystep


def kind_of(error: BaseException) -> str:
    """The name of its type. Rank errors of a save have types of their own, which are both kinds at once."""
    if isinstance(error, (everystep.errors.SaveFailedOnRank, everystep.errors.RankTimeout)):
        return "RankFailed"
    return "RanksDisagree" if isinstance(error, everystep.errors.SaveRejected) else type(error).__name__
