"""shelf: named arrays and values that live in a mapped file, changed under transactions.

`Shelf` is all that users need. The file, its directory, its space and the commit are in C++
(``native/src/shelf.hpp`` has the protocol as numbered steps; docs/shelf-format.md is the grammar).

| module | what it owns |
|---|---|
| `shelf` | `Shelf`: reading, changing, shadow copies; shelves in forked children |
| `opening` | a file to a shelf, and typed errors |
| `naming`, `sizes`, `usage` | names of entries; sizes as people write them; what a shelf says of itself |
| `entries` | values and arrays to the bytes of an entry, and back onto the mapping |
| `creation` | a new, empty file, complete or not there at all |
| `contents` | list, describe, verify and export, for the command |
"""

from __future__ import annotations

from everystep.shelf.shelf import Shelf
from everystep.shelf.usage import ShelfWarning, Usage

__all__ = ["Shelf", "ShelfWarning", "Usage"]
