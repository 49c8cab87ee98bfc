"""Standard Webhooks: the published example, and what a receiver must refuse. And the page's way with openssl."""

from __future__ import annotations

import base64
import hmac
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outbox.contrib.forwarding.sinks.signatures import InvalidSignature, secret_bytes, sign, verify
from outbox.errors import ConfigurationError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "forwarding.md"
# The example of the specification's reference implementations.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ID, STAMP, BODY = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
OTHER = "whsec_" + "b3RoZXItc2VjcmV0LW90aGVyLXNlY3JldC1vdGhlcg=="


def headers(signature: str = SIGNATURE, *, stamp: object = STAMP, message_id: str = ID) -> dict[str, str]:
    return {"Webhook-Id": message_id, "Webhook-Timestamp": str(stamp), "Webhook-Signature": signature}


def test_the_example_of_the_specification() -> None:
    assert sign([secret_bytes(SECRET)], ID, STAMP, BODY) == SIGNATURE
    assert verify([SECRET], headers(), BODY, now=STAMP + 299) == ID


def test_either_of_two_secrets_will_do_on_both_sides() -> None:
    both = sign([secret_bytes(OTHER), secret_bytes(SECRET)], ID, STAMP, BODY)
    assert verify([SECRET], headers(both), BODY, now=STAMP) == ID
    assert verify([OTHER, SECRET], headers(), BODY, now=STAMP) == ID
    assert verify([SECRET], headers(f"v1a,AAAA {SIGNATURE}"), BODY, now=STAMP) == ID, "of other versions: left alone"


@pytest.mark.parametrize(
    ("given", "body", "now"),
    [
        (headers(), BODY + b" ", STAMP),
        (headers(), BODY, STAMP + 301),
        (headers(), BODY, STAMP - 301),
        (headers(stamp=STAMP + 1), BODY, STAMP),
        (headers(message_id="msg_other"), BODY, STAMP),
        (headers(SIGNATURE.replace("v1,", "v2,")), BODY, STAMP),
        (headers("v1,ä"), BODY, STAMP),
        (headers(stamp="²"), BODY, STAMP),
        ({}, BODY, STAMP),
    ],
    ids=["body", "old", "future", "stamp", "id", "version", "no-base64", "no-number", "nothing"],
)
def test_what_is_refused(given: dict[str, str], body: bytes, now: float) -> None:
    with pytest.raises(InvalidSignature):
        verify([SECRET], given, body, now=now)
    with pytest.raises(InvalidSignature):
        verify([OTHER], headers(), BODY, now=STAMP)


HEADER = st.one_of(
    st.text(),
    st.text(alphabet="v1,= \t.²٣-+einf0123456789"),
    st.integers().map(str),
    st.sampled_from(["1" * 10_000, "-1", "1e9", "inf", "nan", "٣", "\ud800", SIGNATURE, f" ,, {SIGNATURE} ,v1,, "]),
)


@settings(deadline=None)
@given(message_id=HEADER, stamp=HEADER, signature=HEADER)
@example(message_id=ID, stamp="1" * 10_000, signature=SIGNATURE)
@example(message_id=ID, stamp="1" * 400, signature=SIGNATURE)
@example(message_id="\ud800", stamp=str(STAMP), signature=SIGNATURE)
@example(message_id=ID, stamp=str(STAMP), signature="v1,\ud800")
def test_any_other_header_is_refused_and_raises_nothing_else(message_id: str, stamp: str, signature: str) -> None:
    with pytest.raises(InvalidSignature):
        verify([SECRET], headers(signature, stamp=stamp, message_id=message_id), BODY + b"other", now=STAMP)


@settings(deadline=None)
@given(stamp=HEADER)
@example(stamp="1" * 10_000)
@example(stamp="1" * 400)
@example(stamp="0" * 5 + str(STAMP))
def test_a_signed_timestamp_that_is_none_is_refused(stamp: str) -> None:
    """The signature is right: the sender has the secret and writes a timestamp that is malformed or far away."""
    signed = f"{ID}.{stamp}.".encode(errors="surrogatepass") + BODY
    made = "v1," + base64.b64encode(hmac.digest(secret_bytes(SECRET), signed, "sha256")).decode()
    with pytest.raises(InvalidSignature):
        verify([SECRET], headers(made, stamp=stamp), BODY, now=-1e15)


def test_nothing_is_read_before_the_signature_is_verified() -> None:
    """A caller without the secret does not learn the time of the receiver's clock."""
    with pytest.raises(InvalidSignature, match="no signature"):
        verify([OTHER], headers(stamp=1), BODY, now=STAMP)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2hvcnQ=", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_***"])
def test_a_secret_that_is_none_is_not_shown(secret: str) -> None:
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


def test_a_wrong_secret_of_the_receiver_is_named_even_if_another_one_matches() -> None:
    with pytest.raises(ConfigurationError):
        verify([SECRET, "whsec_c2hvcnQ="], headers(), BODY, now=STAMP)
