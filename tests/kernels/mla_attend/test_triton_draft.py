"""The Triton steps of latent attention in a draft: rotated, and blocks that are causal or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draft_cases import MAX_CONTEXT, NUM_PAGES, PAGE_TOKENS, make_draft_case, randn
from torch import Tensor
from triton_cases import DEVICE, FP8_SCALE

from kdecode.decode.buffers import device_buffers, input_buffers, turn_buffers, value_buffers
from kdecode.kernels import table
from kdecode.kernels.mla_value.op import CONTRACT
from kdecode.model import reference as ref
from kdecode.model.draft_reference import rotate
from kdecode.model.reference import ROUNDED
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.poison import poisoned

LAYER = 1
OPS = ("mla_query_up", "mla_query", "mla_attend", "mla_value")


class Block:
    """Blocks of ``each`` rows over contexts, in pages out of order; what is not theirs is NaN."""

    def __init__(
        self, contexts: list[int], each: int, cache_dtype: str, *, is_causal: bool = False
    ) -> None:
        self.case = make_draft_case(is_causal=is_causal)
        self.each, self.scale = each, FP8_SCALE if cache_dtype == "fp8" else 1.0
        self.cache_dtype = cache_dtype
        self.starts = contexts
        config, rows = self.case.deployment.config, len(contexts) * each
        max_pages = self.case.deployment.max_pages
        self.buffers = self.case.buffers(
            *input_buffers(rows, max_pages),
            *turn_buffers(config, rows, 1.0),
            *value_buffers(config, rows),
            *device_buffers(config, rows),
        )
        self.positions = torch.tensor([start + k for start in contexts for k in range(each)])
        self.proj = randn(rows, self.buffers["mla_proj"].shape[1], seed=rows)
        self.pages, self.table = self._cached(max_pages)
        caches = self.buffers.caches
        caches.pages[LAYER] = self.pages.to(DEVICE)
        caches.scales[LAYER] = self.scale
        inputs = {
            "row_position": self.positions.int(),
            "row_pages": self.table.repeat_interleave(each, dim=0),
            "row_rotation": self.case.rotation(self.positions),
            "mla_proj": self.proj,
        }
        for name, tensor in inputs.items():
            self.buffers[name].copy_(tensor)

    def _cached(self, max_pages: int) -> tuple[Tensor, Tensor]:
        """Pages with the committed rows, ``stored`` of each request; the table of the pages."""
        kind = torch.bfloat16 if self.cache_dtype == "bf16" else torch.float8_e4m3fn
        width = self.case.config.cache_width
        pages = poisoned((NUM_PAGES, PAGE_TOKENS, width), kind)
        order = iter(torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(3)).tolist())
        tables = torch.full((len(self.starts), max_pages), -1, dtype=torch.int32)
        self.stored = []
        for number, start in enumerate(self.starts):
            used = -(-(start + self.each) // PAGE_TOKENS)
            tables[number, :used] = torch.tensor([next(order) for _ in range(used)])
            rows = randn(start, width, seed=number)
            self.stored.append(ref.store_rows(rows, self.cache_dtype, self.scale))
            for position in range(start):
                page = tables[number, position // PAGE_TOKENS]
                pages[page, position % PAGE_TOKENS] = self.stored[number][position]
        return pages, tables

    def run(self) -> None:
        problem = self.case.deployment.problem(LAYER, len(self.positions), self.each)
        problem = replace(problem, cache_dtype=self.cache_dtype)
        weights = self.case.weights.layers[LAYER]
        for op in OPS:
            module = table.implementation(op, "triton")
            assert module.refuse(problem) == []
            module.prepare(problem, weights, self.buffers).run()

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, inserted rows, outputs: the reference's stages, with rotation between them."""
        config, p = self.case.config, self.case.p.layers[LAYER].attention
        mla, rope = config.attention, config.rope
        query = ref.mla_query(p, mla, self.proj, ROUNDED)
        turned = rotate(rope, query[..., mla.kv_rank :], self.positions, ROUNDED)
        query = torch.cat([query[..., : mla.kv_rank], turned], dim=-1)
        rows = ref.mla_insert(p, mla, self.proj, ROUNDED)
        turned = rotate(rope, rows[..., mla.kv_rank :], self.positions, ROUNDED)
        rows = torch.cat([rows[..., : mla.kv_rank], turned], dim=-1)
        latents = []
        for number, stored in enumerate(self.stored):
            own = slice(number * self.each, (number + 1) * self.each)
            every = torch.cat([stored, ref.store_rows(rows[own], self.cache_dtype, self.scale)])
            wide = ref.load_rows(every, ROUNDED, self.scale).float()
            scores = query[own].float() @ wide.T * (mla.qk_dim**-0.5 * rope.score_scale)
            if config.is_causal:
                later = torch.ones(self.each, len(wide), dtype=torch.bool).triu(len(stored) + 1)
                scores = scores.masked_fill(later[:, None], float("-inf"))
            latents.append((scores.softmax(-1) @ wide[:, : mla.kv_rank]).bfloat16())
        out = ref.mla_value(p, mla, torch.cat(latents), self.proj, ROUNDED)
        return query, rows, out

    def inserted(self) -> Tensor:
        """What the step has written, as it is stored."""
        pages, found = self.buffers.caches.pages[LAYER].cpu(), []
        for row, position in enumerate(self.positions.tolist()):
            page = self.table[row // self.each, position // PAGE_TOKENS]
            found.append(pages[page, position % PAGE_TOKENS])
        return torch.stack(found)


@pytest.mark.parametrize(
    ("contexts", "each", "cache_dtype", "is_causal"),
    [
        ([9], 1, "bf16", False),
        ([130], 2, "bf16", False),
        ([0], 7, "bf16", False),
        ([62, 1], 4, "bf16", False),
        ([61, 130, 7], 7, "bf16", False),
        ([3, 64], 3, "fp8", False),
        ([61, 130, 7], 7, "bf16", True),
        ([3, 64], 3, "fp8", True),
    ],
)
def test_blocks_against_the_reference(
    contexts: list[int], each: int, cache_dtype: str, is_causal: bool
) -> None:
    """Over the ends of pages, rounds and splits; of its block a row sees all, or what is before."""
    assert max(contexts) + each <= MAX_CONTEXT
    block = Block(contexts, each, cache_dtype, is_causal=is_causal)
    block.run()
    query, rows, out = block.expected()
    assert_close(block.buffers["mla_query"].cpu(), query.float(), CONTRACT.tolerance, "mla_query")
    rank = block.case.config.attention.kv_rank
    inserted = ref.load_rows(block.inserted(), ROUNDED, block.scale)
    # The normed half may differ by a rounding, which is up to 1/8 of a number in fp8.
    rtol = 0.13 if cache_dtype == "fp8" else CONTRACT.tolerance.rtol
    limit = replace(CONTRACT.tolerance, rtol=rtol, rms_ratio=max(rtol / 4, 1e-2))
    gold = ref.load_rows(ref.store_rows(rows, cache_dtype, block.scale), ROUNDED, block.scale)
    assert_close(inserted[:, :rank], gold[:, :rank].float(), limit, "latents")
    assert_close(inserted[:, rank:], gold[:, rank:].float(), limit, "rotated keys")
    found = block.buffers["attn_out"].cpu()
    assert_close(found, out.view(found.shape).float(), CONTRACT.tolerance, "attn_out")


def test_nothing_but_the_rows_of_the_block_is_written() -> None:
    block = Block([62, 1], 4, "bf16")
    before = block.pages.clone()
    block.run()
    after = block.buffers.caches.pages[LAYER].cpu()
    for row, position in enumerate(block.positions.tolist()):
        place = block.table[row // 4, position // PAGE_TOKENS], position % PAGE_TOKENS
        before[place] = after[place]
    bit_equal(after, before, "pages")
