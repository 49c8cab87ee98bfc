"""A process is recognised as ended only if it has certainly ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from outbox.utils.process_identity import has_ended, process_identity

_TELL = "from outbox.utils.process_identity import process_identity as p; print(p(), flush=True); input()"


def test_a_running_a_killed_and_a_reaped_process() -> None:
    command = [sys.executable, "-c", _TELL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        identity = child.stdout.readline().strip()
        assert f" pid {child.pid} " in identity
        assert not has_ended(identity)
        child.send_signal(signal.SIGSTOP)
        assert not has_ended(identity)
        child.kill()
        # It has ended, and stays a zombie until its exit code is read.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(identity)
    assert has_ended(identity)


def test_another_process_with_the_pid_does_not_count() -> None:
    own = process_identity()
    assert not has_ended(own)
    where, _, started = own.rpartition(" ")
    assert has_ended(f"{where} {int(started) - 1}")


def test_what_nothing_is_known_about_has_not_ended() -> None:
    where, _, process = process_identity().rpartition(" pid ")
    boot, namespace = where.split(" ")
    # No process has this pid: it is greater than the greatest one of Linux.
    gone = f"{2**22 + 1} 1"
    assert has_ended(f"{where} pid {gone}")
    for other in (f"{boot[:-1]}? {namespace} pid {gone}", f"{boot} pid:[1] pid {gone}", f"{where} pid x y", where, ""):
        assert not has_ended(other), other
    assert process
