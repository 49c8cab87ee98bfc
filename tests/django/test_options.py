"""Options of parts: positional arguments after the body, whose class the core does not know."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from django.db import transaction

from outbox.contrib.django import (
    message,
    publish,
    publish_many,
    publish_messages,
    transactional_message,
)
from outbox.errors import ConfigurationError, UsageError
from outbox.hooks import Draft, Option
from tests.django.state import bodies, decisions

pytestmark = pytest.mark.usefixtures("empty_log")


@dataclass(frozen=True, slots=True)
class Signed(Option):
    """Writes a name behind the body."""

    name: str

    def encode(self, draft: Draft) -> None:
        if not self.name:
            raise UsageError(f"topic {draft.topic!r}: nobody has signed.")
        draft.body = draft.body[:-1] + f',"by":"{self.name}"}}'.encode()


def test_every_way_to_publish_takes_options(path: str) -> None:
    @transactional_message("orders", lambda who: Signed(who), Signed("b"), body={"id": 5})
    def decorated(who: str) -> None: ...

    with transaction.atomic():
        publish("orders", {"id": 1}, Signed("a"))
        publish_many("orders", [{"id": "c"}, {"id": "d"}], lambda body: Signed(body["id"]))
        publish_messages([message("orders", {"id": 1}, Signed("e")), message("orders", {"id": 4}, Signed("f"))])
    decorated("h")
    assert [body["by"] for body in bodies()] == ["a", "c", "d", "e", "f", "b"]


def test_an_option_refuses_the_message_and_the_block() -> None:
    def sign_with(*names: str) -> None:
        with transaction.atomic():
            for name in names:
                publish("orders", {"id": 1}, Signed(name))

    with pytest.raises(UsageError, match="nobody has signed"):
        sign_with("a", "")
    with pytest.raises(UsageError, match="'orders': the argument 'key-1' after the body is not an option"):
        publish("orders", {"id": 1}, "key-1", at_once=True)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not an option"):
        publish_many("orders", [{"id": 1}], lambda body: None, at_once=True)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match="not an option"):
        transactional_message("orders", 7, body={})  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="option 1= of"):

        @transactional_message("orders", lambda other: Signed(other), body={})
        def decorated(who: str) -> None: ...

    with pytest.raises(ConfigurationError, match="option 1"):
        transactional_message("", Signed("a"), messages=list)  # type: ignore[call-overload]
    assert "C" not in decisions().values()
