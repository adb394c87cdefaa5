"""embed_part: the rows of the embedding that this rank has, of several.

    embed_part[r] = table[row_token[r] - first]    where that is a row of this rank's table, else 0

first: the token of the table's first row. `rank_whole` takes each row from the rank that has it.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="embed_part",
    covers=(),
    reads=("row_token",),
    writes=("embed_part",),
    mutates=(),
    tolerance=Tolerance(rtol=0.0, atol=0.0, rms_ratio=0.0),
)
