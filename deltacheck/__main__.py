"""Run ``python -m deltacheck``, the same as ``deltacheck``."""

import sys

from deltacheck.cli import main

if __name__ == "__main__":
    sys.exit(main())
