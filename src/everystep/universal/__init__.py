"""universal: checkpoints of other systems, read and written.

    from everystep import universal

    universal.recognise("bert/")                                     # "hf"
    universal.convert("bert/", "runs/bert")                          # to an Everystep checkpoint
    universal.convert("runs/gpt", "gpt/", to="hf", select="model.*") # what from_pretrained opens

Each system has a folder with its source, its target, and what is known of its files: `deepspeed`,
`megatron`, `hf`, `safetensors`, `dcp`, `torch_file` (with Lightning's ``.ckpt``), `hdf5` (with Keras), `npz`.
A folder may use the shared modules below, and the folders of formats that its system is made of. Readers read
no arrays, run no code of a checkpoint and import no framework.

| module | what it owns |
|---|---|
| `readers`, `writers` | the systems that can be read and written: to add one, list it here |
| `source` | the records that describe a foreign checkpoint |
| `recognition`, `checking`, `inflation` | which system wrote a checkpoint; what can be verified; traps |
| `rules`, `patterns`, `spec`, `spec_file`, `spec_check`, `presets` | the language for layouts: `Spec` |
| `cuts`, `union`, `split`, `whole_source` | from the tensors of ranks to whole leaves, and back |
| `renaming`, `foreign_names` | other names while restoring, and the names that a parameter had before |
| `state_tree`, `training_state`, `optimizer_names` | the state that a reader found, as our tree and leaves |
| `foreign_checkpoint`, `reduction` | a description as a checkpoint that the native path reads |
| `conversion`, `items`, `readback` | `convert`: which leaves go where, under which names; `verify` |
| `native_target`, `atomic_output` | checkpoints of ours; outputs that appear whole or not at all |
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
from everystep.universal.source import Computed, Source, SourceFragment, SourceLeaf, flat_fragments
from everystep.universal.spec import Spec

__all__ = [
    "Computed",
    "Converted",
    "Rule",
    "Source",
    "SourceFragment",
    "SourceLeaf",
    "Spec",
    "convert",
    "describe",
    "flat",
    "flat_fragments",
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
