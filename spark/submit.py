"""The entry point for spark-submit: `spark-submit --py-files outbox_spark.zip submit.py run --rules … --output …`.

The script imports the package, which is installed or shipped by --py-files, and calls its command.
"""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    for package in ("outbox_spark", "spark"):
        try:
            command = importlib.import_module(f"{package}.cli")
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}.cli"):
                raise
        else:
            sys.exit(command.main())
    sys.exit("outbox-reconcile is not installed. Install the package, or give outbox_spark.zip by --py-files.")
