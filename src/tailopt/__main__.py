"""`python -m tailopt` is `tailopt`."""

from __future__ import annotations

import sys

from tailopt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
