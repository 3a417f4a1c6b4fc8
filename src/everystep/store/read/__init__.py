"""read: from a path to verified bytes in memory.

| module | what it owns |
|---|---|
| `listing` | the checkpoints of a run, and others in a directory |
| `references` | short names of a run's checkpoints, such as ``RUN@30`` |
| `open` | which checkpoint a path means, and its manifest |
| `foreign` | checkpoints of other systems, by names of modules of a layer above |
| `read_errors` | typed errors for reads that failed, and retries |
| `file_access` | how the files of an open checkpoint are reached |
| `reader_lock` | a reader's lock: no writer overwrites what it reads |
| `parts` | what the manifest says: parts, leaves, tree, values |
| `requests` | which boxes of leaves go to which memory |
| `gather` | which files they come from |
| `shard_reader` | reads of one part's shards, verified |
| `scatter` | one fragment that goes to several places |
| `leaf_reader` | reads of leaves into fresh arrays or given memory |
| `lazy_leaf`, `subtree` | a leaf that is read as far as it is indexed; all leaves whose names begin alike |
| `selection` | which leaves names and globs select |
| `restoring` | a checkpoint restored into a target |
| `checkpoint` | `Checkpoint`: an open checkpoint |
| `verify`, `consistency` | the full check of a checkpoint |
"""
