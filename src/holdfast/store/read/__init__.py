"""read: from a path to verified bytes in memory.

| module | what it owns |
|---|---|
| `listing` | the checkpoints of a run |
| `open` | which checkpoint a path means, and its manifest |
| `reader_lock` | a reader's lock: no writer overwrites what it reads |
| `parts` | what each rank wrote |
| `requests` | which boxes of leaves go to which memory |
| `gather` | which files they come from |
| `shard_reader` | reads of one part's shards, verified |
| `scatter` | one fragment that goes to several places |
| `lazy_leaf` | a leaf that is read as far as it is indexed |
| `verify`, `tree_check` | the full check of a checkpoint |
"""
