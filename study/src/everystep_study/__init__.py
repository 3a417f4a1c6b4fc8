"""Everything that is measured: one harness, and one file per suite. Uses public names of Everystep only.

| module | what it owns |
|---|---|
| `suite` | what a measurement declares: suite, group, case, and the turn in which a case times its calls |
| `runner` | interleaved rounds, warm-up, cleaning up |
| `results` | what was measured, as typed records; medians, ratios, intervals, and the verdict on a promise |
| `report`, `pages` | tables, charts and sections; what the pages of both commands show of results |
| `writers`, `plot` | a page as Markdown, HTML or tables of a terminal; its charts as a picture |
| `costs`, `cache`, `machine` | clocks and memory; the page cache; the machine and its free space |
| `states`, `training_model` | the state that is saved; the model that is trained |
| `peers` | the registry of systems that are compared, made equally durable |
| `child` | a process of our own that answers orders |
| `world`, `rank` | real ranks in processes of their own, and the orders they follow |
| `suites` | what is measured, one file each |
| `commands` | ``everystep bench`` and ``everystep study``, as plugins of the command |
| `campaign`, `results_directory` | ``everystep study``: suites over frameworks, and what they found |
| `frameworks`, `environments` | the frameworks of the study in processes, and environments, of their own |
"""
