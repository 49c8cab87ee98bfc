"""`path("outbox/", include("outbox.contrib.console.urls"))`: the operations pages.

The addresses of actions and of the lists of commands come from the catalogue.
"""

from __future__ import annotations

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.urls import URLPattern, path, re_path

from outbox.contrib.console.access import unknown
from outbox.contrib.console.views import (
    acting,
    dead_letters,
    groups,
    listing,
    messages,
    overview,
    records,
    waiting,
)
from outbox.contrib.django.catalogue import ACTIONS, LISTINGS

if not apps.is_installed("outbox.contrib.console"):
    raise ImproperlyConfigured("The operations page is not installed: add 'outbox.contrib.console' to INSTALLED_APPS.")

app_name = "outbox"

# Each page of a declared list has the list's name and address.
LISTED = (
    groups.GROUPS,
    groups.TOPICS,
    waiting.WAITING,
    records.INCIDENTS,
    records.AUDIT,
    *(one for one in LISTINGS.values() if one.address),
)

PAGES: list[URLPattern] = [
    path("", overview.overview, name="overview"),
    path("history/", overview.history, name="history"),
    path("liveness/", overview.liveness, name="liveness"),
    path("messages/", messages.search, name="search"),
    path("messages/<uuid:message_id>/", messages.message, name="message"),
    path("dead-letters/", dead_letters.dead_letters, name="dead_letters"),
    path("groups/one/", groups.group, name="group"),
    path("topics/one/", groups.topic, name="topic"),
    path("audit/<int:number>/", records.audit_entry, name="audit_entry"),
    *(path(one.address, listing.view_of(one), name=one.name) for one in LISTED),
    *(
        path(f"act/{name.replace('_', '-')}/", acting.view_of(action), name=f"act_{name}")
        for name, action in ACTIONS.items()
        if action.permission is not None
    ),
]

# The folders of the pages' addresses. Other addresses below the mounted path may belong to the project.
_FOLDERS = {str(one.pattern).partition("/")[0] for one in PAGES} - {""}

urlpatterns = [*PAGES, re_path(rf"^(?:{'|'.join(sorted(_FOLDERS))})/.+/$", unknown)]
