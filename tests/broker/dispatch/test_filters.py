"""Filters: accepted and refused texts, their errors, and the same result in Python and SQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg import sql
from psycopg.types.json import Jsonb

from outbox.broker.consumer.fetch import FilterSql
from outbox.errors import InvalidFilter
from outbox.filters.filter import parse_filter


@pytest.mark.parametrize(
    ("text", "tag", "passes"),
    [
        ("", "paid", True),
        ("*", "", True),
        ("paid", "paid", True),
        ("paid", "", False),
        (" paid||refunded ", "refunded", True),
        ("paid || refunded", "pai", False),
    ],
)
def test_filter_by_tags(text: str, tag: str, passes: bool) -> None:
    assert parse_filter(text).evaluate(tag, {}) is passes


@pytest.mark.parametrize(
    ("expression", "headers", "passes"),
    [
        ("a = 'x'", {"a": "x"}, True),
        ("a = 'x'", {}, False),
        ("NOT a = 'x'", {}, False),
        ("a IS NULL OR NOT a = 'x'", {}, True),
        ("a <> 'x' AND b IS NOT NULL", {"a": "y", "b": ""}, True),
        ("n > 9", {"n": "10"}, True),
        ("n > '9'", {"n": "10"}, False),
        ("n = 10", {"n": "+10.0"}, True),
        ("n <> 10", {"n": "ten"}, False),
        ("n BETWEEN 1 AND 2.5", {"n": "2.50"}, True),
        ("n NOT BETWEEN 1 AND 2", {"n": "3"}, True),
        ("r IN ('eu', 'it''s')", {"r": "it's"}, True),
        ("r NOT IN (1, 2)", {"r": "eu"}, False),
        ("t LIKE 'a%_c'", {"t": "abbc"}, True),
        ("t LIKE '50!%' ESCAPE '!'", {"t": "50%"}, True),
        ("t LIKE '50!%' ESCAPE '!'", {"t": "500"}, False),
        ("a = b", {"a": "1", "b": "1"}, True),
        ('"in" = 1 and x-y = 2', {"in": "1", "x-y": "2"}, True),
        ("a = 1 OR a = 2 AND b = 1", {"a": "1"}, True),
        ("(a = 1 OR a = 2) AND b = 1", {"a": "1"}, False),
        ("a>-5", {"a": "-4"}, True),
    ],
)
def test_filter_by_header_expression(expression: str, headers: dict[str, str], passes: bool) -> None:
    assert parse_filter(f"sql: {expression}").evaluate("", headers) is passes


@pytest.mark.parametrize(
    ("pattern", "value", "passes"),
    [
        ("%a" * 30 + "b", "a" * 500, False),
        ("%a" * 30 + "b", "a" * 500 + "b", True),
        ("%a" * 30 + "_b%", "a" * 500, False),
        ("%_" * 30 + "b", "a" * 500, False),
        ("%a%" * 40 + "!%b", "a" * 500 + "%b", True),
        ("%a%" * 40 + "!%b", "a" * 500 + "b", False),
    ],
)
def test_a_pattern_of_many_parts_comes_to_an_end(
    connection: psycopg.Connection[tuple[bool]], pattern: str, value: str, passes: bool
) -> None:
    # Trying every place of every part is some 10 ** 50 steps: neither side may.
    expression = f"sql: t LIKE '{pattern}' ESCAPE '!'"
    assert parse_filter(expression).evaluate("", {"t": value}) is passes
    assert in_sql(connection, expression, "", {"t": value}) is passes


def test_filter_expression_knows_the_tag() -> None:
    assert parse_filter("sql: TAGS IN ('paid')").evaluate("paid", {"TAGS": "x"}) is True
    assert parse_filter("sql: TAGS IS NULL").evaluate("", {}) is True


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("paid || ", 9, "a tag is missing"),
        ("paid refunded", 1, "is not allowed"),
        ("sql:", 5, "the name of a header"),
        ("sql: a =", 9, "a number or a 'string'"),
        ("sql: a = AND b = 1", 10, "a number or a 'string'"),
        ("sql: a = 'x", 10, "never closed"),
        ("sql: a ? 1", 8, "not allowed here"),
        ("sql: a < b", 8, "two headers"),
        ("sql: a IN (1, 'x')", 15, "cannot be mixed"),
        ("sql: a BETWEEN 1 OR 2", 18, "expected AND"),
        ("sql: (a = 1", 12, "expected )"),
        ("sql: a = 1 b = 2", 12, "AND, OR or the end"),
        ("sql: a LIKE 'x!' ESCAPE '!'", 13, "ends with its escape"),
        ("sql: a NOT = 1", 12, "IN, BETWEEN or LIKE"),
        ("sql: a = true", 10, "a number or a 'string'"),
        ("sql: " + "(" * 60 + "a = 1", 56, "nested deeper"),
    ],
)
def test_invalid_filter_names_the_column(text: str, column: int, problem: str) -> None:
    with pytest.raises(InvalidFilter) as raised:
        parse_filter(text)
    assert f"column {column}:" in str(raised.value)
    assert problem in str(raised.value)
    if text.startswith("sql:"):
        line, caret = str(raised.value).splitlines()[1:]
        assert caret.index("^") - 2 == column - 1
        assert line == f"  {text}"


# -- Python and SQL agree ---------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "x-y", "TAGS", '"in"'])
TEXTS = st.text(alphabet="ab%_!\\'é 1.-+e", max_size=4)
NUMBERS = st.sampled_from(["0", "1", "-1", "1.0", "01", "+1.50", ".5", "5.", "99999999999999999999", "-.0"])
STRINGS = TEXTS.map(lambda text: "'" + text.replace("'", "''") + "'")
# Of several parts, in which a part has more than one place to be; an escape is followed by something.
PATTERNS = st.lists(st.sampled_from(["%", "%", "_", "a", "b", "!%", "!_"]), max_size=8).map(
    lambda parts: f"'{''.join(parts)}'"
)
VALUES = st.one_of(NUMBERS, STRINGS)
OPERATORS = st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">="])
MAYBE_NOT = st.sampled_from(["", "NOT "])


def _list_of(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(values, min_size=1, max_size=3).map(", ".join)


PREDICATES = st.one_of(
    st.builds("{} {} {}".format, NAMES, OPERATORS, VALUES),
    st.builds("{} {} {}".format, NAMES, st.sampled_from(["=", "<>"]), NAMES),
    st.builds("{} IS {}NULL".format, NAMES, MAYBE_NOT),
    st.builds("{} {}IN ({})".format, NAMES, MAYBE_NOT, st.one_of(_list_of(NUMBERS), _list_of(STRINGS))),
    st.builds("{} {}BETWEEN {} AND {}".format, NAMES, MAYBE_NOT, NUMBERS, NUMBERS),
    st.builds("{} {}BETWEEN {} AND {}".format, NAMES, MAYBE_NOT, STRINGS, STRINGS),
    st.builds("{} {}LIKE {}".format, NAMES, MAYBE_NOT, STRINGS),
    st.builds("{} {}LIKE {}".format, NAMES, MAYBE_NOT, PATTERNS),
    st.builds("{} LIKE {} ESCAPE '!'".format, NAMES, PATTERNS),
)
EXPRESSIONS = st.recursive(
    PREDICATES,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["AND", "OR"]), inner),
        st.builds("NOT {}".format, inner),
    ),
    max_leaves=6,
)
HEADERS = st.dictionaries(
    st.sampled_from(["a", "b", "x-y", "in"]), st.one_of(TEXTS, NUMBERS, st.text(alphabet="ab%", max_size=9)), max_size=4
)


@pytest.fixture(scope="module")
def connection(server_url: str) -> Iterator[psycopg.Connection[tuple[bool]]]:
    with psycopg.connect(server_url, autocommit=True) as connection:
        yield connection


def in_sql(connection: psycopg.Connection[tuple[bool]], text: str, tag: str, headers: Mapping[str, str]) -> bool:
    builder = FilterSql()
    query = sql.SQL("SELECT {} FROM (SELECT %(tag)s::text AS tag, %(headers)s::jsonb AS headers) l").format(
        builder.condition(parse_filter(text))
    )
    given_headers = Jsonb(dict(headers)) if headers else None
    row = connection.execute(query, {**builder.parameters, "tag": tag, "headers": given_headers}).fetchone()
    assert row is not None
    return row[0]


FILTERS = st.one_of(EXPRESSIONS.map("sql: {}".format), st.lists(st.sampled_from("abc"), min_size=1).map("||".join))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=FILTERS, tag=st.sampled_from(["", "a", "b", "d"]), headers=HEADERS)
@example(text="sql: a < 'é'", tag="", headers={"a": "z"})
@example(text="sql: a = 1", tag="", headers={"a": "1\n"})
def test_filter_means_the_same_in_python_and_in_the_broker(
    connection: psycopg.Connection[tuple[bool]], text: str, tag: str, headers: dict[str, str]
) -> None:
    assert in_sql(connection, text, tag, headers) is parse_filter(text).evaluate(tag, headers)
