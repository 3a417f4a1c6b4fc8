"""plan: which rank writes or reads which bytes, on which volume, and where in which shard.

Pure arithmetic on descriptions; nothing here reads, writes or communicates.

| module | what it owns |
|---|---|
| `layout` | one shard: the place of each leaf, and the bytes of it that a request needs |
| `placement`, `topology` | who holds what, as meshes and splits; where ranks run, and which of them write |
| `world`, `dtensor` | from what each rank sees to who holds what; from DTensor's words to splits |
| `replica_groups`, `byte_stream` | bytes that the same ranks hold, end to end; where these are best cut |
| `ranks`, `volumes` | writing: every byte once and evenly, by ranks, then by volumes |
| `fragments` | between arrays in memory and boxes of leaves |
| `description` | a writing plan as bytes: to be compared between ranks, and kept for readers |
| `resharding`, `read_sharing` | reading in any other layout; once per node, where peers want the same |

This package exports what one process alone needs. Modules for many ranks are imported by name.
"""

from __future__ import annotations

from everystep.plan.layout import ByteRange, ShardLayout, ShardPlan, arrange, plan_shard, rows_to_read

__all__ = ["ByteRange", "ShardLayout", "ShardPlan", "arrange", "plan_shard", "rows_to_read"]
