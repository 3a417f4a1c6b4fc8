"""What the modules named after training frameworks share (`holdfast.lightning`, ...).

Each of those modules imports its framework when it is imported itself. Nothing else of Holdfast does.
"""

from __future__ import annotations
