"""The site of the documents. `make docs` builds it into var/site; the site works without a network."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import django
from django.conf import settings

sys.path.insert(0, str(Path(__file__).parent / "_site"))
_CONTRIB = Path(__file__).parent.parent / "outbox" / "contrib"

# autodoc and the reference import modules of Django's side.
settings.configure(
    INSTALLED_APPS=[
        "django.contrib.contenttypes",
        "django.contrib.auth",
        # The core's app and those of all parts.
        *(f"outbox.contrib.{path.parent.name}" for path in sorted(_CONTRIB.glob("*/apps.py"))),
    ],
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}},
    OUTBOX={"PRODUCER_GROUP": "shop"},
    USE_TZ=True,
)
django.setup()

project = "outbox"
release = importlib.metadata.version("outbox-transactional")
copyright = "the outbox authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "llms", "reference"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
exclude_patterns = ["_site"]
# Only quotes become typographic: an option such as --force must stay as it is typed.
smartquotes_action = "q"
# Examples leave parts out with an ellipsis, which no lexer knows.
suppress_warnings = ["misc.highlighting_failure"]

autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# Docstrings mark code with single backticks.
default_role = "code"

html_theme = "furo"
html_title = f"outbox {release}"
html_copy_source = False
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_show_sphinx = False
