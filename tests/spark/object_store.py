"""A local S3 server (moto), for output folders that are given by URL, and the jars with which Spark reaches it."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.servers import free_ports
from tests.spark.lake import copy_jars
from tests.support import eventually

BUCKET: Final = "findings"
HADOOP: Final = "3.5.0"
JARS: Final = Path(__file__).resolve().parents[2] / "var" / f"hadoop-aws-{HADOOP}"
# The whole SDK is one jar of 600 MB; Hadoop needs these parts.
_SDK: Final = tuple(f"software.amazon.awssdk:{part}:2.35.4" for part in ("s3-transfer-manager", "apache-client", "sts"))
_HADOOP: Final = (
    f"org.apache.hadoop:hadoop-aws:{HADOOP}",
    "software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3:1.3.1",
)


def jars() -> str:
    """The value of spark.jars, fetched once for all processes. Skips the test where that cannot be."""
    JARS.mkdir(parents=True, exist_ok=True)
    with (JARS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (JARS / "complete").exists():
            copy_jars(_HADOOP, JARS, "Hadoop's S3 client", complete=_SDK)
            (JARS / "complete").touch()
    return ",".join(str(path) for path in sorted(JARS.glob("*.jar")))


@contextmanager
def running(folder: Path) -> Iterator[Mapping[str, str]]:
    """A server with an empty bucket; yields the environment in which Arrow finds the server."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with (folder / "s3.log").open("wb") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        eventually(lambda: _answers(url), within_seconds=60, what="the S3 server")
        urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/moto-api/").close()
    except OSError:
        return False
    return True
