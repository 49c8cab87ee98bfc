"""The parts of the package, and what in the core would name one.

The core is what every message needs. A part serves some projects and can be taken out, so the core names no part.
`python -m tests.house.parts saga` prints where the tests of a part are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent.parent
_KINDS: Final = {".py", ".sql", ".html", ".txt"}


class Part(NamedTuple):
    """A part: the words by which code, SQL or a template names it, its files below outbox/, and its tests."""

    name: str
    words: str
    paths: tuple[str, ...]
    "Folders end with a slash."
    tests: tuple[str, ...] = ()
    "Below tests/: the files about this part, and those that cannot run without it."


# The broker in memory is no part, although it is an engine: the test helpers (`outbox.contrib.django.testing`, the
# fixtures for pytest) are made of it, every project uses them, and without it none of them would be left.
PARTS: Final = (
    Part(
        "blocked keys",
        r"blocked_keys\b|blocking_message|blockkey|keyblocked|follow_dead_letter",
        ("contrib/blocked_keys/",),
        tests=("django/faults_of_blocked_keys.py", "django/test_blocked_keys.py"),
    ),
    Part(
        "console",
        r"contrib[./]console\b|outbox[_/]console",
        ("contrib/console/",),
        tests=("django/console/",),
    ),
    Part(
        "crash kit",
        r"crash_?kit|outbox_crashes|crash_tests",
        ("contrib/crash_kit/",),
        tests=("crash_kit/", "django/test_crash_kit_input.py", "sample/crash_cases.py", "sample/test_crashes.py"),
    ),
    Part(
        "editing",
        r"contrib[./]editing\b|edited_letter|outbox_dead_letter edit",
        ("contrib/editing/",),
        tests=("django/cases_of_editing.py", "django/test_editing.py"),
    ),
    Part(
        "encryption",
        r"encrypt|subject_?key",
        ("contrib/encryption/",),
        tests=("django/cases_of_encryption.py", "django/test_erasure.py", "django/test_large_bodies.py"),
    ),
    Part(
        "erasure",
        # The core knows messages whose body is erased (outbox/erased.py), because encryption makes such messages, too.
        # The tables and the view with this word are the part's.
        r"\beras(?!ed)|_eras(?!ed)|outbox_erased|erased_v\d|\}\.erased\b|(?:table|from|into|update) erased\b",
        ("contrib/erasure/",),
        tests=(
            *("broker/erasure/", "django/test_erasure.py"),
            # About another part; it also erases.
            "spark/test_erased.py",
        ),
    ),
    Part(
        "events",
        # The word "events" alone is said of what happened to a message, and of threads.
        r"(?:outbox|contrib)[./]events?\b|import events?\b|\.events\b|\bevents=|outbox[:_-]events?\b|/events/|@event\b"
        r"|(?<!wait_)event_?types?\b|typed events?\b|(?:types?|versions?) of (?:an |the )?events?\b|outbox_contract"
        r"|(?:read|find|expected|declared|seen)_events?\b|event_(?:message|conditions|catalogue|header|of\b)"
        r"|upcast|unknown_?(?:event_?)?version",
        ("events/", "contrib/events/"),
        tests=(
            *("contract/test_events.py", "core/test_event_changes.py", "core/test_event_contracts.py"),
            *("django/faults_of_events.py", "django/test_events.py", "django/test_events_without_app.py"),
            # About other things; each also uses events.
            *("django/test_nothing_untrue.py", "django/test_pages.py"),
            *("django/test_large_bodies.py", "django/test_repair.py"),
        ),
    ),
    Part(
        "fair share",
        r"fair_?share|fair_?lane",
        ("contrib/fair_share/",),
        tests=("broker/fair_share/",),
    ),
    Part(
        "forwarding",
        r"\bsinks?\b|endpoint|forward_|forwarder|\bforward\(",
        ("contrib/forwarding/",),
        tests=(
            "django/test_forward.py",
            "sinks/",
            # About other parts; each also uses forwarding.
            *("django/test_engines.py", "django/test_erasure.py"),
            "django/test_large_bodies.py",
        ),
    ),
    Part(
        "large bodies",
        r"large_?bod",
        ("contrib/large_bodies/",),
        tests=(
            "django/large_storage.py",
            "django/test_large_bodies.py",
            "django/test_large_bodies_crash.py",
            "django/test_large_bodies_s3.py",
            # About repairs; one of them has a large body.
            "django/test_repair.py",
        ),
    ),
    Part(
        "limits",
        # The word "limits" alone is said of topics, sessions, queues and timeouts, too.
        r"\blimiter\b|\bLimits\((?:running|per_key|rate)|(?:: |import )Limits\b|subscription\.limits|limits=|"
        r"import limits\b|(?:outbox|contrib|groups|operations|actions)\.limits|(?:outbox_group |has_|list_)limits|"
        r"limits\.(?:per_key|declare|withdraw|release)|subscription_limit|slot_demand",
        ("contrib/limits/",),
        tests=(
            *("broker/limits/", "broker/fair_share/test_with_limits.py"),
            *("django/cases_of_limits.py", "django/faults_of_limits.py", "django/test_part_options.py"),
        ),
    ),
    Part(
        "metrics",
        r"prometheus|opentelemetry|telemetry",
        ("contrib/prometheus/", "contrib/opentelemetry/"),
        tests=("django/test_metrics.py", "django/test_metrics_opentelemetry.py", "django/test_tracing.py"),
    ),
    Part(
        "receiving",
        r"contrib\.receiving|KombuSource|KafkaSource|DeclaredReceive|\brole receive|\['receive'\]|_receiver|receiver_",
        ("contrib/receiving/",),
        tests=(
            *("django/faults_of_receiving.py", "django/test_receive.py", "sources/", "sinks/test_kafka.py"),
            # About other parts; each also uses receiving.
            *("django/test_engines.py", "django/test_large_bodies.py"),
        ),
    ),
    Part(
        "reconciliation",
        r"contrib\.reconciliation|outbox_(?:reconcil|repair|finding)|repair[._]|\bfinding\b|savedreconciliation",
        ("contrib/reconciliation/",),
        tests=(
            "django/console/test_finding.py",
            *("django/cases_of_reconciliation.py", "django/faults_of_reconciliation.py"),
            "django/repair_publisher.py",
            "django/repairs.py",
            "django/test_findings.py",
            "django/test_repair.py",
            # About remedies of all kinds; it makes its faults with those of repairs.
            "django/test_remedies.py",
            "spark/test_command.py",
            "spark/test_plan.py",
        ),
    ),
    Part(
        "rocketmq",
        # The words and rules that the core has from RocketMQ are not the part.
        r"(?<!as in )(?<!those of )rocketmq(?!\)\"|; kafka|'s (?:consumersend|message queue|retry|sample|source))"
        r"|\brelay|_relay",
        ("contrib/rocketmq/", "rocketmq/"),
        tests=(
            *("django/cases_of_rocketmq.py", "django/test_engines.py", "django/test_relay.py"),
            *("django/test_rocketmq_operations.py", "rocketmq/"),
        ),
    ),
    Part(
        "saga",
        r"saga",
        ("contrib/saga/",),
        tests=(
            *("django/faults_of_sagas.py", "django/hotel/saga.py", "django/hotel/services.py", "django/test_saga.py"),
        ),
    ),
    Part(
        "schedules",
        # The table `scheduled` has messages that wait, and `schedule_id` is its key.
        r"\bschedules\b(?! (?:a|it)\b)|schedule_late|outbox[_-]schedule\b|\}\.schedule\b|table schedule\b"
        r"|schedule\.after|run_schedule|declared_?schedule",
        ("contrib/schedules/",),
        (
            *("broker/schedules/", "django/cases_of_schedules.py", "django/console/test_schedules_page.py"),
            *("django/faults_of_schedules.py", "django/test_schedules.py"),
        ),
    ),
    Part(
        "sqlalchemy",
        r"sqlalchemy",
        ("contrib/sqlalchemy/",),
        tests=("sqlalchemy/",),
    ),
    Part(
        "tasks",
        r"contrib\.tasks\b|TaskEntry|outbox_task",
        ("contrib/tasks/",),
        tests=(
            "django/faults_of_tasks.py",
            "django/task_settings.py",
            "django/test_tasks.py",
        ),
    ),
    Part(
        "unique",
        r"unique_?key|outbox_unique|uniquemessage|contrib\.unique|\bunique\(",
        ("contrib/unique/",),
        tests=(
            "django/test_unique.py",
            "django/test_unique_crash.py",
            "django/test_unique_in_memory.py",
            "mistakes/",
            "oracle/",
            "proof/recorded/",
            "proof/recorded_points.py",
            "proof/recorded_settings.py",
            "proof/recording.py",
            "proof/test_traces.py",
            "proof/traces.py",
        ),
    ),
)


def texts() -> Iterator[tuple[str, str]]:
    """The files of the package that people write: their paths below outbox/, and their texts."""
    package = ROOT / "outbox"
    for path in sorted(package.rglob("*")):
        if path.suffix in _KINDS and "__pycache__" not in path.parts and "vendor" not in path.parts:
            yield path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")


def owner(path: str) -> str | None:
    """The part that a file belongs to; a file of two parts belongs to the one with the longest path."""
    owners = [
        (len(own), part.name)
        for part in PARTS
        for own in part.paths
        if path == own or (own.endswith("/") and path.startswith(own))
    ]
    return max(owners)[1] if owners else None


def mentions(given: Iterable[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """(part, file of the core) -> the lines of this file that name the part; of these files with their texts."""
    found: dict[tuple[str, str], list[str]] = {}
    for path, text in given:
        if owner(path) is not None:
            continue
        # Half as long as to ignore the case.
        lower = text.lower()
        for part in PARTS:
            words = re.compile(part.words.lower())
            if words.search(lower):
                found[part.name, path] = [line for line in lower.splitlines() if words.search(line)]
    return found


def tests_of(name: str) -> list[str]:
    """The files and folders with tests of a part. Raises SystemExit for a part that is unknown or has none."""
    found = [f"tests/{path}" for part in PARTS if part.name == name for path in part.tests]
    if tests := [path for path in found if path.endswith("/") or "/test_" in path]:
        return tests
    sys.exit(f"no part {name!r} with tests: there are {', '.join(part.name for part in PARTS if part.tests)}")


if __name__ == "__main__":
    print(*tests_of(sys.argv[1]))
