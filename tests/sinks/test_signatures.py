"""Standard Webhooks: the published example, the secrets, and the page's way with openssl."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from outbox.contrib.forwarding.sinks.signatures import secret_bytes, sign
from outbox.errors import ConfigurationError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "forwarding.md"
# The example of the specification's reference implementations.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ID, STAMP, BODY = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
OTHER = "whsec_" + "b3RoZXItc2VjcmV0LW90aGVyLXNlY3JldC1vdGhlcg=="


def test_the_example_of_the_specification_with_one_secret_and_with_two() -> None:
    assert sign([secret_bytes(SECRET)], ID, STAMP, BODY) == SIGNATURE
    first, second = sign([secret_bytes(OTHER), secret_bytes(SECRET)], ID, STAMP, BODY).split(" ")
    assert second == SIGNATURE != first


def test_a_secret_that_is_none_is_not_shown() -> None:
    for secret in ("", "whsec_", "whsec_c2hvcnQ=", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_***"):
        with pytest.raises(ConfigurationError) as failure:
            secret_bytes(secret)
        assert not secret.removeprefix("whsec_") or secret.removeprefix("whsec_") not in str(failure.value)


def test_the_shell_example_of_the_page(tmp_path: Path) -> None:
    """It prints the signature that was sent, for bodies with any bytes."""
    script = next(
        block for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) if "openssl dgst" in block
    )
    for body in (BODY, b"\x00\n$()\xff" * 50):
        (tmp_path / "body").write_bytes(body)
        variables = {"SECRET": SECRET, "ID": ID, "TIMESTAMP": str(STAMP), "PATH": "/usr/bin:/bin"}
        made = subprocess.run(["sh", "-ec", script], cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert made.stdout.strip() == sign([secret_bytes(SECRET)], ID, STAMP, body), made.stderr
