"""`python -m spark`, in a checkout what `outbox-reconcile` is elsewhere."""

import sys

from .cli import main

sys.exit(main())
