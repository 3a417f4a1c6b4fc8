"""shared: what several integrations need, and no user.

| module | what it owns |
|---|---|
| `first_use` | names that are imported when they are first used |
| `versions` | whether a framework is of a version that is supported |
| `checkpointer_options` | the options that a callback keeps for the `Checkpointer` it will make |
| `attributes`, `entries` | objects of a framework, and what a caller adds, as state |
| `fitting` | whether a checkpoint fits the training that is to load it |
| `folders` | checkpoints in a folder whose names a framework chooses |
| `late_step` | frameworks that run forward and backward inside of ``optimizer.step`` |
"""
