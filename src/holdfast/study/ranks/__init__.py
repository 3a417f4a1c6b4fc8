"""What several ranks gain by saving together, beside the alternatives (`holdfast bench --ranks 1,2,4`).

| room | what it owns |
|---|---|
| `bench` | the whole run, from options to result |
| `world`, `orders` | real processes in a process group; what they are told to do, and what they answer |
| `child`, `systems` | one of these processes; each way in which it saves and loads |
| `measure`, `shares` | in which order things are measured; who wrote how much of what was saved |
| `results`, `bars` | what was measured, as typed records; the promises held against it |
| `report`, `plot` | tables and JSON; a picture |
"""
