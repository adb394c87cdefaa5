"""`python -m kdecode`: the `kdecode` command, for those who start modules, as torchrun does."""

from __future__ import annotations

import sys

from kdecode.cli import main

if __name__ == "__main__":
    sys.exit(main())
