"""read: from a path to verified bytes in memory.

| module | what it owns |
|---|---|
| `listing` | the checkpoints of a run, and others in a directory |
| `references` | short names of a run's checkpoints, such as ``RUN@30`` |
| `open` | which checkpoint a path means, and its manifest |
| `reader_lock` | a reader's lock: no writer overwrites what it reads |
| `parts` | what each rank wrote |
| `requests` | which boxes of leaves go to which memory |
| `gather` | which files they come from |
| `shard_reader` | reads of one part's shards, verified |
| `scatter` | one fragment that goes to several places |
| `leaf_reader` | reads of leaves into fresh arrays or given memory |
| `lazy_leaf` | a leaf that is read as far as it is indexed |
| `subtree` | all leaves whose names begin alike |
| `stored_checkpoint` | a checkpoint: what it holds, and loads of it |
| `verify`, `tree_check` | the full check of a checkpoint |
"""
