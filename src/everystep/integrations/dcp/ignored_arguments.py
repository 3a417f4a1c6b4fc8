"""The arguments that tune DCP's own ``FileSystemWriter``: accepted, so that a program only changes one name.

They choose the number of threads and files, copies ahead, the format, and whether to sync. Here none of this
is a choice: one file per rank, straight from the memory of the tensors, always synced.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping

_THEIRS = frozenset(
    (
        "single_file_per_rank",
        "sync_files",
        "thread_count",
        "per_thread_copy_ahead",
        "cache_staged_state_dict",
        "serialization_format",
    )
)
_said = threading.Event()
"""One note per process: a training makes a writer for every save."""


def refuse_extensions(extensions: object, name: str, where: str) -> None:
    """None, DCP's default, and an empty list are fine: there are no streams to change the bytes of."""
    if extensions is not None and extensions != []:
        raise TypeError(
            f"{where} takes no {name}: extensions of DCP transform its files, and Everystep writes its own, "
            "which are checksummed and not compressed. Leave it out"
        )


def ignore_tuning(arguments: Mapping[str, object]) -> None:
    """Warns of them, once; `TypeError` for any other argument. To be called by ``__init__``."""
    arguments = dict(arguments)
    refuse_extensions(arguments.pop("_extensions", None), "_extensions", "Writer")
    unknown = [name for name in arguments if name not in _THEIRS]
    if unknown:
        raise TypeError(f"Writer() got an unexpected keyword argument {unknown[0]!r}")
    if arguments and not _said.is_set():
        _said.set()
        warnings.warn(
            f"everystep.integrations.dcp.Writer ignores {', '.join(sorted(arguments))}: it writes one file "
            "per rank, straight from the tensors, and always syncs it. Tune it with everystep.Options",
            UserWarning,
            stacklevel=3,
        )
