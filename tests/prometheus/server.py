"""A real Prometheus, where it is installed, and pages for it to scrape."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.servers import free_ports

# The package `prometheus` of Debian has it.
PROGRAM = os.environ.get("PROMETHEUS") or shutil.which("prometheus")


class Prometheus:
    """A server that scrapes."""

    def __init__(self, address: str) -> None:
        self._address = address

    def asked(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the HTTP API; None while the server does not answer yet."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        except OSError:
            return None

    def values(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The series that an expression gives now, by their labels."""
        data = self.asked("query", query=expression) or {"result": []}
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in data["result"]}


@contextmanager
def scraping(folder: Path, pages: Mapping[tuple[str, str], Callable[[], str]]) -> Iterator[Prometheus]:
    """A Prometheus that scrapes each page every two seconds. The key of a page is its labels `broker` and `job`."""
    assert PROGRAM is not None
    paths = {f"/{broker}/{job}": page for (broker, job), page in pages.items()}

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = paths[self.path]().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    [port] = free_ports(1)
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        scraped = [
            {
                "job_name": f"{broker}-{job}",
                "metrics_path": f"/{broker}/{job}",
                "static_configs": [
                    {"targets": [f"127.0.0.1:{server.server_port}"], "labels": {"broker": broker, "job": job}}
                ],
            }
            for broker, job in pages
        ]
        # JSON is YAML.
        config = {"global": {"scrape_interval": "2s", "scrape_timeout": "2s"}, "scrape_configs": scraped}
        (folder / "prometheus.yml").write_text(json.dumps(config))
        with subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'series'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as started:
            try:
                yield Prometheus(f"127.0.0.1:{port}")
            finally:
                started.terminate()
                server.shutdown()
