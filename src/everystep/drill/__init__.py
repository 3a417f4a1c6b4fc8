"""drill: kill a user's own training again and again, resume it, and compare it with an undisturbed one.

    from everystep import drill

    drill.run_drill(drill.DrillOptions(("python", "train.py"), times=10)).ok

| module | what it owns |
|---|---|
| `procedure` | the order of events, and what counts as a problem |
| `kill_times` | when to kill: moments drawn over the training, some inside a save or a restore |
| `processes` | starting the script, and killing it with everything it started |
| `activity` | reading what its Checkpointer logs under a drill (`everystep.checkpointer.drilling`) |
| `comparison` | comparing every checkpoint that both trainings made |
| `likely_causes` | the usual causes of a difference |
| `report` | the result, as records |
"""

from __future__ import annotations

from everystep.drill.procedure import DrillOptions, DrillProgress, run_drill
from everystep.drill.processes import DrillFailed
from everystep.drill.report import DrillProblem, DrillReport, Killed, Times

__all__ = [
    "DrillFailed",
    "DrillOptions",
    "DrillProblem",
    "DrillProgress",
    "DrillReport",
    "Killed",
    "Times",
    "run_drill",
]
