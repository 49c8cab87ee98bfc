"""An oracle that knows the product from outside only: histories of storms, and a checker that judges them.

    make oracle              ten minutes, both paths, Celery and outbox_worker in turn
    make oracle HOURS=2      the same for long
    python -m tests.oracle --seed 7 --storms 1 --path atomic

`clients` run random transactions, the subscribers of `shop` handle their messages, `faults` strikes both, and each of
them writes one JSON line per event (`lines`), before and after it acts. When the storm is over, `checker` compares the
lines with the business tables and the effects. Nothing here imports more of the product than its public names, and it
stays as it is while the product is rebuilt: `test_boundaries.py` holds that.
"""
