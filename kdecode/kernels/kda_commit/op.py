"""kda_commit: moves a KDA slot past the first m rows of a verify step that only read it.

    window = last three of [window, samples_1 .. samples_m]         raw samples, copied
    S = diag(e^{g_t}) S + k_t u_t^T                                  t = 1 .. m, fp32

The second line is the recurrence with the corrections u known; the torch form is its solution

    S = e^{sum of g_1..m} S + sum over t of (e^{sum of g_t+1..m} k_t) u_t^T

and the native and Triton forms run it row by row in registers, so that the state has the bits of m
plain steps. Rows behind m are not read. Covers no stage: it runs between two steps, once it is
known how many rows stay: ``kept_rows`` int32 [requests, 3], a line (slot, first row, m) each, m 0
for none.

The native form is a step of one layer; the Triton form is prepared without one (``problem.layer``
None) and moves every layer of ``buffers.effects`` in one launch.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="kda_commit",
    covers=(),
    reads=(),
    writes=(),
    mutates=("caches.conv", "caches.recurrent"),
    tolerance=Tolerance(rtol=1e-4, atol=1e-5, rms_ratio=1e-5),
)
