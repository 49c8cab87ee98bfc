"""What to use on RocketMQ in place of commands and pages that do not work there.

A command or page that is not in these tables works, or needs the tables of a broker in PostgreSQL and says so
(`outbox.contrib.django.database.aliases.require_database`). Tests compare the tables of
docs/maintainers/rocketmq-operations.md with this file, and with the commands, pages and metrics of the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_BY_KEY: Final = (
    "`mqadmin queryMsgByKey` finds messages by id and by key; the table `outbox_inbox` says who handled one."
)
_LEDGER_DECIDES: Final = (
    "RocketMQ asks about undecided transactions, and the ledger answers. Start a worker; `outbox_transaction list` "
    "shows what is undecided."
)
_MQADMIN: Final = "Use RocketMQ's own tool:"

COMMANDS: Final[Mapping[str, str]] = {
    "outbox_audit": "`outbox_status` shows the counts that RocketMQ has.",
    "outbox_audit compare": "RocketMQ deletes messages by age, so a missing one proves nothing. Keep backups of it.",
    "outbox_dead_letter edit": "Publish the corrected message anew, then `outbox_dead_letter discard`.",
    "outbox_erase": "RocketMQ changes no stored message: publish with `Subject`, then `outbox_subject_key delete`.",
    "outbox_finding repair": "Publish the missing messages again from a task of your own.",
    "outbox_group offsets": f"{_MQADMIN} `mqadmin consumerProgress`.",
    "outbox_group delete": f"{_MQADMIN} `mqadmin deleteSubGroup`.",
    "outbox_group limits": "Set `threads` and the number of consumer processes.",
    "outbox_group pause": "Stop the group's workers; the messages wait. Or use `mqadmin updateSubGroup -s false`.",
    "outbox_group reset": f"{_MQADMIN} `mqadmin resetOffsetByTime`; the inbox skips what the group has handled.",
    "outbox_group resume": "Start the group's workers. Or use `mqadmin updateSubGroup -s true`.",
    "outbox_group skip": "Let on_error make the message a dead letter, then `outbox_dead_letter discard`.",
    "outbox_install --drop": f"{_MQADMIN} `mqadmin deleteTopic` and `mqadmin deleteSubGroup`.",
    "outbox_message list": _BY_KEY,
    "outbox_message recall": "`outbox_relay discard` works while a message waits for the relay. Later, let the handler "
    "check whether the message still matters.",
    "outbox_message redeliver": "Delete the row of the group's inbox, then `mqadmin resetOffsetByTime`.",
    "outbox_message show": _BY_KEY,
    "outbox_process list": "`mqadmin consumerConnection` lists the clients of the proxies.",
    "outbox_reconcile": "Reconciliation reads PostgreSQL only. Compare the tables of both services by SQL.",
    "outbox_repair": "Publish the missing messages again from a task of your own.",
    "outbox_schedule list": "Use Celery beat.",
    "outbox_schedule pause": "Use Celery beat.",
    "outbox_schedule resume": "Use Celery beat.",
    "outbox_schedule run": "Use Celery beat.",
    "outbox_topic list": "`outbox_status` shows the topics.",
    "outbox_topic delete": f"{_MQADMIN} `mqadmin deleteTopic`.",
    "outbox_transaction accept": "Use `mqadmin updateBrokerConfig -k rejectTransactionMessage -v false`.",
    "outbox_transaction ask": _LEDGER_DECIDES,
    "outbox_transaction decide": _LEDGER_DECIDES,
    "outbox_transaction forget": "Nothing: RocketMQ has no passes of producer groups.",
    "outbox_transaction reject": "Use `mqadmin updateBrokerConfig -k rejectTransactionMessage -v true`.",
}

_OVERVIEW: Final = "The overview page shows this for RocketMQ."
PAGES: Final[Mapping[str, str]] = {
    "history": "Draw the metrics with Grafana.",
    "search": _BY_KEY,
    "message": _BY_KEY,
    "undecided": _OVERVIEW,
    "dead_letters": _OVERVIEW,
    "waiting": "RocketMQ does not list waiting messages; the overview page shows the number of retries per group.",
    "groups": _OVERVIEW,
    "group": "Use `mqadmin consumerProgress`.",
    "workers": "RocketMQ knows the clients of its proxies: `mqadmin consumerConnection`.",
    "topics": _OVERVIEW,
    "topic": _OVERVIEW,
    "schedules": "Use Celery beat.",
    "incidents": "The log of each process has them.",
}


def refused_command(name: str) -> str:
    """Why a command does not work on RocketMQ, and what to use instead; '' if it works."""
    return _refused(COMMANDS, name, f"`{name}`")


def refused_page(name: str) -> str:
    """Why a page does not work on RocketMQ, and what to use instead; '' if it works."""
    return _refused(PAGES, name, f"the page {name!r}")


def _refused(table: Mapping[str, str], name: str, what: str) -> str:
    instead = table.get(name, "")
    return f"{what} does not work on RocketMQ. {instead}" if instead else ""
