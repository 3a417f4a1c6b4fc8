"""Everything that is measured: one harness, and one file per suite. Uses public names of Everystep only.

| module | what it owns |
|---|---|
| `suite` | what a measurement declares: suite, group, case, and the turn in which a case times its calls |
| `runner` | interleaved rounds, warm-up, cleaning up |
| `results` | what was measured, as typed records; medians, ratios, intervals, and the verdict on a promise |
| `views`, `report`, `plot` | tables, JSON, markdown, pictures |
| `costs`, `cache`, `machine` | clocks and memory; the page cache; the machine and its free space |
| `states`, `training_model` | the state that is saved; the model that is trained |
| `peers` | the registry of systems that are compared, made equally durable |
| `child` | a process of our own that answers orders |
| `world`, `rank` | real ranks in processes of their own, and the orders they follow |
| `suites` | what is measured, one file each |
| `commands` | ``everystep bench`` and ``everystep study``, as plugins of the command |
| `campaign`, `results_directory` | ``everystep study``: suites over frameworks, and what they found |
| `frameworks`, `environments` | the frameworks of the study in processes, and environments, of their own |
| `report_parts`, `report_page` | the study's report; what it says of a suite stands in the suite's file |
"""
