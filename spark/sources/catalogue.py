"""What is asked of PostgreSQL's catalogue, and which of its types a field may have."""

from __future__ import annotations

from typing import Final

from ..rules.rule import FieldType

IDENTITY: Final = "SELECT system_identifier::text FROM pg_control_system()"
COLUMN_TYPES: Final = """
SELECT attname::text, format_type(atttypid, NULL) FROM pg_attribute
WHERE attrelid = to_regclass({table}) AND attnum > 0 AND NOT attisdropped
"""
UNIQUE: Final = """
SELECT 1 FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
WHERE i.indrelid = to_regclass({table}) AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indnkeyatts = 1
  AND i.indpred IS NULL AND a.attname = {column} AND a.attnotnull
"""
COMPARABLE: Final = {
    FieldType.TEXT: ("text", "character varying", "character", "name", "uuid", "citext", "integer", "bigint"),
    FieldType.INTEGER: ("smallint", "integer", "bigint", "numeric"),
    FieldType.DECIMAL: ("smallint", "integer", "bigint", "numeric", "real", "double precision"),
    FieldType.BOOLEAN: ("boolean",),
    FieldType.TIMESTAMP: ("timestamp with time zone", "timestamp without time zone", "date"),
    FieldType.DATE: ("date",),
    FieldType.UUID: ("uuid", "text", "character varying"),
}
