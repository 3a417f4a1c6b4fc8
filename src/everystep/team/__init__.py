"""team: the ranks that save together, and the small messages between them.

| module | what it owns |
|---|---|
| `mail` | messages over the process group's store, with time-outs; what it means when the store is gone |
| `rendezvous`, `machines` | how ranks come together, and who they are |
| `group` | what a team does: tell, agree, exchange |
| `replies` | who was not heard of, where an answer of everybody is needed |

No collectives: every thread may use it while the training is in the middle of one.
"""

from __future__ import annotations

from everystep.team.group import Member, Ranks, Team, join
from everystep.team.mail import Mail, Silence, sendable

__all__ = [
    "Mail",
    "Member",
    "Ranks",
    "Silence",
    "Team",
    "join",
    "sendable",
]
