"""The records that pg_waldump prints are read with their size and the tables that they change."""

from __future__ import annotations

from benchmarks.wal import Record, parse

PRINTED = """\
rmgr: Heap        len (rec/tot):     54/   158, tx:        745, lsn: 0/0152, prev 0/0151, desc: INSERT off: 3, \
flags: 0x00, blkref #0: rel 1663/16384/16401 blk 5
rmgr: Btree       len (rec/tot):     93/  3725, tx:        745, lsn: 0/0153, prev 0/0152, desc: SPLIT_R level: 0, \
blkref #0: rel 1663/16384/16405 blk 1 FPW, blkref #1: rel 1663/16384/16405 blk 2
rmgr: Transaction len (rec/tot):     34/    34, tx:        745, lsn: 0/0154, prev 0/0153, desc: COMMIT 2026-01-01
"""


def test_each_record_has_its_kind_its_tables_and_its_size() -> None:
    assert parse(PRINTED.splitlines()) == [
        Record("Heap INSERT", (16401,), 158, False),
        Record("Btree SPLIT_R", (16405,), 3725, True),
        Record("Transaction COMMIT", (), 34, False),
    ]
