"""Comparisons: Holdfast measured beside what people use today, in one run, on one machine.

| room | what it owns |
|---|---|
| `states` | the state that is saved: its shapes, its size, its bytes |
| `peers`, `limits` | each system that saves it, made equally durable; the device's own limit |
| `cache`, `measure` | what is read from the clock, the CPU and memory; in which order; how cold |
| `probes` | the two costs that are not throughput: a tiny save, and `import holdfast` |
| `results`, `bars` | what was measured, as typed records; the promises held against it |
| `report`, `plot`, `picture` | a table, a JSON document, a picture; what all pictures share |
| `room` | whether there is room for a benchmark, and on what machine it runs |
| `bench` | the whole run, from options to result |
| `training` | the same for a training that saves every step (`holdfast bench --training`) |
| `ranks` | the same for several ranks that save one state together (`holdfast bench --ranks`) |
| `scale`, `scale_report` | planning for thousands of ranks, simulated |

Nothing below this floor knows that it exists. Nothing here is imported by ``import holdfast``.
"""
