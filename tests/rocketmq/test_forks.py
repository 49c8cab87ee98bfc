"""A process that is forked while other threads are in gRPC lives on. Needs no cluster."""

from __future__ import annotations

import json
import subprocess
import sys

# Two threads call a server that never answers, so nearly every fork meets a thread in gRPC.
_PROGRAM = """
import json, os, socket, subprocess, threading
from collections import Counter
from outbox.rocketmq.client import grpc

mute = socket.create_server(("127.0.0.1", 0))

def call():
    while True:
        with grpc.insecure_channel("127.0.0.1:%d" % mute.getsockname()[1]) as channel:
            try:
                channel.unary_unary("/mute/call")(b"", timeout=0.05)
            except grpc.RpcError:
                pass

for _ in range(2):
    threading.Thread(target=call, daemon=True).start()
codes = Counter()
for _ in range(40):
    codes[subprocess.run(["/bin/true"], user=os.getuid()).returncode] += 1
    child = os.fork()
    if child == 0:
        os._exit(0)
    codes[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] += 1
print(json.dumps(codes), flush=True)
os._exit(0)
"""


def test_a_fork_beside_a_call_of_the_client_lives_on() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == {"0": 80}, done.stderr
