"""The pytest plugin: fixtures for the tests of applications, on top of pytest-django.

In an environment with this package, every run of pytest loads the plugin. So the plugin imports nothing until a test
uses a fixture. The fixtures are the context managers of `outbox.contrib.django.testing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from outbox.contrib.django.testing import BrokerOutbox, InMemoryOutbox

_in_memory: Final = pytest.StashKey["InMemoryOutbox"]()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Begin with the broker in memory before the first fixture of a test that uses `outbox`, in any order.

    The fixtures of other scopes are older than the test, and create the test databases.
    """
    item = request.node
    if (
        fixturedef.scope == "function"
        and isinstance(item, pytest.Item)
        and _in_memory not in item.stash
        and (_is_outbox(fixturedef) or _uses_outbox(item))
    ):
        from outbox.contrib.django.testing import in_memory_outbox

        entered = in_memory_outbox()
        item.stash[_in_memory] = entered.__enter__()

        def end() -> None:
            # Plugins such as pytest-rerunfailures run the same item again.
            del item.stash[_in_memory]
            entered.__exit__(None, None, None)

        item.addfinalizer(end)


def _uses_outbox(item: pytest.Item) -> bool:
    # pytest has no public way to ask which of several fixtures of a name a test gets.
    known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {}).get("outbox", ())
    return bool(known) and _is_outbox(known[-1])


def _is_outbox(fixturedef: pytest.FixtureDef[Any]) -> bool:
    """Whether it is the fixture `outbox` below, and not one of the project with the same name."""
    return fixturedef.argname == "outbox" and fixturedef.func.__module__ == __name__


@pytest.fixture
def outbox(db: None, request: pytest.FixtureRequest) -> InMemoryOutbox:
    """A new broker in memory, which drops the messages of a transaction that rolls back.

    `drain()` runs the project's subscribers.

    The fixture works with any kind of `django_db` mark, and has the messages of fixtures that ran before it.
    """
    started: InMemoryOutbox = request.node.stash[_in_memory]
    return started


@pytest.fixture
def outbox_broker(transactional_db: None) -> Iterator[BrokerOutbox]:
    """A real broker in the broker's test database, which is empty when the test begins.

    `drain()` runs the project's subscribers in threads, like a worker.

    A test that publishes only on the alias `default` needs no mark. Any other test names all its databases and the
    broker's alias in the mark `django_db(transaction=True, databases=…)`.
    """
    from outbox.contrib.django.testing import broker_outbox

    with broker_outbox() as broker:
        yield broker


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests with `outbox_broker` use the broker's database.

    This hook runs before pytest-django sorts the tests by their use of databases.
    """
    let_use_broker(items, "outbox_broker")


def let_use_broker(items: list[pytest.Item], fixture: str) -> None:
    """Give a mark to the tests with this fixture that have none: they may use the broker's test database."""
    for item in items:
        if fixture in getattr(item, "fixturenames", ()) and item.get_closest_marker("django_db") is None:
            item.add_marker(pytest.mark.django_db(transaction=True, databases=_databases()))


def _databases() -> list[str]:
    from django.db import DEFAULT_DB_ALIAS

    from outbox.contrib.django.settings.conf import get_settings

    return sorted({DEFAULT_DB_ALIAS, get_settings().broker})
