"""The fixture of crash tests. A project turns it on in its conftest.py:

pytest_plugins = ["outbox.contrib.crash_kit.pytest_plugin"]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from outbox.pytest_plugin import let_use_broker

if TYPE_CHECKING:
    from outbox.contrib.crash_kit.kit import CrashKit


@pytest.fixture
def outbox_crashes(transactional_db: None) -> Iterator[CrashKit]:
    """A function that runs a crash test: a scenario once for each of its steps, with a process killed there.

    A test whose scenario or handlers write on other aliases than `default` names all its databases and the broker's
    alias in the mark `django_db(transaction=True, databases=…)`.
    """
    from outbox.contrib.crash_kit.testing import crash_tests

    with crash_tests() as kit:
        yield kit


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests with `outbox_crashes` use the broker's database, before pytest-django sorts the tests."""
    let_use_broker(items, "outbox_crashes")
