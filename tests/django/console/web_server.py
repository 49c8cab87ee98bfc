"""`python -m tests.django.console.web_server PORT SECONDS`: serve on PORT; open pages refresh after SECONDS."""

from __future__ import annotations

import sys

import django


def main() -> None:
    """Serve until the process is ended."""
    django.setup()
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.handlers.wsgi import WSGIHandler
    from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler

    from outbox.contrib.console import rendering

    rendering.REFRESH_SECONDS = float(sys.argv[2])
    server = ThreadedWSGIServer(("127.0.0.1", int(sys.argv[1])), WSGIRequestHandler)
    server.set_app(StaticFilesHandler(WSGIHandler()))
    print("serving", flush=True)
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
