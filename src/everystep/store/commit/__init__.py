"""commit: how a checkpoint becomes durable, all or nothing.

| module | what it owns |
|---|---|
| `transaction` | the partial directory and the rename that commits: make, seal, publish, abort |
| `existing_directory` | committing into a directory that exists, beside files of others |
| `single` | the driver for one process and one shard |
| `shard_writer` | the files of one rank: shards and part |
| `manifest` | the records that describe what was written |
| `volumes` | shards outside of the checkpoint's directory, and their removal |
| `round` | what the processes of one save tell each other meanwhile; of one alone, nothing |
| `observer` | what a caller may learn, and do, during a commit |
| `info` | what a save reports |
"""
