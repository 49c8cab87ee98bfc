"""Django's command line for the sample: `python -m sample_project.manage <command>`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run one management command."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sample_project.settings")
    from django.core.management import execute_from_command_line

    from sample_project import server

    server.start()
    server.create_databases()
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
