"""One PostgreSQL for the whole run, one database per test, as its template is."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psycopg
import pytest

from outbox.broker import embedded
from tests import leftovers, libraries
from tests.databases import Pool, drop_databases, new_name
from tests.sample.browser import Chromium
from tests.servers import RabbitMQ, copy_cluster
from tests.wheel import Environments, build

# On a loaded machine, an example takes longer than the 200 ms that Hypothesis allows by default.
hypothesis.settings.register_profile("outbox", deadline=None)
hypothesis.settings.load_profile("outbox")

SERVER_SETTINGS = {
    "max_connections": "400",
    "shared_buffers": "256MB",
    "max_wal_size": "1GB",
    "max_prepared_transactions": "20",
    # Most of the server's work is to begin and end sessions, and most of them call functions in this language.
    "shared_preload_libraries": "plpgsql",
    # It would begin a session in each of some hundred small databases again and again.
    "autovacuum_naptime": "1h",
}
_numbers = itertools.count(1)

# The tests of such a place stay on one worker of a parallel run: what they share (a demo, a wheel, a server, migrated
# databases) takes longer to make than they take.
ONE_WORKER = (
    "tests/celery/",
    "tests/crash_kit/",
    "tests/mistakes/",
    # They have servers of their own.
    "tests/rocketmq/test_checks.py",
    "tests/rocketmq/test_left.py",
    "tests/rocketmq/",
    "tests/sample/",
    "tests/test_packaging",
    "tests/test_site.py",
)
# All tests of one of these files read the same sources.
SOURCES = ("tests/test_architecture.py", "tests/test_definitions.py", "tests/test_documents.py", "tests/test_layers.py")
# Their servers take half a minute to start, and their tests minutes.
LONGEST = ("tests/rocketmq/", "tests/spark/")
# They take seconds in all, so a worker that takes them last ends no later than the others.
SHORTEST = ("tests/core/", *SOURCES)
# The roles of these tests belong to the whole server. With a server of their own, the workers need not share one.
ONE_WORKER_OF_A_SERVER = ("tests/broker/schema/test_grants.py",)


def unit_of_work(nodeid: str, root: Path = Path(), spark_workers: int = 1) -> str:
    """The unit that a worker takes: one test, or all that belong together."""
    file = nodeid.partition("::")[0]
    together = ONE_WORKER + (ONE_WORKER_OF_A_SERVER if embedded.URL_VARIABLE in os.environ else ())
    place = next((place for place in together if file.startswith(place)), None)
    return place or spark_units(root, spark_workers).get(file) or (file if shares(root / file) else nodeid)


@functools.cache
def spark_units(root: Path, workers: int) -> dict[str, str]:
    """The unit of each file whose tests use a Spark session, the largest files apart from each other."""
    files = [path for path in (root / "tests" / "spark").glob("test_*.py") if _uses_a_session(path)]
    files.sort(key=lambda path: (-path.stat().st_size, path.name))
    return {path.relative_to(root).as_posix(): f"tests/spark/ {number % workers}" for number, path in enumerate(files)}


def _uses_a_session(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return "spark_session" in text or "reconcile: Reconciler" in text


@functools.cache
def shares(path: Path) -> bool:
    """Whether the tests of a file share a fixture, or the sources that they read."""
    text = path.read_text(encoding="utf-8")
    return 'scope="module"' in text or "rabbitmq" in text or path.as_posix().endswith(SOURCES)


@functools.cache
def gate() -> frozenset[str]:
    """The tests that gate.txt lists, with the parameters that it names."""
    lines = Path(__file__).with_name("gate.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(f"tests/{line}" for line in lines if line and not line.startswith("#") and " = " not in line)


_folder = pytest.StashKey[Path]()
_left = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """A run may set how long processes have to end after the last test."""
    parser.addini("leftover_seconds", "how long processes may take to end after the last test", default="15")
    parser.addini("spark_workers", "how many workers of a parallel run start a Spark session", default="1")


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a folder of its own; workers have it from the process that started them."""
    if not hasattr(config, "workerinput"):
        config.stash[_folder] = leftovers.make_folder()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape halves of surrogate pairs in what a test printed: a worker could not pass them on, and would end."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    if report.failed and not str(report.longrepr).isascii():
        report.longrepr = str(report.longrepr).encode(errors="backslashreplace").decode()
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the collector of garbage: all that it would look through, again and again, stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that still runs after the last test fails the run."""
    if folder := session.config.stash.get(_folder, None):
        seconds = float(session.config.getini("leftover_seconds"))
        session.config.stash[_left] = left = leftovers.left_running(folder, within_seconds=seconds)
        if left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name it."""
    if left := config.stash.get(_left, []):
        terminalreporter.section("FAILED: left running by the tests", red=True)
        for line in left:
            terminalreporter.line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder."""
    if folder := config.stash.get(_folder, None):
        leftovers.remove_folder(folder)


class LeftOut(pytest.Collector):
    """A folder whose conftest.py and tests need a library that is not installed."""

    def collect(self) -> list[pytest.Item]:
        """Skip the folder."""
        pytest.skip(libraries.why_left_out(self.path, Path(__file__).parent))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import the files of gate.txt alone in a run of the gate: five workers import what they collect."""
    if collection_path.name.startswith("test_") and re.search(r"\band gate\b", config.option.markexpr):
        return collection_path.relative_to(config.rootpath).as_posix() not in {one.partition("::")[0] for one in gate()}
    return None


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Leave a folder out before its conftest.py is imported."""
    why = libraries.why_left_out(path, Path(__file__).parent)
    return LeftOut.from_parent(parent, name=path.name, nodeid=f"tests/{path.name}", path=path) if why else None


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> pytest.CollectReport | None:
    """Leave a file out before its imports fail."""
    if not isinstance(collector, pytest.Module):
        return None
    why = libraries.why_left_out(collector.path, Path(__file__).parent)
    return pytest.CollectReport(collector.nodeid, "skipped", (str(collector.path), 0, why), []) if why else None


# Before pytest selects by markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is listed in gate.txt; in a parallel run the longest units come first, and the shortest last."""
    listed = gate()
    for item in items:
        if item.nodeid in listed or item.nodeid.partition("[")[0] in listed:
            item.add_marker("gate")
        if item.nodeid.startswith("tests/spark/"):
            item.add_marker("spark")
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _turn(item.nodeid, config.rootpath))


