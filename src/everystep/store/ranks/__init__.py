"""ranks: saving and loading by all ranks of a process group.

| module | what it owns |
|---|---|
| `message_store` | messages over the process group's store; what it means when the store is gone |
| `transport` | which ranks there are, and what a process keeps of them from call to call |
| `membership` | who the ranks are, and where they run |
| `meeting` | what ranks say to each other for one thing, from its opening to the clean-up |
| `save_round` | the messages of a save, and the order of a Checkpointer's saves |
| `errors` | how ranks tell each other what went wrong |
| `group` | the ranks that save and load together: from meeting to closing |
| `write_shares` | which fragments each rank writes |
| `checks` | whether ranks agree: values, replicas, layouts |
| `shared_load` | a load by all ranks |
| `read_shares` | what several ranks want alike, read once per node |
| `exchange` | handing such bytes from rank to rank |
| `remote_shards` | shards on volumes that only other nodes see |
| `channel` | the connections between ranks that bytes go over |
| `open_together` | one checkpoint, opened by all ranks |
"""
