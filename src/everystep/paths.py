"""Paths that users give: the one place that says which of them Everystep can use.

Every public call that takes a path, and every command, passes it through `local_path` before it looks at
anything. Here an address of something else than a file system is refused: as a path, ``s3://bucket/run``
is a directory named ``s3:`` below the working directory.
"""

from __future__ import annotations

import os
import re

from everystep.errors import UnsupportedURL

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_COLLAPSED = re.compile(r"(?:[a-z0-9+.-]+::)*([a-z][a-z0-9+.-]+):/", re.IGNORECASE)
"""``Path("s3://bucket")`` is ``s3:/bucket``. A letter alone may be a drive of Windows."""
_JOINED = re.compile(
    r"/(?:[a-z0-9+.-]+::)*"
    r"(s3[an]?|gs|gcs|azure|az|abfss?|adl|wasbs?|r2|oci|oss|cos|obs|b2|hf|hdfs|webhdfs|dbfs|memory|file|local"
    r"|https?|s?ftp|ssh|scp|github|gdrive):/",
    re.IGNORECASE,
)
"""What is left when another program made such an address absolute: ``/work/s3:/bucket``."""


def local_path(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """The absolute path that a path means.

    `UnsupportedURL` for an address such as ``s3://bucket/run`` or ``file:///run``, also if it went through
    ``pathlib`` (``s3:/bucket/run``) or was made absolute (``/work/s3:/bucket/run``).
    """
    text = os.fsdecode(path)
    if not text:
        raise ValueError("the path is empty. Nothing was read or written. Give '.' for the current directory")
    found = _URL.search(text) or _COLLAPSED.match(text) or _JOINED.search(text)
    if found is not None:
        raise UnsupportedURL(_refusal(text, found[1].lower(), whole=found.re is _URL))
    return os.path.abspath(text)


def _refusal(text: str, scheme: str, *, whole: bool) -> str:
    said = f"{text} is a URL" if whole else f"{text} is what is left of a URL ({scheme}://)"
    what = f"{said}, and Everystep uses file systems only. Nothing was read or written. "
    if scheme in ("file", "local"):
        what += "Give the path alone, without the scheme"
    else:
        what += (
            "Give the path of a directory, on a local disk or a mounted file system. A checkpoint is plain "
            "files: once it is saved, copy its directory to where the URL leads"
        )
    return what if whole else f"{what}. To use a directory named {scheme}:, rename it first"
