"""How things are measured, whatever they are. Knows no mechanism and no framework.

| module | what it owns |
|---|---|
| `suite` | what a measurement declares: suite, group, case, and the turn in which a case times its calls |
| `runner` | interleaved rounds, warm-up, cleaning up |
| `results` | what was measured, as typed records; medians, ratios, intervals, and the verdict on a promise |
| `results_directory` | the file of JSON lines of ``everystep study`` |
| `costs`, `cache`, `machine` | clocks and memory; the page cache; the machine and its free space |
| `files` | syncing, listing and removing files; what is not installed |
"""
