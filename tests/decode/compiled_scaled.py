"""Compiles the kernels of scaled products of experts, in a process of its own, as
`compiled_plans.py` does, and prints which tensor-core instructions they have, too.

Arguments: those of `compiled_plans.py`. Prints one JSON document, with ``instructions``: of each
distinct kernel how often each is in its PTX.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import triton
from compiled_plans import instructions, report

_PRODUCT = re.compile(
    r"^\s*(?:@%p\d+ )?((?:tcgen05\.mma|mma\.sync|wgmma\.mma)[\w.:]*)", re.MULTILINE
)

if __name__ == "__main__":
    cases = sys.argv[2:]
    document = {
        "triton": triton.__version__,
        "lines": report(Path(sys.argv[1]), cases),
        "instructions": instructions(cases, _PRODUCT),
    }
    print(json.dumps(document))
