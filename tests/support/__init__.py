"""What tests share. Import as `support.FOLDER.name`.

| folder | what it has |
|---|---|
| `crashes` | crashes, failing calls and power cuts, and what must hold after them |
| `worlds` | several ranks, real and simulated, and the layouts of what they train |
| `foreign` | checkpoints of other systems, and what their libraries read in them |
| `shelves` | crashes of shelves, and fits that are killed |
| `states` | states, arrays, memory and runs to try things on |
| `processes` | processes: the command, scripts, documents, environments with other libraries |
| `study` | frameworks and results that are made up, for the study's tests |
"""
