"""The site is one storefront; the apps behind it have no pages of their own."""

from __future__ import annotations

from django.urls import include, path

urlpatterns = [path("", include("sample_project.storefront.urls"))]
