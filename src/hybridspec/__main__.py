"""`python -m hybridspec` is the command line."""

from __future__ import annotations

import sys

from hybridspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
