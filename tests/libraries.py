"""The libraries that `make install` leaves out because they are large, and the tests that need one of them.

A run without the library names these tests as skipped. `make install-all` installs all libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

# The import name of the library, and the files and folders below tests/.
NEEDED_BY: Final = {
    "asyncpg": ("sqlalchemy",),
    "confluent_kafka": ("sinks/test_kafka.py",),
    "grpc": ("rocketmq", "django/test_engines.py", "django/test_relay.py"),
    "moto": ("django/test_large_bodies_s3.py",),
    "pyspark": (
        *("benchmarks", "runbooks", "spark"),
        *("django/test_erasure.py", "test_operator_documents.py", "test_other_users.py"),
    ),
    "sphinx": ("test_site.py",),
    "whitenoise": ("sample",),
}


def _is_installed(library: str) -> bool:
    return find_spec(library) is not None


def why_left_out(path: Path, tests: Path, is_installed: Callable[[str], bool] = _is_installed) -> str:
    """Why a file or folder cannot be collected; '' if all that it needs is installed."""
    for library, places in NEEDED_BY.items():
        if any(path.is_relative_to(tests / place) for place in places) and not is_installed(library):
            return f"tests/{path.relative_to(tests)} needs {library}, which `make install-all` installs"
    return ""
