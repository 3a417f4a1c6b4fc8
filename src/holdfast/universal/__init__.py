"""universal: checkpoints of other systems, read and written.

    from holdfast import universal

    universal.recognise("bert/")                                     # "hf"
    universal.convert("bert/", "runs/bert")                          # to a Holdfast checkpoint
    universal.convert("runs/gpt", "gpt/", to="hf", select="model.*") # what from_pretrained opens

| module | what it owns |
|---|---|
| `source` | the records that describe a foreign checkpoint |
| `sources` | one module per system: where its bytes lie |
| `recognition` | which system wrote a checkpoint |
| `opening`, `tree`, `reduction` | a description as a checkpoint that the native path reads |
| `conversion`, `items`, `readback` | `convert`: which leaves go where, under which names; `verify` |
| `targets`, `atomic_output` | one module per system that is written; all or nothing |
"""

from __future__ import annotations

from holdfast.universal.conversion import Converted, convert, target_kinds
from holdfast.universal.recognition import describe, kinds, recognise
from holdfast.universal.source import Computed, Source, SourceLeaf, Stretch, flat_stretches

__all__ = [
    "Computed",
    "Converted",
    "Source",
    "SourceLeaf",
    "Stretch",
    "convert",
    "describe",
    "flat_stretches",
    "kinds",
    "recognise",
    "target_kinds",
]
