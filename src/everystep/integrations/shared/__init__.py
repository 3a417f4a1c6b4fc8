"""shared: what several integrations need, and no user. What one integration needs is in its own folder.

| module | what it owns |
|---|---|
| `frameworks` | whether a framework's version is supported; names that are imported on first use |
| `states` | objects of a framework, and what a caller adds, as parts of a state; whether a checkpoint fits |
| `folders` | checkpoints in a folder whose names a framework chooses |
"""
