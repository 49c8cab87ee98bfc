"""The same as runner_cases.py for pytest-django; run by test_in_tests.py."""

from __future__ import annotations

import pytest

from outbox.contrib.django import publish
from outbox.errors import ConfigurationError
from tests.django.runner_cases import place
from tests.django.state import decisions


def test_without_the_mark() -> None:
    with pytest.raises(ConfigurationError, match="IN_MEMORY"):
        publish("orders", {}, key="leak", at_once=True)


@pytest.mark.django_db(transaction=True)
def test_with_other_databases_only() -> None:
    with pytest.raises(ConfigurationError, match="IN_MEMORY"):
        place()
    with pytest.raises(ConfigurationError, match="IN_MEMORY"):
        publish("orders", {}, key="leak", at_once=True)


@pytest.mark.django_db(transaction=True, databases=["default", "broker"])
def test_with_a_database_for_the_broker() -> None:
    place()
    assert decisions() == {"leak": "C"}
