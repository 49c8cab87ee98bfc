"""Filters: they select the messages of a topic by tag (`"paid || refunded"`) or by header (`"sql: …"`).

The expression after `sql:` is a subset of SQL92 over the headers of a message, with SQL's three-valued logic:

    sql: region IN ('eu', 'uk') AND amount BETWEEN 10 AND 99.5 AND NOT (origin LIKE 'test%' OR trace IS NULL)

- A name is a header. A missing header is NULL. A comparison with NULL is neither true nor false.
  `TAGS` is the message's tag (NULL if it has none). A name that is also a keyword is written in double quotes.
- Header values are strings. In a comparison with a number, the header's text is converted to a number (`-12`, `3.50`).
  A text that is not a number is NULL. A comparison with a string compares strings by Unicode code point.
- `= <> != < <= > >=`, `[NOT] IN (…)`, `[NOT] BETWEEN … AND …`, `[NOT] LIKE '…' [ESCAPE 'c']`, `IS [NOT] NULL`, `AND`,
  `OR`, `NOT`, parentheses. Two headers are compared as strings, with `=` and `<>` only.

A message passes if the expression is true. The broker converts the same tree to SQL (`outbox.broker.consumer.fetch`),
so that it transfers only messages that pass. A property test compares the evaluation in Python with the evaluation in
SQL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from outbox.errors import InvalidFilter, InvalidName
from outbox.names import check_tag

if TYPE_CHECKING:
    from outbox.filters.conditions import FilterNode

SQL_PREFIX = "sql:"
_ALL = "*"


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed filter. A filter has `tags`, of which one must match, or a `condition`.

    Without `tags` and `condition`, every message passes.
    """

    text: str
    tags: tuple[str, ...] = ()
    condition: FilterNode | None = None

    @property
    def passes_all(self) -> bool:
        """Whether every message passes."""
        return not self.tags and self.condition is None

    def evaluate(self, tag: str, headers: Mapping[str, str]) -> bool:
        """Whether a message with this tag and these headers passes."""
        if self.tags:
            return tag in self.tags
        return self.condition is None or self.condition.evaluate(tag, headers) is True


@lru_cache(maxsize=256)
def parse_filter(text: str) -> Filter:
    """Parse the text of a filter. Raises InvalidFilter with the column of the fault."""
    stripped = text.strip()
    if not stripped or stripped == _ALL:
        return Filter(text)
    if stripped[: len(SQL_PREFIX)].lower() == SQL_PREFIX:
        # Imported here, because most processes have no such filter.
        from outbox.filters.parser import parse_expression

        start = text.lower().index(SQL_PREFIX) + len(SQL_PREFIX)
        return Filter(text, condition=parse_expression(text, start))
    return Filter(text, tags=_parse_tags(text))


def _parse_tags(text: str) -> tuple[str, ...]:
    tags: list[str] = []
    column = 1
    for part in text.split("||"):
        tag = part.strip()
        at = column + len(part) - len(part.lstrip())
        if not tag or tag == _ALL:
            raise InvalidFilter(
                f"filter {text!r}, column {at}: a tag is missing here; write tags like 'paid || refunded', or leave "
                f"the filter empty for all messages."
            )
        try:
            tags.append(check_tag(tag))
        except InvalidName as error:
            raise InvalidFilter(
                f"filter {text!r}, column {at}: {error} Separate tags with '||'; an expression over headers begins "
                f"with '{SQL_PREFIX}'."
            ) from error
        column += len(part) + 2
    return tuple(dict.fromkeys(tags))
