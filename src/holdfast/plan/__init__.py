"""plan: which bytes go where in which shard, and which bytes of a shard a reader needs.

Pure arithmetic on descriptions; nothing here reads or writes. Single-process for now: one shard on one
volume.
"""

from __future__ import annotations

from holdfast.plan.layout import Layout, ShardPlan, arrange, plan_shard
from holdfast.plan.reading import ByteRange, gaps, rows_to_read

__all__ = ["ByteRange", "Layout", "ShardPlan", "arrange", "gaps", "plan_shard", "rows_to_read"]
