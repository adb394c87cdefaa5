"""How what a block sees is cut into splits by the attention of grouped queries on a GPU.

Nothing here needs Triton.
"""

from __future__ import annotations

from kdecode.kernels.common.mla_splits import ROUND_TOKENS

# Programs that keep the memory of a large GPU busy: two for each of its processors.
_ENOUGH_PROGRAMS = 256
# One program adds them up.
_MOST = 32


def num_splits(programs: int, most_tokens: int) -> int:
    """Splits of a plan that has so many programs for each of them; a power of two.

    most_tokens: that a block sees at most. Splits that none of them would lie in are left out.
    """
    splits = 1
    while splits < _MOST and programs * splits < _ENOUGH_PROGRAMS:
        if splits * ROUND_TOKENS >= most_tokens:
            break
        splits *= 2
    return splits
