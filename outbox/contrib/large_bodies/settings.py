"""The settings of large bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from outbox.contrib.django.settings.definition import Rule, read, required, setting, text, whole
from outbox.names import MAX_BODY_BYTES

_DAY: Final = 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredLargeBodies:
    """The entry LARGE_BODIES."""

    storage: str = required(
        text("alias"), meaning="alias of `STORAGES`. Use a storage, bucket or folder of its own for each broker"
    )
    beyond_bytes: int = setting(
        256 * 1024,
        whole(1, "bytes", MAX_BODY_BYTES),
        meaning="an encoded body of more bytes is stored in the storage",
    )
    keep_seconds: int = setting(
        7 * _DAY,
        whole(_DAY, "seconds"),
        meaning="an object without a message is removed when it is older than this. Choose a longer time if bodies "
        "in backups or in the archive must stay readable",
    )

    @property
    def longest_wait_seconds(self) -> float:
        """How long after its upload a message may be published. The rest of `keep_seconds` is for wrong clocks."""
        return self.keep_seconds / 2


def _large_bodies(where: str, value: Any) -> DeclaredLargeBodies | None:
    return None if value is None else read(DeclaredLargeBodies, where, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeBodySettings:
    """The settings of large bodies in OUTBOX."""

    large_bodies: DeclaredLargeBodies | None = setting(
        None,
        Rule("`{option: value}`, or `None`", _large_bodies),
        section="broker",
        bundled_only="outbox does not know which messages the server still has, and so which stored bodies are still "
        "needed. Store large data in your own tables or storage, and publish its name; or keep the topics with large "
        "bodies on PostgreSQL.",
        meaning="where the bodies of [large messages](large-bodies.md) are stored",
    )
