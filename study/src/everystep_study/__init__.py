"""Everything that is measured: one harness, and one file per suite. Uses public names of Everystep only.

| folder or module | what it owns |
|---|---|
| `harness` | how things are measured: suites, cases, rounds, clocks, the page cache; results as records |
| `report` | what is shown of results: tables, charts, pages, and their writers |
| `mechanisms` | the ways to checkpoint, one class each, for both commands |
| `frameworks` | the frameworks of the study: their models, trainings, and mechanisms of their own |
| `workers` | processes that follow orders: frameworks in environments of their own, ranks |
| `suites` | what is measured and what the report says of it, one file each |
| `campaign` | ``everystep study``: suites over frameworks |
| `commands` | ``everystep bench`` and ``everystep study``, as plugins of the command |
| `environments` | the virtual environments of frameworks |
| `programs` | programs that the suite ``convert`` runs |
"""
