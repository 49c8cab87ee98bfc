"""The same web job for this project and for what else there is, each in a virtual environment of its own.

Of each peer there is a package with a module `block` (what a thread of the web process does for one request, and how
the database is prepared) and what its worker runs. Nothing here imports outbox outside of `this_project`, because a
peer's environment does not have the packages of outbox. Settings come in environment variables:

- OUTBOX_BENCH_PEER: the package; OUTBOX_BENCH_ROLE: `web` or `worker`, the sessions' application_name
- OUTBOX_BENCH_APPLICATION, OUTBOX_BENCH_BROKER: databases, equal where there is one
- OUTBOX_BENCH_INBOX: not empty where the handler has the peer's inbox
- OUTBOX_BENCH_HANDLED: the file of handler calls; OUTBOX_BENCH_REDIS: a socket
"""
