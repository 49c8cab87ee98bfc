"""A message's body and headers. A separate module, because only some operators may see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

_CONTENT: Final = Statement("""
SELECT topic.name AS topic, content_type, octet_length(body) AS size, body, headers
FROM {schema}.commit_log JOIN {schema}.topic USING (topic_id)
WHERE message_id = %(id)s
""")


@dataclass(frozen=True, slots=True)
class Content:
    """A stored message's content; `size` in bytes."""

    topic: str
    content_type: str
    size: int
    body: bytes
    headers: dict[str, Any] | None


def content_of(run: Executor, message_id: UUID) -> Content | None:
    """Return the content; None when the broker does not have the message (any more)."""
    found = run.objects(Content, _CONTENT, {"id": message_id})
    return found[0] if found else None
