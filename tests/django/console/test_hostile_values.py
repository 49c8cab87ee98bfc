"""A hostile value of a request or of a stored row is shown as text or refused: no page fails, none lacks headers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Final
from uuid import uuid4

import pytest
from django.db import transaction
from django.http import HttpResponseBase
from django.test import Client
from django.test.utils import override_settings
from django.urls import reverse
from django.utils import timezone

from outbox.broker.groups.registration import register
from outbox.broker.log.incidents import IncidentKind
from outbox.broker.operations.conditions import Condition, Fact, Severity
from outbox.contrib.console import asking, tabs, urls
from outbox.contrib.django import publish
from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.database.aliases import one_connection
from outbox.contrib.django.models import OperatorAction, RaisedCondition
from outbox.contrib.django.operations.known_conditions import catalogue
from outbox.contrib.reconciliation.models import Finding
from outbox.subscription import Subscription
from tests.django.broker_world import World
from tests.django.given_conditions import give
from tests.django.operators import bury, client_of, make_user, retried, working
from tests.django.support import sequence
from tests.part_apps import has

pytestmark = pytest.mark.usefixtures("no_subscribers")

DATES: Final = [
    *("9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59-23:59"),
    *("0001-01-01T00:00:00+23:59", "9999-12-31 23:59:59.999999Z", "0001-01-01", "9999-12-31T23:59", "infinity"),
]
FIRST, LAST = "0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59+00:00"
NUMBERS: Final = ["9" * 5000, "0" * 5000, "-1", "nan", "inf", "1e400", str(2**63), "\N{SUPERSCRIPT TWO}", "1_000"]
TEXTS: Final = [
    *("<script>alert(1)</script>", "\N{RIGHT-TO-LEFT OVERRIDE}gpj", "\x1b[2J", "%RETRY%a/b", "../../etc", "{{ x }}"),
    *("'; DROP TABLE x", "x" * 10_000, "%", "\\", "\n", "\N{PILE OF POO}" * 9),
]
STORED: Final = [*DATES, *NUMBERS, *TEXTS]
# PostgreSQL stores neither of the last two.
ASKED: Final = [*STORED, "\0", "a\ud800"]
ZONES: Final = ("Europe/Berlin", "America/Chicago")
HEADERS: Final = ("Content-Security-Policy", "Referrer-Policy", "X-Content-Type-Options", "Cache-Control")
PAGES: Final = {
    one.name: reverse(f"outbox:{one.name}")
    for one in urls.PAGES
    if one.name and not one.name.startswith("act_") and "<" not in str(one.pattern)
}


def checked(answer: HttpResponseBase, *what: object) -> str:
    """The text of an answer that is right for a hostile value."""
    html = getattr(answer, "content", b"").decode()
    allowed = (200, 503) if what[:1] == ("status/",) else (200, 302, 400, 404, 422)
    assert answer.status_code in allowed, (answer.status_code, what, html[-600:])
    assert [name for name in HEADERS if name not in answer.headers] == [], what
    assert "<script>alert" not in html or "json" in answer.headers["Content-Type"], what
    return html


def parameters(name: str) -> list[str]:
    """The parameters that a page reads: the fields of its listing, or those in its source and what it calls."""
    if found := next((one for one in urls.LISTED if one.name == name), None):
        return sorted({*(field.name for field in found.fields), "after", *(["state"] if found.states else [])})
    view = next(one.callback for one in urls.PAGES if one.name == name)
    source = inspect.getsource(inspect.unwrap(view))
    for called, module in (("place(", asking), ("by_state(", tabs)):
        source += inspect.getsource(getattr(module, called[:-1])) if called in source else ""
    named = re.findall(r"""(?:\bGET|\bgiven)(?:, |\.get\()"(\w+)"|for name in \(("[^)]+)\)""", source)
    names = {one for plain, _ in named if (one := plain)} | set(
        re.findall(r'"(\w+)"', " ".join(two for _, two in named))
    )
    return sorted(names | ({"after"} if "sliced(" in source else set()))


def requests(every: bool) -> Iterator[tuple[str, str, str]]:
    """Page, parameter, value. Without `every`, one value for each parameter, so that each value has its turn."""
    turn = 0
    for page, address in PAGES.items():
        for name in parameters(page):
            for value in ASKED if every else [ASKED[turn % len(ASKED)]]:
                yield address, name, value
            turn += 1


def test_the_parameters_of_pages_are_found() -> None:
    assert {name: parameters(name) for name in ("search", "letters", "audit", "group", "history")} == {
        "search": ["after", "q", "since", "state", "topic", "until", "within"],
        "letters": ["after", "error", "error_type", "group", "key", "settled", "since", "topic", "until"],
        "audit": ["action", "after", "outcome", "who"],
        "group": ["after", "name", "topic"],
        "history": ["group"],
    }
    assert sum(len(parameters(name)) for name in PAGES) >= 40


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_no_parameter_makes_a_page_fail(world: World, operator: Client, every: bool) -> None:
    world.subscribe("mail")
    world.publish()
    with one_connection():
        for number, (address, name, value) in enumerate(requests(every)):
            is_half = "\ud800" in value
            given = {name: value.encode("utf-8", "surrogatepass").decode("latin-1") if is_half else value}
            with timezone.override(ZONES[number % 2]):
                checked(operator.get(address, given), address, name, value[:40])


def test_a_number_of_5000_digits_and_a_far_date_are_refused_with_a_sentence(world: World, operator: Client) -> None:
    html = checked(operator.get("/outbox/messages/", {"after": "9" * 5000}))
    assert "is not a whole number, at least 0" in html
    assert "is not a time" in checked(operator.get("/outbox/messages/", {"since": "9" * 5000}))
    for name, field in (("limits", "running"), ("reset", "to_offset")):
        given = {"group": "mail", "topic": "orders", field: "9" * 5000}
        answer = operator.post(reverse(f"outbox:act_{name}"), given)
        assert answer.status_code == 400 and "is not a whole number" in checked(answer)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_no_field_of_a_form_makes_an_action_fail(world: World, operator: Client, every: bool) -> None:
    world.subscribe("mail")
    world.publish()
    plain = {"group": "mail", "topic": "orders", "id": str(uuid4()), "name": "orders"}
    turn = 0
    for name, action in ACTIONS.items():
        if action.permission is None:
            continue
        fields = [one.name for one in action.fields] + ["back"]
        turn += 1
        for field in fields if every else [fields[turn % len(fields)]]:
            for value in ASKED[:-1] if every else [ASKED[turn % (len(ASKED) - 1)]]:
                given = {one: plain[one] for one in fields if one in plain} | {field: value}
                answer = operator.post(reverse(f"outbox:act_{name}"), given)
                checked(answer, name, field, value[:40])
    assert not OperatorAction.objects.exists()


def test_addresses_that_no_page_has_and_methods_that_it_refuses_have_the_headers(
    world: World, operator: Client
) -> None:
    world.subscribe("mail")
    for path in ("messages/no-uuid/", f"audit/{'9' * 5000}/", "audit/-1/", "groups/two/three/", "messages/%00/"):
        answer = operator.get(f"/outbox/{path}")
        assert answer.status_code == 404 and "No such page" in checked(answer), path
        assert client_of(None).get(f"/outbox/{path}").status_code == 302, "nothing is told to a stranger"
    assert checked(operator.get(f"/outbox/audit/{2**63}/")) and checked(operator.get(f"/outbox/messages/{uuid4()}/"))
    for answer in (
        operator.post("/outbox/"),
        operator.get("/outbox/act/pause/"),
        client_of(make_user("view_operations", "act"), csrf=True).post("/outbox/act/pause/", {"group": "mail"}),
        client_of(make_user()).get("/outbox/"),
        client_of(None).get("/outbox/status/"),
    ):
        assert answer.status_code in (403, 405) and [name for name in HEADERS if name not in answer.headers] == []
    with override_settings(MIDDLEWARE=["django.middleware.csrf.CsrfViewMiddleware", *_middleware()]):
        strict = client_of(make_user("view_operations", "act"), csrf=True)
        answer = strict.post("/outbox/act/pause/", {"group": "mail"})
        assert answer.status_code == 403 and "Content-Security-Policy" in answer.headers
        page = strict.get("/outbox/groups/one/?name=mail").content.decode()
        found = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
        assert found and strict.post("/outbox/act/pause/", {"csrfmiddlewaretoken": found[1]}).status_code == 400


def _middleware() -> list[str]:
    from django.conf import settings

    return list(settings.MIDDLEWARE)


def test_the_charset_of_a_request_changes_nothing(world: World, operator: Client) -> None:
    for charset in ("unicode_escape", "utf-7", "utf-16", "nosuch"):
        answer = operator.get("/outbox/groups/?q=%5Cud800", headers={"Content-Type": f"text/plain; charset={charset}"})
        assert answer.status_code == 200 and "\\ud800" in checked(answer), charset


def test_a_page_that_fails_has_the_headers_and_is_reported(
    world: World, operator: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> list[Condition]:
        raise ZeroDivisionError("of a rule")

    give(monkeypatch, saga_stalled=broken)
    operator.raise_request_exception = False
    answer = operator.get("/outbox/")
    assert answer.status_code == 500 and [name for name in HEADERS if name not in answer.headers] == []
    assert "ZeroDivisionError: of a rule" in caplog.text
    operator.raise_request_exception = True
    with pytest.raises(ZeroDivisionError):
        operator.get("/outbox/")


# -- what is stored ---------------------------------------------------------------------------------


@pytest.fixture
def crowded(world: World) -> Iterator[tuple[World, list[str]]]:
    """Rows of every kind, whose texts are hostile; and the addresses of the pages that show them."""
    yield world, crowd(world, STORED)
    RaisedCondition.objects.all().delete()


def crowd(world: World, values: Sequence[str]) -> list[str]:
    """Store rows of every kind with these texts, and return the addresses of the pages that show them."""
    text = " ".join(one for one in values if one != "\n")
    short = f"{DATES[0]} {NUMBERS[3]} <script>alert(1)</script> \N{RIGHT-TO-LEFT OVERRIDE} {DATES[1]}"
    register(world.run, Subscription(topic="orders", group="mail"))
    deep = "[" * 700 + "]" * 700
    with transaction.atomic():
        first = publish("orders", {"deep": "x"}, key=short, tag="a", headers={"event-like": text[:2000]}).message_id
    world.publish(3)
    world.sql("UPDATE outbox.commit_log SET body = %s WHERE message_id = %s", deep.encode(), first)
    bury(world, "mail", short, text)
    bury(world, "mail", "k0", DATES[0])
    retried(world, "mail", "k1", text)
    process = working(world, "mail", first)
    world.sql("UPDATE outbox.consumer SET host = %s WHERE instance_id = %s", short, process)
    world.half()
    world.sql("UPDATE outbox.pending_check SET parked_at = now(), park_reason = %s", short)
    world.sql("ALTER TABLE outbox.incident ALTER COLUMN incident_id RESTART WITH 1234500")
    kinds = cycle((*map(str, IncidentKind), short))
    for kind, value in zip(kinds, [*values, *values], strict=False):
        stored = (kind, value[:300], value)
        world.sql("INSERT INTO outbox.incident (kind, subject, detail) VALUES (%s, %s, %s)", *stored)
    if has("schedules"):
        from outbox.contrib.schedules.schedule import Schedule, declare

        schedule = Schedule(producer_group="shop", name="r", topic="orders", expression="0 3 * * *")
        declare(world.run, "shop", [schedule])
        world.sql("UPDATE outbox.schedule SET error = %s, next_at = %s, last_at = %s", text, LAST, FIRST)
    for version in ("9" * 5000, "-1", short):
        with transaction.atomic():
            receipt = publish("orders", {}, headers={"outbox-event": "order.x"})
        world.sql(
            "UPDATE outbox.commit_log SET key = %s,"
            " headers = headers || jsonb_build_object('outbox-event-version', %s::text) WHERE message_id = %s",
            text, version, receipt.message_id,
        )  # fmt: skip
    sequence()
    action = OperatorAction.objects.create(
        id=1234567, at=LAST, ended_at=FIRST, who=short[:255], why=text, action="pause", subject=text, effect=text,
        before={text[:50]: text, "x": [1e308, {"a": DATES[0]}]}, after={"error": text},
    )  # fmt: skip
    Finding.objects.create(
        id=1234567, output="o", run="r", rule=short[:255], group=short[:127], finding_class="LOST", severity="x",
        key=text, detail=text, at=LAST, first_seen=FIRST, message_id="no uuid", row=text, body=text,
        step={"action": "publish"},
    )  # fmt: skip
    return [
        *PAGES.values(), f"/outbox/messages/{first}/", f"/outbox/audit/{action.pk}/", "/outbox/groups/one/?name=mail",
        "/outbox/groups/one/?name=mail&topic=orders", "/outbox/topics/one/?name=orders",
        "/outbox/waiting/?retrying=yes",
        "/outbox/dead-letters/list/?group=mail", "/outbox/undecided/?parked=yes",
        *(f"/outbox/messages/{one}/" for (one,) in world.sql("SELECT message_id FROM outbox.commit_log LIMIT 5")),
    ]  # fmt: skip


@pytest.mark.parametrize("zones", [ZONES[:1], pytest.param(ZONES[1:], marks=pytest.mark.slow)])
def test_what_is_stored_makes_no_page_fail(
    crowded: tuple[World, list[str]], operator: Client, zones: tuple[str, ...]
) -> None:
    """In the first zone the last year has an end, in the second one the first year has a beginning, that are none."""
    _, addresses = crowded
    for zone in zones:
        with timezone.override(zone), one_connection():
            for address in addresses:
                checked(operator.get(address), address, zone)


@pytest.mark.slow
def test_a_time_that_python_cannot_hold_is_shown_as_the_nearest(
    crowded: tuple[World, list[str]], operator: Client
) -> None:
    world, addresses = crowded
    shown = [one for one in addresses if re.search("/messages/|dead|incidents|waiting|mail$|outbox/$", one)]
    assert len(shown) >= 10
    for at in ("0044-03-15 12:00:00 BC", "infinity"):
        world.sql("UPDATE outbox.commit_log SET born_at = %s, stored_at = %s", at, at)
        world.sql("UPDATE outbox.incident SET at = %s", at)
        world.sql("UPDATE outbox.failure SET failed_at = %s", at)
        world.sql("UPDATE outbox.dead_letter SET dead_at = %s", at)
        for address in shown:
            checked(operator.get(address), address, at)


@pytest.mark.slow
def test_no_evidence_of_any_condition_makes_a_page_fail(
    crowded: tuple[World, list[str]], operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("group", "topic", "message", "error", "since", "producer_group", "subject", "waiting_for", "schedule")
    facts: list[Fact] = [dict.fromkeys(names, value) for value in STORED]
    for value in (float("nan"), float("inf"), 1e308, -1e308):
        facts.append({"group": "mail", "age_seconds": value, "share": value})
    # Each value in the evidence of two conditions or more.
    turns = cycle(facts)
    found = [one.condition(Severity.WARNING, list(islice(turns, 2)), 2) for one in catalogue().values()]
    assert len(found) >= len(facts)
    give(monkeypatch, saga_stalled=lambda: found)
    for zone in ZONES:
        with timezone.override(zone):
            for address in ("", "groups/one/?name=mail", "status/", "metrics/"):
                html = checked(operator.get(f"/outbox/{address}"), address, zone)
                assert address or "9999-12-31" in html
