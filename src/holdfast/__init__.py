"""Training state kept safe: durable after every step, at the speed of the disk, restorable anywhere.

    import holdfast

    holdfast.save("first", {"model": model, "optimizer": optimizer})      # returns when it is durable
    holdfast.load("first", into={"model": model, "optimizer": optimizer})

    ckpt = holdfast.Checkpointer("runs/gpt", {"model": model, "optimizer": optimizer})
    for step in range(ckpt.restore(), 10_000):
        train_one_step()
        ckpt.save(step + 1)

Layers, each using only those below: `cli`; `study`; `torch`, `inspect` and `drill`; `checkpointer` (the
training loop); `store` (commit protocol, runs); `team` (messages); `plan` (which bytes go where); `data`;
`state` (trees and arrays); `format` (files); `engine` (the device, in C++).

Names are imported when first used, so that ``import holdfast`` costs nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """The public names, each imported when it is first used. ``__init__.pyi`` lists them, once."""
    import importlib

    homes = _homes()
    if name == "__all__":
        return sorted(homes)
    if name not in homes:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    home = homes[name]
    if home == "holdfast":
        return importlib.import_module(f"holdfast.{name}")
    found = globals()[name] = getattr(importlib.import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*_homes(), "__all__", *(name for name in globals() if name.startswith("__"))})


_known_homes: dict[str, str] = {}


def _homes() -> dict[str, str]:
    """Public name -> its module, out of the lines ``from MODULE import NAME as NAME`` of the stub.

    Read once: a name must resolve later, too, when the process has no file descriptor left.
    """
    if _known_homes:
        return _known_homes
    import io  # `open` is a public name of this module
    import os
    import re

    with io.open(os.path.join(os.path.dirname(__file__), "__init__.pyi"), encoding="utf-8") as stub:  # noqa: UP020
        found = re.findall(r"^from (\S+) import (\w+) as \2$", stub.read(), re.M)
    _known_homes.update((name, home) for home, name in found)
    return _known_homes
