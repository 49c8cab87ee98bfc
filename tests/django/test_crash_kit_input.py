"""What the crash kit refuses before its first run."""

from __future__ import annotations

import pytest
from django.db import connections

from outbox.contrib.crash_kit.baseline import Baseline
from outbox.errors import UsageError


@pytest.mark.usefixtures("databases")
def test_the_crash_kit_refuses_a_pool_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(connections["default"].settings_dict, "OPTIONS", {"pool": True})
        with pytest.raises(UsageError, match="'default', because it has a connection pool"):
            Baseline(["default"], broker_schema="outbox")
        connections["default"].close_pool()  # type: ignore[attr-defined]
