"""The environment variable OUTBOX_FAST_PATHS=off switches all fast paths of a process off.

A fast path has the same effect as a plain statement of psycopg or a plain `transaction.atomic` of Django. A fast path
takes less CPU or fewer round trips than the plain code. With the switch off the plain code runs, and outbox works in
the same way, but slower. Use the switch to find out whether a fast path causes a problem.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from outbox.errors import ConfigurationError

VARIABLE: Final = "OUTBOX_FAST_PATHS"

logger = logging.getLogger(__name__)


def _read() -> bool:
    given = os.environ.get(VARIABLE, "on").strip().lower()
    if given not in ("on", "off"):
        raise ConfigurationError(f"the environment variable {VARIABLE} is {given!r}: set it to on or off, or unset it.")
    if given == "off":
        logger.warning("the fast paths are off (%s=off): outbox works in the same way, but slower", VARIABLE)
    return given == "on"


# A process reads the variable once, at its start. After the start of the process, only tests change the switch.
enabled = _read()
