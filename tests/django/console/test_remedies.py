"""What an operator asks first, and what to press: tiles, remedies, states, workers, and equal errors folded."""

from __future__ import annotations

import re
from uuid import UUID

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from outbox.broker.operations import summary
from outbox.contrib.console.templatetags import outbox_console
from outbox.contrib.django import publish
from outbox.contrib.django.actions.cells import readable
from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.django.operations.known_conditions import catalogue
from tests.django.broker_world import World
from tests.django.faults import no_sequencer
from tests.django.operators import blocked, bury, client_of, dead_keys, make_user, retried, working
from tests.django.support import sequence

pytestmark = pytest.mark.usefixtures("no_subscribers", "one_session")

_OF_EACH_FORM = ("csrfmiddlewaretoken", "back")
# 50 rows with two actions each.
MOST_BYTES = 150_000


def page(client: Client, path: str = "") -> str:
    answer = client.get(f"/outbox/{path}")
    assert answer.status_code == 200, answer.content
    return answer.content.decode()


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def forms(html: str, action: str) -> list[dict[str, str]]:
    """The values that the buttons of an action send."""
    found = re.findall(rf'<form method="post" action="/outbox/act/{action}/".*?</form>', html, re.DOTALL)
    inputs = [dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form)) for form in found]
    return [
        {name: value for name, value in one.items() if name not in ("csrfmiddlewaretoken", "back")} for one in inputs
    ]


def test_each_remedy_is_an_action_with_its_fields() -> None:
    for condition in catalogue().values():
        for one in condition.shown.remedies:
            declared = {field.name: field for field in ACTIONS[one.action].fields}
            assert ACTIONS[one.action].permission is not None and one.tone in ("good", "bad", "plain")
            assert set(one.fields) <= set(declared)
            assert {name for name, field in declared.items() if field.required} <= set(one.fields)


def test_each_place_of_a_condition_is_a_page() -> None:
    """Otherwise the overview would fail as long as the condition holds."""
    places = [
        place for one in catalogue().values() for place in (one.shown.listed, one.shown.settled) if place is not None
    ]
    assert len(places) > 20
    for place in places:
        assert reverse(f"outbox:{place.page}"), place


def test_values_are_shown_for_people() -> None:
    identity = UUID(int=7)
    assert readable({"ids": [identity], "parked_at": None, "changed": {}, "is_held": False, "lag": 12}) == (
        f"ids {identity}, parked at –, changed –, is held no, lag 12"
    )
    assert readable({"decision": "R"}) == "decision ROLLBACK" and readable("R") == "R"
    with timezone.override("Europe/Berlin"):
        assert readable("since 2026-11-27T12:00:00.123456+00:00: no") == "since 2026-11-27 13:00:00: no"
    assert readable("no; raised in admit, /srv/app/lib/end-points.py:132") == (
        "no; raised in admit, lib/end-points.py:132"
    )
    assert readable("%RETRY%mail/orders") == "retries of orders" and readable("%RETRY%mail") == "retries of mail"
    assert (readable(None), readable(""), readable(True), readable(0.98765)) == ("–", "–", "yes", "0.988")


def test_the_tiles_show_figures_and_lead_to_their_lists(world: World, operator: Client) -> None:
    for group in ("mail", "stock"):
        world.subscribe(group)
    world.publish(3)
    world.age(7200)
    bury(world, "mail", "k0", "ValueError: no")
    retried(world, "stock", "k1", "TimeoutError: no answer")
    world.half()
    html = page(operator)
    tiles = re.findall(r'<li class="(\w+)"><a href="([^"]+)">(.*?)</a>', html, re.DOTALL)
    shown = [(tone, url, text_of(text).partition(" last tick ")[0]) for tone, url, text in tiles]
    assert shown == [
        ("critical", "/outbox/groups/?state=behind", "Lag 6 the oldest waits for 2 h, in mail"),
        ("ok", "/outbox/undecided/", "Undecided 1 no transaction is parked"),
        ("warning", "/outbox/dead-letters/", "Dead letters 1 in mail"),
        ("ok", "/outbox/waiting/?retrying=yes", "Retrying 1 in stock"),
        ("critical", "/outbox/workers/", "Workers 0 2 of 2 groups without one"),
        ("ok", "/outbox/workers/", "Sequencer leads"),
    ]
    order = re.findall(r'<section class="condition[^>]* data-key="(\w+)"', html)
    assert order.index("no_worker") < order.index("lag"), "the cause comes first"
    for _, url, _ in shown:
        assert operator.get(url).status_code == 200


