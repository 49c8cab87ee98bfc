import sys

from outbox.contrib.sqlalchemy.installation import main

if __name__ == "__main__":
    sys.exit(main())
