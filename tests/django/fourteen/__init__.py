"""An app with fourteen groups, with default settings."""

from typing import Final

GROUPS: Final = [f"group{number}" for number in range(14)]
