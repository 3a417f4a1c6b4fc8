"""universal: checkpoints of other systems, read and written.

    from everystep import universal

    universal.recognise("bert/")                                     # "hf"
    universal.convert("bert/", "runs/bert")                          # to an Everystep checkpoint
    universal.convert("runs/gpt", "gpt/", to="hf", select="model.*") # what from_pretrained opens

| module | what it owns |
|---|---|
| `source` | the records that describe a foreign checkpoint |
| `sources` | one module per system: where its bytes lie |
| `rules`, `patterns`, `spec`, `spec_file`, `presets` | the language for layouts: `Spec` and its rules |
| `cuts`, `union`, `split`, `joining`, `whole_source` | from the tensors of ranks to whole leaves, and back |
| `recognition`, `checking` | which system wrote a checkpoint; what can be verified of it |
| `torch_file`, `torch_values`, `tensor_leaves` | files of ``torch.save``, read without torch |
| `pickle_machine`, `plain_pickles`, `numpy_pickles` | pickles, read without running code |
| `zip_records` | the records of zip archives, and their CRCs |
| `state_tree`, `training_state` | the state that a reader found, as our tree and leaves |
| `opening`, `reduction` | a description as a checkpoint that the native path reads |
| `conversion`, `items`, `readback` | `convert`: which leaves go where, under which names; `verify` |
| `ds_training`, `ds_cuts` | a state in DeepSpeed's terms, for its universal layout |
| `torch_zip`, `torch_pickles`, `torch_archive`, `torch_files` | files of ``torch.save``, written |
| `targets`, `atomic_output` | one module per system that is written; all or nothing |
"""

from __future__ import annotations

from everystep.universal.conversion import Converted, convert, target_kinds
from everystep.universal.recognition import describe, kinds, recognise
from everystep.universal.rules import (
    Rule,
    flat,
    fused,
    pad,
    part,
    partial,
    rename,
    replicated,
    rule,
    shard,
    tied,
    unique,
)
from everystep.universal.source import Computed, Source, SourceLeaf, Stretch, flat_stretches
from everystep.universal.spec import Spec

__all__ = [
    "Computed",
    "Converted",
    "Rule",
    "Source",
    "SourceLeaf",
    "Spec",
    "Stretch",
    "convert",
    "describe",
    "flat",
    "flat_stretches",
    "fused",
    "kinds",
    "pad",
    "part",
    "partial",
    "recognise",
    "rename",
    "replicated",
    "rule",
    "shard",
    "target_kinds",
    "tied",
    "unique",
]
