"""ranks: saving and loading by all ranks of a process group.

| module | what it owns |
|---|---|
| `transport` | who the ranks are; telling, agreeing, exchanging small messages, each with a time-out |
| `membership`, `machines` | how ranks come together, and where they run |
| `message_store` | messages over the process group's store; what it means when the store is gone |
| `replies` | who was not heard of, where an answer of every rank is needed |
| `save_round` | what ranks say to each other during a save |
| `errors` | how ranks tell each other what went wrong |
| `group` | the ranks that save and load together: from joining to closing |
| `write_shares` | which fragments each rank writes |
| `checks` | whether ranks agree: values, replicas, layouts |
| `shared_load` | a load by all ranks |
| `read_shares` | what several ranks want alike, read once per node |
| `exchange` | handing such bytes from rank to rank |
| `remote_shards` | shards on volumes that only other nodes see |
| `channel` | the connections between ranks that bytes go over |
| `consensus` | one rank's error as the result of all |
| `open_together` | one checkpoint, opened by all ranks |
"""
