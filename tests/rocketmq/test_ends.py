"""The ends of a process that exits at once, on a server that asks about nothing for an hour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outbox.contrib.django.engine import broker as broker_access
from tests.rocketmq.conftest import running_server
from tests.rocketmq.project import Project, expected, make_project, nothing_lost_invented_or_doubled

HOUR = 3_600_000


@pytest.fixture
def project(programs: Path, application: None, outbox_settings: Callable[..., None]) -> Iterator[Project]:
    """A project whose server takes ends and sends no checks."""
    with running_server(programs, transactionTimeOut=HOUR, transactionCheckInterval=HOUR) as server:
        project = make_project(server)
        outbox_settings(**project.outbox)
        yield project
        broker_access.reset_broker()


def test_the_last_end_of_a_process_is_sent_at_its_exit(project: Project) -> None:
    """Twelve processes publish and end without a flush of their own. Only their end messages can deliver."""
    for batch in range(4):
        ends = project.produced({f"p{batch}-{number}": "" for number in range(3)}, "exits", rounds=1)
        assert set(ends.values()) == {0}
    assert len(expected()) == 2 * 2 * 12
    with project.consumer():
        nothing_lost_invented_or_doubled(within_seconds=60)
