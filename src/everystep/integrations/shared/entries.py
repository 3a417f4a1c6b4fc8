"""What every ``state_of`` does with the entries that its caller adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_entries(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an integration, and entries of the user's. `ValueError` if a name is in both."""
    if twice := sorted(own.keys() & more.keys()):
        raise ValueError(f"state_of has entries of these names itself: {', '.join(twice)}. Choose others")
    return {**own, **more}
