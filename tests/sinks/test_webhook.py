"""The webhook sink against a real HTTP server in this process: the meaning of answers, and where requests go."""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import subprocess
import time
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from outbox.contrib.forwarding.sinks.formats import format_named
from outbox.contrib.forwarding.sinks.forwarder import Forwarder
from outbox.contrib.forwarding.sinks.signatures import secret_bytes, sign
from outbox.contrib.forwarding.sinks.sink import NotAcknowledged, Outgoing, Rejected
from outbox.contrib.forwarding.sinks.webhook import TIMEOUT_SECONDS, WebhookSink, is_public, retry_after_seconds
from outbox.errors import ConfigurationError, ServiceUnavailable
from tests.servers import free_ports
from tests.sinks.receiver import SECRET, Answer, Request, keeping, serving
from tests.sinks.support import delivery

PLAIN = format_named("plain", binding="http")


def sink(port: int, *, host: str = "127.0.0.1", **options: Any) -> WebhookSink:
    given = {"allow_private": True, "allow_http": True, "timeout_seconds": 5.0, "secrets": [SECRET], **options}
    return WebhookSink(url=f"http://{host}:{port}/in", **given)


def outgoing(key: str = "k") -> Outgoing:
    return PLAIN(delivery(key, headers={"Name": "Zoë 100%"}, tag="paid"), "orders")


def post(hook: WebhookSink) -> Exception | None:
    """The result of one request, raised or returned."""
    with contextlib.closing(hook):
        try:
            return hook.send([outgoing()])[0]
        except ServiceUnavailable as error:
            return error


def signature(request: Request, *secrets: str) -> str:
    stamp = int(request.headers["webhook-timestamp"])
    return sign([secret_bytes(one) for one in secrets], request.headers["webhook-id"], stamp, request.body)


def outcome(answer: Answer) -> Exception | None:
    """The result of one request with this answer."""
    with serving(lambda _: answer) as port:
        return post(sink(port))


def test_a_request_is_signed_and_names_its_message() -> None:
    got: list[Request] = []
    with serving(keeping(got, Answer(200, body=b"thanks"))) as port:
        hook, message = sink(port, headers={"Authorization": "Bearer token"}), outgoing("k ü")
        assert hook.send([message, message]) == [None, None]
        hook.close()
    first, again = got
    assert first.headers["webhook-id"] == str(message.message_id)
    assert time.time() - int(first.headers["webhook-timestamp"]) < 60
    assert first.headers["webhook-signature"] == signature(first, SECRET)
    assert again.headers["webhook-id"] == first.headers["webhook-id"], "a repetition has the same id"
    assert (first.headers["authorization"], first.headers["content-type"]) == ("Bearer token", "application/json")
    assert (first.headers["outbox-key"], first.headers["outbox-tag"]) == ("k%20%C3%BC", "paid")
    assert first.headers["outbox-header-name"] == "Zo%C3%AB%20100%25"


def test_a_request_has_a_signature_for_each_secret() -> None:
    got: list[Request] = []
    other = "whsec_" + base64.b64encode(bytes(32)).decode()
    with serving(keeping(got)) as port:
        assert post(sink(port, secrets=[other, SECRET])) is None
    [request] = got
    assert request.headers["webhook-signature"] == signature(request, other, SECRET)


def test_the_default_timeout_is_that_of_the_standard() -> None:
    assert 15 <= TIMEOUT_SECONDS <= 30


def test_each_answer_has_its_meaning() -> None:
    """Accepted, refused for good, tried again, or about the endpoint as a whole."""
    meanings: Mapping[type[Exception] | None, tuple[int, ...]] = {
        None: (200, 201, 204),
        Rejected: (400, 409, 413, 415, 422, 451),
        NotAcknowledged: (408, 421, 423, 500, 504),
        ServiceUnavailable: (301, 307, 401, 403, 404, 405, 407, 425, 429, 502, 503),
    }
    for meaning, statuses in meanings.items():
        for status in statuses:
            error = outcome(Answer(status, {"Location": "http://elsewhere.invalid/"}, b"no such order"))
            assert (None if error is None else type(error)) is meaning, status
            if isinstance(error, Rejected):
                assert str(status) in str(error) and "no such order" in str(error)
            if isinstance(error, ServiceUnavailable):
                assert error.pause_seconds is None
    for status in (429, 503, 500):
        error = outcome(Answer(status, {"Retry-After": "7"}))
        assert isinstance(error, ServiceUnavailable) and error.pause_seconds == 7.0


def test_an_endpoint_that_is_gone_is_asked_again_after_an_hour() -> None:
    error = outcome(Answer(410))
    assert isinstance(error, ServiceUnavailable) and error.pause_seconds == 3600.0
    assert "answered 410" in str(error) and "outbox_group delete" in str(error)


def test_a_content_type_that_http_does_not_allow_is_refused_for_good() -> None:
    """A receiver stores what its sender has set. Tried again without an end, the message would block its key."""
    with serving(lambda _: Answer(200)) as port, contextlib.closing(sink(port)) as hook:
        for content_type in ("text/plain\nx: y", "text/\0", "text/\N{SNOWMAN}"):
            with pytest.raises(Rejected, match="cannot be sent"):
                Forwarder(hook, "orders", PLAIN)(delivery(content_type=content_type))
        assert hook.send([outgoing()]) == [None], "the control: the endpoint takes other messages"