def test_without_a_leader_no_old_figure_looks_good(world: World, operator: Client) -> None:
    world.subscribe("mail")
    no_sequencer(world)
    tiles = re.findall(r'<li class="(\w+)"><a href="[^"]+">(.*?)</a>', page(operator), re.DOTALL)
    shown = {text_of(text).split(" 0 ")[0]: (tone, text_of(text)) for tone, text in tiles}
    for name in ("Lag", "Undecided", "Dead letters", "Retrying"):
        tone, text = shown[name]
        assert tone == "unknown" and re.search(r"counted .* ago, and no process leads", text), text


def test_a_message_is_skipped_from_the_card_of_its_condition(world: World, operator: Client) -> None:
    bad = blocked(world, "mail")
    for path in ("", "groups/one/?name=mail"):
        [given, *_] = forms(page(operator, path), "skip")
        assert given == {"group": "mail", "topic": "orders", "id": str(bad)}
    plan = operator.post("/outbox/act/skip/", given).content.decode()
    assert f"Group mail skips message {bad} of topic orders" in text_of(plan)
    assert forms(page(operator), "skip") == [given], "nothing before it is confirmed"
    answer = operator.post("/outbox/act/skip/", {**given, "confirmed": "yes", "why": "the order is void"})
    assert answer.status_code == 302
    assert (OperatorAction.objects.get().action, OperatorAction.objects.get().outcome) == ("skip", "done")
    assert forms(page(operator), "skip") == []


def test_conditions_offer_their_remedies_once_and_only_to_those_who_may_act(world: World, operator: Client) -> None:
    world.subscribe("mail")
    world.publish(2)
    bury(world, "mail", "k0", "ValueError: no")
    world.half()
    world.sql("UPDATE outbox.pending_check SET parked_at = now(), park_reason = 'checks'")
    world.sql("UPDATE outbox.broker SET reject_transactional = true")
    world.sql(
        "INSERT INTO outbox.queue_lease (group_id, queue_id, epoch, expires_at, stopped)"
        " SELECT group_id, queue_id, 1, now(), 'ValueError: stop' FROM outbox.consumer_group, outbox.queue"
        " JOIN outbox.topic USING (topic_id) WHERE topic.name = 'orders'"
    )
    [(transaction_id,)] = world.sql("SELECT transaction_id FROM outbox.pending_check")
    html = page(operator)
    assert forms(html, "resume") == [{"group": "mail"}], "once for all stopped queues of the group"
    assert forms(html, "replay") == [{"group": "mail", "all": "yes"}]
    assert forms(html, "ask") == [{"ids": str(transaction_id)}]
    assert [one["decision"] for one in forms(html, "decide")] == ["commit", "rollback"]
    assert forms(html, "accept")[0] == {}
    seer = client_of(make_user("view_operations"))
    assert "<form" not in page(seer) and "stopped_queue" in page(seer)


def test_a_group_begins_with_its_health_and_folds_equal_errors(world: World, operator: Client) -> None:
    world.subscribe("mail")
    world.subscribe("stock")
    world.publish(6)
    for number in range(3):
        bury(world, "mail", f"k{number}", "TimeoutError: no answer")
    bury(world, "stock", "k0", "ValueError: of another group")
    summary.refresh(world.run)
    html = page(operator, "groups/one/?name=mail")
    live = text_of(html.partition('<div id="live"')[2])
    assert 'data-address="/outbox/groups/one/?name=mail"' in html, "it refreshes"
    assert "of another group" not in live
    order = [live.index(part) for part in ("Lag", "dead_letters", "Dead letters by error", "Queues")]
    assert order == sorted(order)
    assert re.search(r"3 TimeoutError TimeoutError: no answer .* Show Replay all … Discard all …", live)
    assert {"group": "mail", "error_type": "TimeoutError"} in forms(html, "replay")


def test_lists_of_messages_have_tabs_with_counts_and_show_the_state_of_each_row(world: World, operator: Client) -> None:
    world.subscribe("mail")
    world.publish(4)
    bury(world, "mail", "k0", "ValueError: no")
    retried(world, "mail", "k1", "ValueError: no")
    publish("reminders", {}, key="later", delay=3600, at_once=True)
    sequence()
    world.half()
    summary.refresh(world.run)
    for path in ("messages/", "undecided/", "waiting/?retrying=yes", "dead-letters/", "dead-letters/list/?group=mail"):
        assert "All Undecided 1 Parked 0 Delayed Retrying 1 Dead 1" in text_of(page(operator, path)), path
    rows = re.findall(r"<tr>(.*?)</tr>", page(operator, "messages/").partition("<tbody>")[2], re.DOTALL)
    states = {key: text_of(row) for key in ("k0", "k1", "k2", "later", "half") for row in rows if f">{key}<" in row}
    assert "dead in 1 group" in states["k0"] and "retrying" in states["k1"] and "committed" in states["k2"]
    assert "delayed" in states["later"] and "undecided" in states["half"]
    only = text_of(page(operator, "messages/?state=undecided").partition("<tbody>")[2])
    assert "half" in only and "committed" not in only
    delayed = page(operator, "waiting/?delayed=yes")
    assert "later" in delayed and ">k1<" not in delayed
    assert ">later<" not in page(operator, "waiting/?retrying=yes")