def _turn(nodeid: str, root: Path) -> int:
    if nodeid.startswith(SHORTEST):
        return 3
    if nodeid.startswith(LONGEST):
        return 0
    return 2 if unit_of_work(nodeid, root) == nodeid else 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out units of work, in the order of the collection."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    workers = int(config.getini("spark_workers"))
    scheduler._split_scope = functools.partial(unit_of_work, root=config.rootpath, spark_workers=workers)
    return scheduler


@pytest.fixture(scope="session", autouse=True)
def _browser_ends() -> Iterator[None]:
    yield
    Chromium.end()


@pytest.fixture(scope="session")
def rabbitmq_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """A private RabbitMQ that has started."""
    server = RabbitMQ(tmp_path_factory.mktemp("rabbitmq"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The URL of a PostgreSQL in which databases can be created."""
    with leftovers.server_folder() as folder:
        data = folder / "data"
        if embedded.URL_VARIABLE not in os.environ:
            copy_cluster(data)
        url = embedded.server_url(data, settings=SERVER_SETTINGS)
        yield url
        if embedded.URL_VARIABLE not in os.environ:
            left = databases(url)
            embedded.stop(data)
            assert left == [], "databases that no test dropped"


def databases(url: str) -> list[str]:
    """The databases that are not the server's own."""
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT datname FROM pg_database WHERE NOT datistemplate AND datname <> 'postgres'")
        return sorted(name for (name,) in rows)


@pytest.fixture(scope="session")
def broker_template(server_url: str) -> Iterator[str]:
    """The name of a template database with the broker's schema installed, and tables for what handlers do."""
    from outbox.broker.schema.install import install
    from tests.broker.bench import TABLES
    from tests.django import configured

    # The tables of all parts, which a process requires as soon as a test has configured Django in it.
    assert configured.OUTBOX
    name = f"outbox_template_{os.getpid()}"
    url = embedded.create_database(server_url, name)
    with psycopg.connect(url, autocommit=True) as connection:
        install(connection, "outbox")
        connection.execute(TABLES)
    yield name
    drop_databases(server_url, [name])


@pytest.fixture(scope="session")
def database_pool(server_url: str) -> Iterator[Pool]:
    """Databases that tests gave back, put back as their templates are."""
    pool = Pool(server_url)
    yield pool
    pool.close()


@pytest.fixture
def new_database(server_url: str, database_pool: Pool) -> Iterator[Callable[..., str]]:
    """A function that returns the URL of a database of this test's own: never used before, or as a template is."""
    created: list[str] = []
    taken: list[tuple[str, str]] = []

    def create(*, template: str = "") -> str:
        if template:
            name = database_pool.take(template)
            taken.append((name, template))
            return embedded.database_url(server_url, name)
        created.append(new_name())
        return embedded.create_database(server_url, created[-1])

    yield create
    drop_databases(server_url, created)
    for name, template in taken:
        database_pool.give_back(name, template)


@pytest.fixture
def broker_url(new_database: Callable[..., str], broker_template: str) -> str:
    """The URL of a fresh database that holds an empty broker in schema `outbox`."""
    return new_database(template=broker_template)


@pytest.fixture
def sample_environment(server_url: str) -> Iterator[dict[str, str]]:
    """Variables by which processes of the sample use the run's server; their databases are dropped afterwards."""
    prefix = f"sample_{os.getpid()}_{next(_numbers)}"
    yield {"OUTBOX_POSTGRES_URL": server_url, "SAMPLE_DATABASE_PREFIX": prefix}
    drop_databases(server_url, [f"{prefix}_{name}" for name in ("orders", "broker", "celery")])


@pytest.fixture
def calls_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handler calls share transactions also on a busy machine, where a handler takes longer."""
    monkeypatch.setattr("outbox.broker.consumer.call.SHORT_SECONDS", 1.0)
    monkeypatch.setattr("outbox.broker.consumer.call._OPEN_SECONDS", 1.0)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that this checkout makes."""
    return build(tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def environments(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environments:
    """Environments with the wheel, and without this checkout."""
    return Environments(wheel, tmp_path_factory.mktemp("environments"))
