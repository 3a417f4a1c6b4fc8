"""Which versions of scikit-learn are supported: those whose fits were compared with ours, bit for bit.

Importing this module raises `UnsupportedVersion` for any other: the hooks are in private functions.
"""

from __future__ import annotations

import re

import sklearn

from everystep.errors import UnsupportedVersion

OLDEST, NEWEST = (1, 3), (1, 9)
VERSION: str = sklearn.__version__


def check(version: str) -> None:
    """Raises `UnsupportedVersion` unless this version of scikit-learn is one of the supported ones."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        oldest, newest = (".".join(map(str, limit)) for limit in (OLDEST, NEWEST))
        raise UnsupportedVersion(
            f"scikit-learn {version} is installed; everystep.integrations.sklearn supports {oldest} to "
            f"{newest}. Install one of these, or a newer Everystep."
        )


check(VERSION)
