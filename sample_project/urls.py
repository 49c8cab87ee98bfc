"""The site is one storefront and the operations page of outbox; the apps have no pages of their own."""

from __future__ import annotations

from django.urls import include, path

urlpatterns = [
    path("", include("sample_project.storefront.urls")),
    path("operations/", include("outbox.contrib.console.urls")),
    path("operations/", include("outbox.contrib.django.urls")),
]
