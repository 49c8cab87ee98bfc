"""The declared rules as values, which file.py reads from the rules file. Durations are in seconds."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from typing import Final


class FieldType(enum.StrEnum):
    """The common form in which a column and a body field are compared."""

    TEXT = "text"
    """A text, compared unchanged."""
    INTEGER = "integer"
    """A number of up to 26 digits."""
    DECIMAL = "decimal"
    """A number of up to 26 digits before the point, rounded to 12 decimals."""
    BOOLEAN = "boolean"
    """true/false, t/f, 1/0."""
    TIMESTAMP = "timestamp"
    """A time with microseconds. If a text has no UTC offset, its time is in UTC."""
    DATE = "date"
    """A date in ISO 8601. If a text has a time of day too, its date is that of its time in UTC."""
    UUID = "uuid"
    """A UUID, compared in lower case."""


class FindingSeverity(enum.StrEnum):
    """The urgency of a finding. The report sorts findings by their urgency."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


class Messages(enum.StrEnum):
    """The number of committed messages that a row may have."""

    EXACTLY_ONE = "exactly_one"
    AT_LEAST_ONE = "at_least_one"
    """The row is compared with the message that was committed last, and each message owes its effects."""


class SourceKind(enum.StrEnum):
    """The kind of source from which a run reads the tables of a database."""

    POSTGRES = "postgres"
    """PostgreSQL, read over ADBC in several partitions, all inside one exported snapshot."""
    PARQUET = "parquet"
    """A folder with one Parquet file or folder per table."""
    CSV = "csv"
    """A folder with one CSV file (with a header) per table."""
    DELTA = "delta"
    """A folder with one table of Delta Lake per table, each read at one version."""
    ICEBERG = "iceberg"
    """A folder with one Iceberg table per table, each read at one snapshot."""
    ARCHIVE = "archive"
    """The folder of `outbox-reconcile archive`, as the broker: the messages of all passes, without the broker's
    database."""
    CATALOG = "catalog"
    """A namespace of a Spark catalog (Unity Catalog, Hive, an Iceberg catalog). The run reads each table of Delta Lake
    or Iceberg at one version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatabaseRule:
    """One source. `location` is the connection string, folder or namespace of the source, with environment
    variables resolved.

    On a replica, a run assumes that the transactions of its primary last at most `longest_transaction_seconds`.
    """

    name: str
    kind: SourceKind
    location: str = field(repr=False)
    schema: str = "public"
    watermark: str | None = None
    longest_transaction_seconds: float = 3_600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRule:
    """A column that must equal a field of the body, whose dotted path is `body`. In older messages it has the
    paths `former`: the first path at which a body has a value counts.

    The two values may differ by at most `tolerance`, which has the unit of the values (seconds for times).
    """

    column: str
    body: str
    former: tuple[str, ...] = ()
    type: FieldType = FieldType.TEXT
    tolerance: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The dotted paths of the field in a body."""
        return (self.body, *self.former)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRule:
    """A consumer group that must have handled the message, and the table into which the group writes its effect.

    The effect is found by `key` (equal to the message's key) or by `message_id`. Without a table, the broker's own view
    of the delivery is the evidence. The limit `within_seconds` begins at the row's time, or at the message's delivery
    time if this is later. A group without an effect at the end of the limit is UNDELIVERED. An effect after the limit
    is LATE.

    `owed_when` is a condition over `message_v1`: the group owes an effect for each message that satisfies the
    condition. If `owed_when` is None, the run reads the group's subscription from the broker (subscriptions.py). If the
    run cannot read the subscription, the group owes an effect for every message.
    """

    name: str
    database: str
    table: str | None = None
    key: str | None = None
    message_id: str | None = None
    time: str | None = None
    when: str | None = None
    owed_when: str | None = None
    compare_effect: tuple[tuple[str, int], ...] = ()
    """Columns of the effect table that must equal a field of the message, each with the number of the rule's field."""
    sum_effect: tuple[tuple[str, int], ...] = ()
    """Columns whose sum over the effects of a key must equal a field of the message. A message then may have several
    effects."""
    within_seconds: float = 15 * 60.0
    severity: FindingSeverity = FindingSeverity.CRITICAL


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The number of open findings up to which a run succeeds, or with `is_share` their share of all judged subjects."""

    limit: float = 0.0
    is_share: bool = False

    def covers(self, faults: int, subjects: int) -> bool:
        """Whether the run succeeds in spite of its findings."""
        return faults <= (self.limit * subjects if self.is_share else self.limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The messages and effects that a row of a table must have if the row satisfies the condition `when`.

    The rule ignores messages of `topic` (and `tag`) that do not satisfy `message_when`, a condition over `message_v1`.
    """

    name: str
    database: str
    table: str
    key: str
    time: str
    topic: str
    when: str | None = None
    tag: str | None = None
    message_when: str | None = None
    messages: Messages = Messages.EXACTLY_ONE
    severity: FindingSeverity = FindingSeverity.CRITICAL
    grace_seconds: float = 60.0
    late_after_seconds: float | None = None
    stuck_after_seconds: float = 15 * 60.0
    bucket_seconds: float | None = None
    # Rows and effects that are written with an earlier time are rarely older than a day.
    look_back_seconds: float = 86_400.0
    """Once per `look_back_every_seconds`, an incremental run judges again all rows whose time is at most
    `look_back_seconds` before the last look back; 0 means never. None: every hour if checksums make it cheap, else
    every day."""
    look_back_every_seconds: float | None = 0.0
    allow_empty: bool = False
    fields: tuple[FieldRule, ...] = ()
    groups: tuple[GroupRule, ...] = ()
    mask: tuple[str, ...] = ()
    """Columns and body fields whose values are shown in no finding."""
    fail_above: Tolerance | None = None
    """The rule's own tolerance; None means that its findings count towards the tolerance of the file."""
    digest: str = ""

    @property
    def has_conditional_groups(self) -> bool:
        """Whether a group of the rule may owe no effect for some of the messages."""
        return any(group.owed_when for group in self.groups)

    @property
    def near_places(self) -> tuple[int, ...]:
        """The numbers of the fields with a tolerance."""
        return tuple(place for place, field in enumerate(self.fields) if field.tolerance is not None)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the fields that are compared as numbers: those with a tolerance, and those of sums."""
        summed = {place for group in self.groups for _, place in group.sum_effect}
        return tuple(sorted(summed.union(self.near_places)))

    @property
    def has_several_messages(self) -> bool:
        """Whether a row may have several messages."""
        return self.messages is Messages.AT_LEAST_ONE

    @property
    def longest_wait(self) -> timedelta:
        """The longest limit of the rule. When this much time has passed since a row's time, the run can judge
        everything about the row, unless the row's message was delayed."""
        waits = (self.grace_seconds, self.stuck_after_seconds, self.late_after_seconds or 0.0)
        return timedelta(seconds=max(*waits, *(group.within_seconds for group in self.groups)))


