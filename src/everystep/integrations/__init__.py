"""What the modules named after training frameworks share (`everystep.lightning`, ...).

Each of those modules imports its framework when it is imported itself. Nothing else of Everystep does.
"""

from __future__ import annotations
