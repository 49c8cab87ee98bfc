"""The public scenarios of job queues in PostgreSQL, for this project and its peers: what is lost, what is done twice.

    python -m benchmarks.web_peers --install                    once: the peers' environments
    python -m benchmarks.scenarios --seconds 20 --rate 100      every scenario with every system

- `contract`: the protocol of the public benchmark (github.com/hardbyte/postgresql-job-queue-benchmarking,
  CONTRIBUTING_ADAPTERS.md): environment variables in, JSON lines out
- `this_project`, `reliable`, `procrastinate_jobs`, `pgmq_loop`: an adapter each, a program of its own. The handlers of
  the Django systems are in `subscribers`, `outbox_handlers` and `tasks`, where each system looks for them
- `faults`: the seven scenarios; `cell`: one system in one scenario; `counting`: what the tables say afterwards

Adapters run in the environments of their systems, so they and `contract` do not import outbox.
"""
