"""universal: foreign checkpoints, described in the records of our own format, and the language for them.

- `rules`, `patterns`, `spec`, `spec_file`, `presets`: the language, which says how parameters are laid out.
- `cuts`, `union`, `split`: the arithmetic. From the tensors of ranks to whole leaves, and back.
- `source`: what a foreign checkpoint is to its readers. `sources`: one module per system.
"""

from __future__ import annotations

from holdfast.universal.rules import Rule as Rule
from holdfast.universal.rules import flat as flat
from holdfast.universal.rules import fused as fused
from holdfast.universal.rules import pad as pad
from holdfast.universal.rules import part as part
from holdfast.universal.rules import partial as partial
from holdfast.universal.rules import rename as rename
from holdfast.universal.rules import replicated as replicated
from holdfast.universal.rules import rule as rule
from holdfast.universal.rules import shard as shard
from holdfast.universal.rules import tied as tied
from holdfast.universal.rules import unique as unique
from holdfast.universal.spec import Spec as Spec
