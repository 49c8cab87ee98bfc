"""docs/celery.md is true: typed unchanged in an empty folder, on the wheel, with a worker and a Redis."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.celery.project import Project, blocks, write_page
from tests.servers import private_redis
from tests.support import eventually
from tests.wheel import ROOT, Environments


@pytest.fixture
def project(tmp_path: Path, new_database: Callable[..., str]) -> Iterator[Project]:
    """An empty folder, and the services of the page: two databases and a Redis."""
    folder = tmp_path / "project"
    folder.mkdir()
    with private_redis(tmp_path) as socket:
        made = Project(folder, new_database(), new_database(), f"redis+socket://{socket}")
        yield made
        made.stop()


@pytest.mark.timeout(300)
@pytest.mark.soak
def test_the_page_unchanged(environments: Environments, project: Project) -> None:
    """A code block that begins with a file's name is in that file; the commands are those of the page."""
    install, migrate, worker, calls = blocks("sh")
    pip, verb, *requirements = shlex.split(install)
    assert (pip, verb) == ("pip", "install")
    project.use_only(environments.with_installed(*requirements))
    write_page(project.folder)
    assert str(ROOT) not in project.shell("python -c 'import outbox, shop; print(outbox.__file__, shop.__file__)'")
    project.shell(migrate)
    _, log = project.start("sh", "-c", f"exec {worker.strip()}")
    eventually(project.is_healthy, within_seconds=120, what=log.read_text)
    assert "A-2 is not paid after all" in project.shell(calls)
    paid = ["invoice for A-1", "shipping A-1", "thanks for A-1"]
    eventually(lambda: project.mails() == paid, within_seconds=120, what=log.read_text)
    assert project.rows("SELECT number FROM shop_order") == [("A-1",)]
