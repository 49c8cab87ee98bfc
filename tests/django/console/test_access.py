"""The permissions to see, to act and to see bodies: every address, so that a new one cannot be left out."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import uuid4

import pytest
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.test import Client, RequestFactory
from django.test.utils import override_settings
from django.urls import reverse

import outbox
from outbox.contrib.console import urls
from outbox.contrib.console.views import overview
from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.database.aliases import one_connection
from outbox.contrib.django.models import OperatorAction
from tests.django.broker_world import World
from tests.django.operators import ALL, client_of, make_user

ARGUMENTS: dict[str, list[object]] = {"message": [uuid4()], "audit_entry": [1]}
NAMES = [pattern.name for pattern in urls.PAGES if pattern.name is not None]
SEEN = [name for name in NAMES if not name.startswith("act_")]
DONE = [name for name in NAMES if name.startswith("act_")]

pytestmark = pytest.mark.usefixtures("no_subscribers")


def address(name: str) -> str:
    return reverse(f"outbox:{name}", args=ARGUMENTS.get(name))


def test_every_action_has_its_address() -> None:
    assert len(NAMES) == len(urls.PAGES)
    assert sorted(DONE) == sorted(f"act_{name}" for name, action in ACTIONS.items() if action.permission)
    assert len(DONE) >= 10 and len(SEEN) >= 15


def test_pages_are_for_staff_with_the_permission_and_not_kept(world: World) -> None:
    users = (make_user(), make_user("act", "view_bodies"), make_user("view_operations", staff=False))
    refused, reader = [client_of(user) for user in users], client_of(make_user("view_operations"))
    with one_connection():
        for name in SEEN:
            anonymous = client_of(None).get(address(name))
            assert anonymous.status_code == 302, name
            assert anonymous["Location"].startswith("/accounts/login/?next=%2Foutbox%2F"), name
            for client in refused:
                answer = client.get(address(name))
                assert answer.status_code == 403 and b"This user has no access" in answer.content, name
            answer = reader.get(address(name))
            assert answer.status_code in (200, 400, 404) and "no-store" in answer["Cache-Control"], name
            policy = answer["Content-Security-Policy"]
            assert policy.startswith("default-src 'self'; object-src 'none'; base-uri 'none'"), name
            assert reader.post(address(name)).status_code == 405, name


def test_actions_are_refused_without_permission_without_token_and_by_get(world: World) -> None:
    may = make_user(*ALL)
    operator, without_token = client_of(may), client_of(may, csrf=True)
    users = (make_user("view_operations", "view_bodies"), make_user("act"), make_user(*ALL, staff=False))
    refused = [client_of(None), *map(client_of, users), without_token]
    given = {"confirmed": "yes", "why": "because"}
    for name in DONE:
        assert operator.get(address(name), given).status_code == 405, name
        assert [one.post(address(name), given).status_code for one in refused] == [403] * len(refused), name
    assert not OperatorAction.objects.exists()
    for name in DONE:
        assert operator.post(address(name), given).status_code in (302, 400, 422), f"{name}: with all of them, not"


def test_without_accounts_no_page_is_shown(world: World) -> None:
    request = RequestFactory().get("/outbox/")
    answer = overview.overview(request)
    assert answer.status_code == 403 and b"AuthenticationMiddleware" in answer.content
    request.user = AnonymousUser()
    assert overview.overview(request).status_code == 302


def test_the_policy_knows_where_static_files_are(operator: Client) -> None:
    with override_settings(STATIC_URL="https://files.example.org/static/"):
        policy = operator.get("/outbox/")["Content-Security-Policy"]
    assert policy.startswith("default-src 'self' https://files.example.org;")


def test_templates_have_no_script_and_no_style_of_their_own() -> None:
    folder = Path(outbox.__file__).parent
    texts = {path.name: path.read_text() for path in folder.rglob("templates/**/*.html")}
    assert len(texts) >= 18
    for name, text in texts.items():
        assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:|https?://", text) == [], name


def test_the_settings_of_these_tests_have_no_middleware_of_csrf() -> None:
    """Else the views' own protection was not what refused."""
    assert not any("Csrf" in name for name in settings.MIDDLEWARE)
