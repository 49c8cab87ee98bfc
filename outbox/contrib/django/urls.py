"""`path("outbox/", include("outbox.contrib.django.urls"))`: operations pages, health/, status/, metrics/."""

from __future__ import annotations

from django.urls import path, re_path

from outbox.contrib.django import views
from outbox.contrib.django.console.access import unknown
from outbox.contrib.django.console.urls import urlpatterns as console

app_name = "outbox"

# The folders of the pages' addresses. Other addresses below the mounted path may belong to the project.
_FOLDERS = {str(one.pattern).partition("/")[0] for one in console} - {""}

urlpatterns = [
    path("health/", views.health, name="health"),
    path("status/", views.status, name="status"),
    path("metrics/", views.metrics, name="metrics"),
    *console,
    re_path(rf"^(?:{'|'.join(sorted(_FOLDERS))})/.+/$", unknown),
]