def test_letters_that_arrive_after_a_plan_are_not_replayed_with_it(world: World, operator: Client) -> None:
    world.subscribe("mail")
    world.publish(3)
    bury(world, "mail", "k0", "TimeoutError: no answer")
    bury(world, "mail", "k1", "KeyError: 'email'")
    [given] = [one for one in forms(page(operator, "dead-letters/"), "replay") if one["error_type"] == "TimeoutError"]
    plan = operator.post("/outbox/act/replay/", given).content.decode()
    assert "Deliver 1 dead letter again to group mail whose error is of type TimeoutError" in text_of(plan)
    bury(world, "mail", "k2", "TimeoutError: no answer")
    confirmed = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', plan))
    operator.post("/outbox/act/replay/", {**confirmed, "confirmed": "yes", "why": "the mail server is back"})
    assert dead_keys(world.run, "mail") == ["k1", "k2"]


def test_groups_are_listed_by_state(world: World, operator: Client) -> None:
    for group in ("mail", "stock", "points"):
        world.subscribe(group)
    world.publish(1)
    bury(world, "mail", "k0", "ValueError: no")
    world.sql("UPDATE outbox.consumer_group SET paused = true WHERE name = 'stock'")

    def names(state: str) -> list[str]:
        return re.findall(r'<tr data-key="(\w+)">', page(operator, f"groups/?state={state}"))

    assert names("") == names("behind") == names("unattended") == names("nonsense") == ["mail", "points", "stock"]
    assert (names("dead"), names("paused"), names("stopped"), names("failing")) == (["mail"], ["stock"], [], [])
    tabs = "All 3 Behind 3 Failing 0 Stopped 0 Paused 1 At a limit 0 Dead letters 1 No workers 3"
    assert tabs in text_of(page(operator, "groups/"))
    html = page(operator, "groups/")
    assert forms(html, "resume") == [{"group": "stock"}]
    assert sorted(one["group"] for one in forms(html, "pause")) == ["mail", "points"]


def test_workers_are_listed_with_their_running_calls(world: World, operator: Client) -> None:
    assert "No consumer process runs" in page(operator, "workers/")
    world.subscribe("mail")
    world.publish(1)
    [(message_id,)] = world.sql("SELECT message_id FROM outbox.commit_log")
    working(world, "mail", message_id)
    old = working(world, "mail", message_id)
    world.sql("UPDATE outbox.consumer_process SET version = '0.1' WHERE instance_id = %s", old)
    world.sql("UPDATE outbox.consumer SET expires_at = now() - interval '1 minute' WHERE instance_id = %s", old)
    html = page(operator, "workers/?group=mail")
    assert f"/outbox/messages/{message_id}/" in html
    text = text_of(html)
    assert "alive" in text and "vanished" in text and "The longest for 40 s" in text and "attempt 2" in text
    assert "No consumer process runs" in page(operator, "workers/?group=another")
    assert "The longest for" in page(operator, "groups/one/?name=mail")


def test_the_audit_is_filtered(world: World, operator: Client) -> None:
    for action, outcome in (("pause", "done"), ("skip", "failed"), ("pause", "failed")):
        OperatorAction.objects.create(who="ada", why="w", action=action, subject="s", effect="e", outcome=outcome)

    def entries(query: str) -> int:
        return page(operator, f"audit/?{query}").count('data-label="When"')

    assert [entries(one) for one in ("", "action=pause", "outcome=failed", "action=pause&outcome=failed")] == [
        3,
        2,
        2,
        1,
    ]


def test_a_full_list_is_small(world: World, operator: Client) -> None:
    world.subscribe("mail")
    world.publish(51)
    for number in range(51):
        bury(world, "mail", f"k{number}", f"ValueError: {'x' * 400}")
    for path in ("dead-letters/list/", "dead-letters/list/?group=mail", "messages/"):
        html = page(operator, path)
        assert "Next page" in html and len(html.encode()) < MOST_BYTES, path


def test_a_next_step_links_to_the_documents_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    step = "Delete it (docs/operations/messages.md#rename-or-delete-a-group): `outbox_group delete`, or docs/limits.md."
    monkeypatch.setattr(outbox_console, "documents", lambda: "https://example.com/v1/docs/")
    assert outbox_console.marked(step) == (
        'Delete it (<a href="https://example.com/v1/docs/operations/messages.md#rename-or-delete-a-group">rename or '
        'delete a group</a>): <code>outbox_group delete</code>, or <a href="https://example.com/v1/docs/limits.md">'
        "limits</a>."
    )
    monkeypatch.setattr(outbox_console, "documents", lambda: "")
    assert "docs/limits.md." in outbox_console.marked(step), "a checkout has no address"
