"""shelf: named arrays and values that live in a mapped file, changed under transactions.

`Shelf` is all that users need. The file, its directory, its space and the commit are in C++
(``native/src/shelf.hpp`` has the protocol as numbered steps; docs/shelf-format.md is the grammar).

| module | what it owns |
|---|---|
| `shelf` | `Shelf`: reading, changing, shadow copies; shelves in forked children |
| `opening` | a file to a shelf, new or old, and typed errors |
| `sizes` | what a shelf may take, and what it takes |
| `entries` | names of entries; values and arrays to the bytes of an entry, and back onto the mapping |
| `contents` | list, describe, verify and export, for the command |
"""

from __future__ import annotations

from everystep.shelf.shelf import Shelf
from everystep.shelf.sizes import ShelfWarning, Usage

__all__ = ["Shelf", "ShelfWarning", "Usage"]
