"""`Unique`, the option of `publish` with which a message is published only once per key and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import OperationalError, ProgrammingError

from outbox import hooks, names
from outbox.contrib.django.database.transactions import is_missing_table
from outbox.contrib.unique import keys
from outbox.errors import ConfigurationError, InvalidMessage, UsageError
from outbox.message import Message
from outbox.utils.safe_text import shown_value

MAX_WITHIN: Final = timedelta(days=366)


@dataclass(frozen=True, slots=True)
class Unique(hooks.Option):
    """Publish the message only if no other message of its topic holds the key.

        receipt = publish("invoice.requested", {"order_id": 7}, Unique("invoice:7", within=timedelta(hours=1)))

    The message holds `key` (a text, an int or a UUID) for the time `within` (a number of seconds or a timedelta), which
    begins with the publish call. If another message holds the key, nothing is published, and `duplicate_of` of the
    receipt is the id of the other message. If another open transaction has taken the key, the call waits until that
    transaction ends. The keys belong to the database of the transaction, so publishers on two databases do not see each
    other's keys.
    """

    key: object
    within: float | timedelta = field(kw_only=True)

    is_kept: ClassVar[bool] = True

    def encode(self, draft: hooks.Draft) -> None:
        """Raise InvalidMessage for a key or a time that is not allowed."""
        if "outbox_unique" not in hooks.prunings:
            raise ConfigurationError(
                f"{shown_value(self)} for topic {draft.topic!r}: the app 'outbox.contrib.unique' is not installed, so "
                "no pass would remove the key. Nothing was published. Add the app to INSTALLED_APPS, and run "
                "`manage.py migrate`."
            )
        self._request(draft.topic, draft.message_id)

    @classmethod
    def admit(cls, connection: BaseDatabaseWrapper, wanted: Sequence[tuple[Message, Unique]]) -> Mapping[UUID, UUID]:
        """Take the keys for the open transaction, and return the messages whose keys other messages hold."""
        _refuse_common(wanted)
        requests = [one._request(message.topic, message.message_id) for message, one in wanted]
        try:
            return keys.reserve(connection, requests)
        except (ProgrammingError, OperationalError) as error:
            if not is_missing_table(error):
                raise
            raise ConfigurationError(
                f"Unique({requests[0].unique!r}) for topic {requests[0].topic!r}: the table of unique keys is missing "
                f"on {connection.alias!r}. Nothing was published. Run `manage.py migrate "
                f"--database={connection.alias}`."
            ) from error

    def _request(self, topic: str, message_id: UUID) -> keys.KeyRequest:
        key = str(self.key) if isinstance(self.key, (int, UUID)) and not isinstance(self.key, bool) else self.key
        if not isinstance(key, str) or not key or len(key) > names.MAX_KEY or not names.is_text(key):
            raise InvalidMessage(
                f"Unique({shown_value(key)}) for topic {topic!r}: the key must be a text of 1 to {names.MAX_KEY} "
                "characters, an int or a UUID. Nothing was published."
            )
        within = self.within
        if isinstance(within, (int, float)) and not isinstance(within, bool):
            # A number that is not possible as a timedelta is refused below.
            with suppress(OverflowError, ValueError):
                within = timedelta(seconds=within)
        if not isinstance(within, timedelta) or not timedelta(0) < within <= MAX_WITHIN:
            raise InvalidMessage(
                f"Unique({key!r}, within={shown_value(self.within)}) for topic {topic!r}: within must be seconds (a "
                f"number) or a timedelta, more than 0 and at most {MAX_WITHIN.days} days. Nothing was published."
            )
        return keys.KeyRequest(topic, key, within, message_id)


def _refuse_common(wanted: Sequence[tuple[Message, Unique]]) -> None:
    """Refuse one object for several messages, of which all but the first would be duplicates, and two of a message."""
    if len({id(one) for _, one in wanted}) < len(wanted):
        raise UsageError(
            f"{shown_value(wanted[0][1])} for topic {wanted[0][0].topic!r} is one key for several messages, so only "
            "the first of them would be published. Nothing was published. Pass publish_many a function of a body, such "
            "as `lambda body: Unique(body['id'], within=60)`, and give each message(…) its own key."
        )
    if len({message.message_id for message, _ in wanted}) < len(wanted):
        raise UsageError(
            f"{shown_value(wanted[0][1])} for topic {wanted[0][0].topic!r} is not the only unique key of a message. "
            "Nothing was published. Pass one key for each message."
        )
