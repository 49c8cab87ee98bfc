"""Splits a partitioned table into its partitions, so that several Spark tasks can read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

from . import sql
from .base import TableSelection

MAX_PARTITIONS: Final = 256
PAGES_PER_PARTITION: Final = 8_192

_IS_PARTITIONED: Final = "SELECT count(*) FROM pg_class WHERE oid = to_regclass({table}) AND relkind = 'p'"
# A role with the right to read a partitioned table may lack the right to read the table's partitions by name. Row
# security is set per table, so reading a partition by name would ignore the policies of the partitioned table.
_READABLE: Final = """
SELECT bool_and(has_table_privilege(leaf.oid, 'SELECT') AND NOT leaf.relrowsecurity), bool_or(root.relrowsecurity)
FROM pg_class root, pg_partition_tree(root.oid) part JOIN pg_class leaf ON leaf.oid = part.relid
WHERE root.oid = to_regclass({table}) AND part.isleaf
"""
_PAGES: Final = """
SELECT CASE WHEN relkind IN ('r', 'm') THEN pg_relation_size(oid) / current_setting('block_size')::bigint ELSE 0 END
FROM pg_class WHERE oid = to_regclass({table})
"""


class PartitionQueries(Protocol):
    """The methods of a source that this module calls."""

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """The rows of a small query, inside the snapshot."""

    def plan(self, selection: TableSelection, terms: list[str]) -> list[dict[str, Any]]:
        """The nodes of PostgreSQL's query plan for the selection."""

    def table_of(self, selection: TableSelection) -> str:
        """The quoted name of the selection's table."""


@dataclass(frozen=True, slots=True)
class TablePartition:
    """A partition: its quoted name, its size in pages (0: do not split it), and whether an index finds the wanted
    rows."""

    name: str
    pages: int
    is_indexed: bool


def leaves(database: PartitionQueries, selection: TableSelection, terms: list[str]) -> list[TablePartition]:
    """The partitions that can contain the wanted rows.

    The list is empty if the table is not partitioned, or if its partitions cannot be read by name.
    """
    table = database.table_of(selection)
    if not database.query(_IS_PARTITIONED.format(table=sql.text(table)))[0][0]:
        return []
    readable, has_policies = database.query(_READABLE.format(table=sql.text(table)))[0]
    if not readable or has_policies:
        return []
    # PostgreSQL's plan leaves out the partitions that cannot contain rows for the SQL conditions `terms`.
    found = {}
    for node in database.plan(selection, terms):
        if "Relation Name" in node:
            name = f"{sql.name(node['Schema'])}.{sql.name(node['Relation Name'])}"
            found[name] = "Index" in node["Node Type"] or "Bitmap" in node["Node Type"]
    return [TablePartition(name, _pages(database, name), is_indexed) for name, is_indexed in found.items()]


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The nodes of a query plan. Each node comes before its child nodes."""
    yield plan
    for inner in plan.get("Plans", ()):
        yield from nodes(inner)


def _pages(database: PartitionQueries, table: str) -> int:
    return int(database.query(_PAGES.format(table=sql.text(table)))[0][0])


def page_pieces(pages: int) -> list[list[str]]:
    """For each task its SQL conditions; the tasks together read a table of `pages` pages."""
    if pages <= PAGES_PER_PARTITION:
        return [[]]
    count = task_count(pages / PAGES_PER_PARTITION)
    edges = [pages * number // count for number in range(count)]
    pieces = [[f"ctid >= '({low},0)'::tid AND ctid < '({high},0)'::tid"] for low, high in pairwise(edges)]
    # The last task reads to the end of the table. Pages that were added after the snapshot have no rows of this
    # snapshot.
    return [*pieces, [f"ctid >= '({edges[-1]},0)'::tid"]]


def task_count(exact: float) -> int:
    """The number of tasks for a table that has `exact` times the size of one task; at least 1, at most
    MAX_PARTITIONS."""
    return max(1, min(MAX_PARTITIONS, int(exact) + 1))