class FindingClass(enum.StrEnum):
    """The classes of a subject (the message of a key, or a key's effect in one group), in order of precedence.

    `judging/remedies.py` has the meaning of each class that is a finding.
    """

    ORPHAN = "ORPHAN"
    HALF_STUCK = "HALF_STUCK"
    LOST = "LOST"
    UNREADABLE = "UNREADABLE"
    DUPLICATE = "DUPLICATE"
    DEAD = "DEAD"
    UNDELIVERED = "UNDELIVERED"
    MISMATCH = "MISMATCH"
    WRONG_EFFECT = "WRONG_EFFECT"
    WRONG_SUM = "WRONG_SUM"
    EARLY = "EARLY"
    LATE = "LATE"
    PENDING = "PENDING"
    """The subject is too young to be judged, or its limits have not passed yet, so the next run judges it again."""
    ERASED = "ERASED"
    """The content of the message was erased, is encrypted for a subject, or is stored outside of the broker: its
    existence is judged, its fields are not."""
    OK = "OK"
    """Everything about the subject is as the rule declares."""
    RECOVERED = "RECOVERED"
    """A finding of the previous result that no longer holds. A run finds this class by comparison with the previous
    result, not from evidence."""
    EXPIRED = "EXPIRED"
    """A subject that had an open finding or was PENDING in an earlier run. The run closes the subject, because
    retention may have removed its evidence."""


CLASSES: Final = tuple(FindingClass)
FAULTS: Final = CLASSES[: CLASSES.index(FindingClass.PENDING)]
"""The classes that are findings, and that can be acknowledged."""
CLOSED: Final = (FindingClass.RECOVERED.value, FindingClass.EXPIRED.value)
"""The classes of subjects of earlier runs that are no findings any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledgement:
    """A known finding. Before the moment `until`, reports show the finding as acknowledged, and do not count it as new.

    An acknowledgement does not change how a key is judged. `group` is a consumer group, '' for the key's message, or
    None for the message and all groups.
    """

    rule: str
    key: str
    finding_class: str
    group: str | None
    until: datetime
    reason: str
    by: str

    @property
    def text(self) -> str:
        """The text of the acknowledgement in a finding: author, end and reason."""
        until = self.until.date() if self.until.time() == time.max else self.until
        return f"by {self.by} until {until.isoformat()}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The contents of a rules file."""

    title: str
    databases: dict[str, DatabaseRule]
    broker: str
    rules: tuple[Rule, ...]
    acknowledged: tuple[Acknowledgement, ...] = ()
    fail_above: Tolerance = Tolerance()
    archive: str | None = None
    """Folder or URI of the archive, which keeps the messages that retention removes from the broker's log."""
