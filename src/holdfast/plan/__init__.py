"""plan: which rank writes or reads which bytes, on which volume, and where in which shard.

Pure arithmetic on descriptions; nothing here reads, writes or communicates.

| room | what it owns |
|---|---|
| `layout`, `reading` | one shard: the place of each leaf, and the bytes of it that a request needs |
| `placement`, `topology` | who holds what, as meshes and splits; where ranks run, and which of them write |
| `world`, `dtensor` | from what each rank sees to who holds what; from DTensor's words to splits |
| `cohorts`, `tape` | bytes that the same ranks hold, laid end to end; where such a tape is best cut |
| `ranks`, `volumes` | writing: every byte once and evenly, by ranks, then by volumes |
| `fragments` | between arrays in memory and boxes of leaves |
| `description` | a writing plan as bytes: to be compared between ranks, and kept for readers |
| `resharding`, `sharing` | reading in any other layout; once per node, where peers want the same |

What one process alone needs is exported here; the rooms for many ranks are imported by name.
"""

from __future__ import annotations

from holdfast.plan.layout import Layout, ShardPlan, arrange, plan_shard
from holdfast.plan.reading import ByteRange, gaps, rows_to_read

__all__ = ["ByteRange", "Layout", "ShardPlan", "arrange", "gaps", "plan_shard", "rows_to_read"]
