"""Passwords and control characters in what is shown; the pipeline has its own copy, which must do the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import spark.common.safe_text
from outbox.utils import safe_text

SECRET = "hunter2"
TEXTS = [
    "cannot reach postgresql://shop:hunter2@host:5432/db?x=1 now",
    "postgresql://shop:a@hunter2@host/db",
    "postgresql://shop:a/hunter2@host/db",
    "postgresql://shop:a hunter2 b@host/db",
    "postgresql://:hunter2@host/db",
    "postgresql://shop:hunter2/db",
    "postgresql://shop:hunter2",
    "postgresql://shop:1hunter2",
    "jdbc:mysql://host:3306/db?user=shop&password=hunter2&ssl=1",
    "host=h password=hunter2 user=shop",
    "host=h PASSWORD = 'a hunter2' user=shop",
    r"host=h password='a\'hunter2' user=shop",
    "host=h password='a hunter2",
    "{'HOST': 'h', 'PASSWORD': 'hunter2', 'sslpassword': \"hunter2\"}",
    "PGPASSWORD=hunter2 psql",
]
UNTOUCHED = [
    "postgresql://host:5432/db",
    "postgresql://shop@host:5432/db?host=/tmp/x",
    "FATAL:  password authentication failed for user \"shop\"",
    "http://127.0.0.1:8000/ is up",
]  # fmt: skip
MASKS = [safe_text.mask_passwords, spark.common.safe_text.mask_passwords]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("text", TEXTS)
def test_passwords_are_masked_in_malformed_texts_too(mask: Callable[[str], str], text: str) -> None:
    masked = mask(text)
    assert SECRET not in masked
    assert "***" in masked
    assert mask(masked) == masked


@pytest.mark.parametrize("mask", MASKS)
def test_a_long_text_without_a_password_takes_no_longer_than_its_length(mask: Callable[[str], str]) -> None:
    """Patterns that try each place to the end would take hours for these, and a page or a log line with them."""
    for text in ("x" * 100_000, "password" * 10_000, "password " * 10_000, "'" * 100_000, "://" * 30_000):
        assert mask(text) == text
    assert mask("://a:" * 20_000).startswith("://a:***")
    assert mask("x" * 100_000 + "password=hunter2") == "x" * 100_000 + "password=***"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("text", UNTOUCHED)
def test_other_texts_stay_as_they_are(mask: Callable[[str], str], text: str) -> None:
    assert mask(text) == text


HOSTILE = "\x1b[2J\x1b]0;title\x07\r\x08\x7f\x9b31m\u202e\u2028\u200b\ue000 ordinary: äöü 漢字 🙂"


@pytest.mark.parametrize("for_people", [safe_text.for_people, spark.common.safe_text.for_people])
def test_what_steers_a_terminal_is_shown_as_an_escape(for_people: Callable[[str], str]) -> None:
    shown = for_people(HOSTILE + "\nsecond line")
    assert shown.replace("\n", "").isprintable()
    assert shown.startswith(r"\x1b[2J\x1b]0;title\x07\r\x08\x7f\x9b31m\u202e\u2028\u200b\ue000 ordinary: äöü 漢字 🙂")
    assert shown.endswith("\nsecond line")


def test_a_line_stays_a_line() -> None:
    assert safe_text.inert("a\nPROBLEM: forged") == r"a\nPROBLEM: forged"


@pytest.mark.parametrize(
    "text",
    [
        "bad iban DE1234",
        "{'iban': 'DE1234', 'x': 1}",
        '{"iban": "DE1234"}',
        "Payment(iban='it is \\'DE1234', x=1)",
        "iban=DE1234, then",
        "IBAN: DE1234",
    ],
)
def test_what_masked_fields_hold_is_masked_in_texts(text: str) -> None:
    shown = safe_text.masked_text(text, [{"payment": [{"IBAN": "DE1234"}]}], {"iban"})
    assert "DE1234" not in shown and safe_text.MASK in shown
    assert safe_text.masked_text(text, [], set()) == text


def test_short_values_are_masked_behind_their_name_only() -> None:
    assert safe_text.masked_text("pin 12 of 12: pin=12", [{"pin": 12}], {"pin"}) == "pin 12 of 12: pin=***"


def test_masked_values_at_any_depth() -> None:
    given = {"a": [{"Pin": 1, "b": "c"}], "pin": {"x": 2}}
    assert safe_text.masked_value(given, {"pin"}) == {"a": [{"Pin": "***", "b": "c"}], "pin": "***"}
