"""Starts processes of a role by fork, so that only the first one imports Django: for tests that kill many of them.

For each line on stdin, a specification of fault points (outbox.utils.faults), this process forks a child of the role
that its argument names, and writes its pid, and then its exit code, or minus the number of its signal.
"""

from __future__ import annotations

import os
import sys

import django

from outbox.broker.supervisor import PARENT_VARIABLE
from outbox.contrib.django.worker import child
from outbox.utils import faults


def main() -> None:
    django.setup()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            # The child stops if this process ends.
            os.environ[PARENT_VARIABLE] = str(os.getppid())
            faults.arm(line.strip())
            os._exit(child.main(sys.argv[1:]))
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
