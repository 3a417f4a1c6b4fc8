"""team: the ranks that save together, and the small messages between them.

| room | what it owns |
|---|---|
| `mail` | messages over the process group's store, with time-outs; what it means when the store is gone |
| `meeting`, `places` | how ranks come together, and who they are |
| `team` | what a team does: tell, agree, exchange |
| `hearing` | who was not heard of, where an answer of everybody is needed |
| `views` | what each rank sees of the state, as bytes, and everybody's |
| `replicas` | whether ranks that should hold equal copies of arrays do, by digests |
| `values` | whether their plain values agree, and whether their states can be stored as one |

No collectives: every thread may use it while the training is in the middle of one.
"""

from __future__ import annotations

from holdfast.team.mail import Mail, Silence, sendable
from holdfast.team.team import Member, Team, join
from holdfast.team.views import decode_view, encode_view, exchange_views

__all__ = [
    "Mail",
    "Member",
    "Silence",
    "Team",
    "decode_view",
    "encode_view",
    "exchange_views",
    "join",
    "sendable",
]
