"""Everything that is measured: one harness, and one file per suite. Uses public names of Everystep only.

| module | what it owns |
|---|---|
| `mechanism` | one way to checkpoint: `Mechanism`, and those of Everystep; the same in both commands |
| `competitors` | which mechanisms ``everystep bench`` compares |
| `suite`, `runner` | what a measurement declares; interleaved rounds, warm-up, cleaning up |
| `suites` | what is measured and what the report says of it, one file each |
| `results`, `results_directory` | what was measured, as typed records; promises; the file of a study |
| `report`, `pages` | tables, charts and sections; what the pages of both commands show of results |
| `writers`, `plot` | a page as Markdown, HTML or tables of a terminal; its charts as a picture |
| `costs`, `cache`, `machine`, `files` | clocks, memory, the page cache, the machine, syncing files |
| `raw_device` | the device's own speed, which saves and loads are compared with |
| `states` | the state that ``everystep bench`` saves, and the sizes of its GPT-2 |
| `workers`, `worker` | processes that follow orders: frameworks and ranks; their own end |
| `rank_orders` | what ranks do |
| `frameworks`, `environments` | the frameworks of the study, and the environments in which they run |
| `campaign` | ``everystep study``: suites over frameworks |
| `commands` | ``everystep bench`` and ``everystep study``, as plugins of the command |
| `timed_command`, `restoring_rank`, `zero_writer` | programs that the suite ``convert`` runs |
"""
