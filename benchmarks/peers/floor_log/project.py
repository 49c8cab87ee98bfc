"""The tables of the log. There are no settings and no models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

APPS: list[str] = []
TABLES: Final = """
CREATE TABLE log (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text NOT NULL);
CREATE TABLE decision (
    xid    xid8   NOT NULL DEFAULT pg_current_xact_id(),
    log_id bigint NOT NULL,
    PRIMARY KEY (xid, log_id)
);
CREATE TABLE tick (
    id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    seen pg_snapshot NOT NULL,
    head bigint NOT NULL
);
INSERT INTO tick (seen, head) VALUES (pg_current_snapshot(), 0);
CREATE TABLE entry (position bigint PRIMARY KEY, log_id bigint NOT NULL);
CREATE TABLE consumer (position bigint NOT NULL);
INSERT INTO consumer VALUES (0);
CREATE TABLE ledger (transaction_id uuid PRIMARY KEY);
CREATE TABLE inbox (id bigint PRIMARY KEY);
"""


def settings(databases: Mapping[str, Any]) -> dict[str, Any]:
    return {}
