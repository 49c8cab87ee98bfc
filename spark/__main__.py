"""`python -m spark`: the command `outbox-reconcile` in a checkout."""

import sys

from .cli import main

sys.exit(main())
