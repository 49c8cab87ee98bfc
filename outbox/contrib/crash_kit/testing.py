"""Crash tests for applications. With pytest, the fixture `outbox_crashes` (pytest_plugin.py) provides the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outbox.contrib.crash_kit.kit import CrashKit
from outbox.contrib.django.engine.broker import get_engine
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.testing import BrokerOutbox, changed_settings


@contextmanager
def crash_tests(*, groups: Sequence[str] = (), **settings: Any) -> Iterator[CrashKit]:
    """Inside the block, run crash tests with the yielded object, on a real broker.

    The parameters are the same as for `in_memory_outbox`. Before each run, all databases of the running test get back
    the rows that they had when the crash test began.
    """
    with TemporaryDirectory(prefix="outbox-crashes-") as folder:
        # Chance decides which messages share a transaction. So each message has a transaction of its own.
        alone = {"IMMUNITY_SECONDS": 0, "CHECK_INTERVAL_SECONDS": 0.5, "MESSAGES_PER_COMMIT": 1}
        with changed_settings({**alone, **settings, "IN_MEMORY": False}):
            get_engine().refusals.require("run_once", "a crash test")
            broker = BrokerOutbox(groups)
            yield CrashKit(
                folder=Path(folder),
                aliases=ledger_aliases(usable=True),
                reset_messages=broker.empty,
                broker_schema=get_settings().schema,
                groups=groups,
            )
            broker.empty()
