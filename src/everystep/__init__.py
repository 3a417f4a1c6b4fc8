"""Training state kept safe: durable after every step, at the speed of the disk, restorable anywhere.

    import everystep

    everystep.save("first", {"model": model, "optimizer": optimizer})      # returns when it is durable
    everystep.load("first", into={"model": model, "optimizer": optimizer})

    state = {"model": model, "optimizer": optimizer, "data": loader, "rng": everystep.rng()}
    ckpt = everystep.Checkpointer("runs/gpt", state)
    for step in range(ckpt.restore(), 10_000):
        train_one_step()
        ckpt.save(step + 1)

Layers, each using only those below: `cli`; `checkpointer` (the training loop); `store` (commit
protocol, runs); `plan` (which bytes go where); `state` (trees and arrays); `format` (files); `engine` (the
device, in C++).

Names are imported when first used, so that ``import everystep`` costs nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"


def _read_stub() -> dict[str, str]:
    """Public name -> its module, out of the lines ``from MODULE import NAME as NAME`` of ``__init__.pyi``.

    That file is where the public names stand, once. It is read here, at import: later, a process may be out
    of descriptors, and must still be able to say ``except everystep.EverystepError``.
    """
    import os

    with open(os.path.join(os.path.dirname(__file__), "__init__.pyi"), encoding="utf-8") as stub:
        lines = [line.split() for line in stub]
    return {line[5]: line[1] for line in lines if len(line) == 6 and line[0] == "from" and line[3] == line[5]}


_HOME_OF = _read_stub()
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    """The public names are imported when they are first used."""
    import importlib

    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'everystep' has no attribute {name!r}")
    if home == "everystep":
        return importlib.import_module(f"everystep.{name}")
    found = globals()[name] = getattr(importlib.import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
