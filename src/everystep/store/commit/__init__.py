"""commit: how a checkpoint becomes durable, all or nothing.

| module | what it owns |
|---|---|
| `driver` | the commit of one checkpoint, by one process or all ranks of a group |
| `transaction` | the partial directory and the rename that commits: make, seal, publish, abort |
| `existing_directory` | committing into a directory that exists, beside other files |
| `share` | what one process writes of a state, and what it reports of that |
| `round` | what the processes of one save tell each other meanwhile; of one alone, nothing |
| `shard_writer` | the shards of one process: writing, checksums, sync |
| `manifest` | the records that describe what was written |
| `volumes` | shards outside of the checkpoint's directory, and their removal |
| `observer` | what a caller may learn, and do, during a commit |
| `info` | what a save reports |
"""
