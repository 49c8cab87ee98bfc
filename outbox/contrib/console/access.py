"""The operations page's permissions, error pages and content security policy."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import psycopg
from django.conf import settings
from django.db import Error as DatabaseError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, resolve_url
from django.templatetags.static import static
from django.urls import NoReverseMatch, reverse
from django.views.decorators.csrf import csrf_exempt, csrf_protect
from django.views.decorators.http import require_POST, require_safe

from outbox.contrib.console.asking import application
from outbox.contrib.console.rendering import problem
from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.database import deadline
from outbox.contrib.django.database.aliases import one_connection
from outbox.contrib.django.operations.known_conditions import observer
from outbox.contrib.django.views import SECONDS, SEE, View, with_headers
from outbox.errors import (
    ConfigurationError,
    InvalidSubscription,
    NotSupported,
    OutboxError,
    UnknownGroup,
    UnknownTopic,
    UsageError,
)

_OTHER_ENGINE: Final = "This page does not work on this broker"


def seeing(view: View) -> View:
    """Wrap a page view: it accepts only GET and HEAD, from staff with the permission to see the page."""

    @wraps(view)
    def reading_once(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        with one_connection():
            return view(request, *args, **kwargs)

    return _guarded(require_safe, reading_once, [SEE])


def acting(*permissions: str) -> Callable[[View], View]:
    """Wrap a view that changes something: only POST with the CSRF token, from staff with these permissions."""
    return lambda view: _guarded(require_POST, view, [SEE, *permissions])


def _guarded(method: Callable[[View], View], view: View, permissions: list[str]) -> View:
    @wraps(view)
    def wrapped(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        with deadline.within(SECONDS):
            return _answer(view, permissions, request, *args, **kwargs)

    # The middleware would refuse a POST without its token before this view, and so without the page's headers.
    return csrf_exempt(with_headers(method(csrf_protect(wrapped)), _sources))


def _refusal(request: HttpRequest, permissions: list[str]) -> HttpResponse | None:
    user = getattr(request, "user", None)
    if user is None:
        return problem(
            request,
            "Users cannot be identified",
            "The operations page needs django.contrib.auth with its AuthenticationMiddleware.",
            status=403,
        )
    if not user.is_authenticated:
        if request.method == "POST":
            return problem(
                request, "No user is logged in", "Nothing was done. Log in, then repeat the action.", status=403
            )
        return redirect(f"{_login_url()}?{urlencode({'next': request.get_full_path()})}")
    lacking = [name for name in permissions if not user.has_perm(name)]
    if not user.is_staff or lacking:
        needed = "The operations page is for staff" + (f" with the permission {', '.join(lacking)}" if lacking else "")
        return problem(request, "This user has no access", f"{needed}. Nothing was done.", status=403)
    return None


def _login_url() -> str:
    try:
        return reverse("admin:login")
    except NoReverseMatch:
        return str(resolve_url(settings.LOGIN_URL))


def _answer(view: View, permissions: list[str], request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
    try:
        with application():
            refusal = _refusal(request, permissions)
        if refusal is None and (text := _refused_by_engine(request)):
            return problem(request, _OTHER_ENGINE, text, status=404)
        return refusal or view(request, *args, **kwargs)
    except (UnknownGroup, UnknownTopic) as error:
        return problem(request, "The broker does not have this group or topic", str(error), status=404)
    except (ConfigurationError, InvalidSubscription) as error:
        if isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
            return _unanswered(request, error)
        return problem(request, "The settings or the code of this project are wrong", str(error), status=500)
    except NotSupported as error:
        return problem(request, _OTHER_ENGINE, str(error), status=404)
    except UsageError as error:
        return problem(request, "This is not possible", str(error), status=400)
    except (OutboxError, psycopg.Error, DatabaseError) as error:
        return _unanswered(request, error)


def _refused_by_engine(request: HttpRequest) -> str:
    name = (request.resolver_match and request.resolver_match.url_name) or ""
    action = ACTIONS.get(name.removeprefix("act_")) if name.startswith("act_") else None
    try:
        if (server := observer()) is None:
            return ""
        return server.refused_page(name) if action is None else server.refused_command(action.command)
    except ConfigurationError:
        # The view reports wrong settings itself.
        return ""


def _unanswered(request: HttpRequest, error: Exception) -> HttpResponse:
    """Answer a failed database request with an error page."""
    driver = error if isinstance(error, psycopg.Error) else error.__cause__
    said = str(error).strip()
    if isinstance(driver, psycopg.errors.LockNotAvailable):
        title = "Another session holds a lock"
        said = (
            f"Another session has held a lock that this action needs for longer than {deadline.LOCK_SECONDS:.0f} s. "
            "Nothing was done. The condition lock_held names a session that holds a lock on a table of the broker. "
            f"End the transaction of that session, or try again later.\n{said}"
        )
    elif isinstance(driver, psycopg.errors.QueryCanceled):
        title = "The search takes too long"
        said = (
            f"The database did not answer within {SECONDS:.0f} s. Nothing was done. Name a topic, a shorter time, or "
            f"fewer messages.\n{said}"
        )
    elif isinstance(driver, psycopg.errors.InsufficientPrivilege):
        title = "The login of this process lacks a right"
        said += "\nNothing was done. To read, the pages need the role watch; their actions need the role work."
    elif isinstance(error, DatabaseError):
        title = "The application's database did not answer"
        said += "\nIf a table is missing, run `manage.py migrate`."
    else:
        title = "The broker did not answer"
    return problem(request, title, said, status=503)


def _sources() -> str:
    """The files that a page may load: those of this site and of the static files' host."""
    files: Final = urlsplit(static("outbox/console.css"))
    return "'self'" + (f" {files.scheme or 'https'}://{files.netloc}" if files.netloc else "")


@seeing
def unknown(request: HttpRequest) -> HttpResponse:
    """Answer 404 for an address that no page has, with the headers that the project's own answer would not have."""
    return problem(request, "No such page", "The operations pages have no such address.", status=404)