def test_a_header_that_http_does_not_allow_is_an_error_of_the_settings() -> None:
    """Each message would be rejected, with the secret in its error."""
    for value in ("Bearer abc\n", " Bearer abc", "Bearer\r\nx: y", "Bearer \0"):
        with pytest.raises(ConfigurationError, match="'Authorization'") as error:
            sink(1, headers={"Authorization": value})
        assert "abc" not in str(error.value)


def test_the_values_of_retry_after() -> None:
    now = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT
    assert retry_after_seconds("120", now) == 120
    assert retry_after_seconds("Sun, 06 Nov 1994 08:50:07 GMT", now) == 30
    assert retry_after_seconds("Sun, 06 Nov 1994 08:49:07 GMT", now) == 0
    assert retry_after_seconds("99999999", now) == 3600
    assert [retry_after_seconds(value, now) for value in (None, "soon", "-1", "²")] == [None] * 4
    # Dates that the C library refuses: the answer counts without its pause.
    far, zone = "Mon, 01 Jan 99999999999999 00:00:00 GMT", f"Mon, 01 Jan 2020 00:00:00 +{'9' * 17}"
    assert [retry_after_seconds(value, now) for value in (far, zone, "9" * 10_000)] == [None, None, 3600]


def test_a_redirect_is_not_followed_and_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere: list[Request] = []
    with serving(keeping(elsewhere)) as other:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{other}")
        error = outcome(Answer(307, {"Location": f"http://127.0.0.1:{other}/"}))
    assert isinstance(error, ServiceUnavailable) and "redirect" in str(error)
    assert elsewhere == []


def test_a_missing_server_uses_up_no_attempt() -> None:
    error = post(sink(free_ports(1)[0]))
    assert isinstance(error, ServiceUnavailable) and "cannot be reached" in str(error)


def test_no_answer_in_time_is_uncertain() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = post(sink(silent.getsockname()[1], timeout_seconds=0.2))
    assert isinstance(error, NotAcknowledged) and "ReadTimeout" in str(error)


def test_an_endless_answer_does_not_fill_memory() -> None:
    assert outcome(Answer(200, body=b"x" * 5_000_000)) is None


@pytest.mark.parametrize("body", [b"no chunk\r\n", b"5\r\nok"], ids=["broken", "unfinished"])
def test_the_status_counts_although_the_body_breaks_off(body: bytes) -> None:
    """Otherwise a receiver that has accepted a message would get it again without an end."""
    for status, meaning in ((200, type(None)), (400, Rejected)):
        answer = Answer(status, {"Transfer-Encoding": "chunked"}, body)
        with serving(keeping([], answer)) as port:
            assert isinstance(post(sink(port, timeout_seconds=0.2)), meaning)


# -- where requests go ------------------------------------------------------------------------------


def test_private_addresses_have_to_be_allowed() -> None:
    got: list[Request] = []
    with serving(keeping(got)) as port:
        for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433"):
            assert isinstance(post(sink(port, host=host, allow_private=False)), ServiceUnavailable), host
    assert got == []


def test_which_addresses_are_public() -> None:
    private = (
        *("10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
        *("255.255.255.255", "::", "::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"),
        "2002:0a00:0001::",
    )
    assert [one for one in private if is_public(ip_address(one))] == []
    for address in ("93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::808:808"):
        assert is_public(ip_address(address)), address


def test_the_address_that_was_judged_is_the_one_that_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host name that resolves to another address the second time."""
    judged: list[Request] = []
    rebound: list[Request] = []
    real, answers = socket.getaddrinfo, iter(["127.0.0.1", "127.0.0.2", "127.0.0.2"])

    def rebinding(host: Any, *rest: Any, **named: Any) -> Any:
        return real(next(answers) if host == "hook.test" else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    with serving(keeping(judged)) as port:
        with serving(keeping(rebound), host="127.0.0.2", port=port):
            assert post(sink(port, host="hook.test")) is None
    assert [request.headers["host"] for request in judged] == [f"hook.test:{port}"]
    assert rebound == []


def test_the_certificate_has_to_be_that_of_the_name(tmp_path: Path) -> None:
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = [*("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes"), "-keyout", "key", "-out", "cert"]
    subprocess.run([*command, *subject], cwd=tmp_path, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    given: dict[str, Any] = {"secrets": [SECRET], "allow_private": True, "ca_file": str(tmp_path / "cert")}
    with serving(lambda _: Answer(), tls=tls) as port:
        assert post(WebhookSink(url=f"https://localhost:{port}/", **given)) is None
        error = post(WebhookSink(url=f"https://127.0.0.1:{port}/", **given))
    assert isinstance(error, ServiceUnavailable) and "certificate" in str(error)


def test_what_cannot_be_right_is_refused_at_the_start() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"url": "http://example.org/"}, "https://"),
        ({"url": "ftp://example.org/"}, "https://"),
        ({"url": "https://"}, "https://"),
        ({"url": "https://user:pass@example.org/"}, "must not contain a user and password"),
        ({"secrets": []}, "secrets"),
        ({"secrets": SECRET}, "secrets"),
        ({"secrets": ["whsec_x"]}, "webhook secret"),
    ]
    for options, says in wrong:
        with pytest.raises(ConfigurationError, match=says) as failure:
            WebhookSink(**{"url": "https://example.org/", "secrets": [SECRET], **options})
        assert "pass@" not in str(failure.value) and SECRET not in str(failure.value)
