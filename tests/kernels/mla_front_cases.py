"""Steps of mla_front on poisoned pages, and what the reference stages make of them."""

from __future__ import annotations

from types import SimpleNamespace

import attention_cases as cases
import torch

from kdecode.kernels.mla_front import cpu
from kdecode.model import reference as ref
from kdecode.testing.poison import poison_tail_, poisoned

LAYER = 3  # after two snapshots
SCALE = 0.37


class Run:
    """One prepared step on its own pages: everything but the requests' tokens is poisoned.

    positions: of each row; requests: which request a row belongs to (its own by default). cache:
    (pages, tables) to work on instead of new ones.
    """

    def __init__(self, config, setting, inputs, positions, requests=None, *, cache=None):
        self.config, self.setting, self.positions = config, setting, positions
        self.requests = list(range(len(positions))) if requests is None else requests
        self.scale = SCALE if setting.cache_dtype == "fp8" else 1.0
        self.parameters = cases.layer_parameters(config, LAYER)
        if cache is None:
            self._fill_pages()
        else:
            self.pages, self.tables = cache
        self.buffers = cases.buffers_of(config, LAYER, inputs, setting)
        table = [self.tables[request] for request in self.requests]
        self.buffers["row_pages"] = torch.tensor(table, dtype=torch.int32)
        self.buffers["row_position"] = torch.tensor(positions, dtype=torch.int32)
        self.buffers.caches = SimpleNamespace(pages={LAYER: self.pages}, scales={LAYER: self.scale})
        problem = setting.problem(config, LAYER, len(positions))
        assert cpu.refuse(problem) == []
        packed = cases.pack_layer(self.parameters, config)
        self.step = cpu.prepare(problem, packed, self.buffers)

    def _fill_pages(self):
        """Scattered pages with random rows below the first new token of each request."""
        page_tokens, width = self.setting.page_tokens, self.config.mla.cache_width
        max_pages = -(-self.setting.max_context_tokens // page_tokens)
        num_requests = max(self.requests) + 1
        order = torch.randperm(num_requests * max_pages + 3, generator=cases.generator(5))
        dtype = cpu.CACHE_DTYPES[self.setting.cache_dtype]
        self.pages = poisoned((len(order), page_tokens, width), dtype)
        self.tables, self.stored = [], []
        for request in range(num_requests):
            own = [p for p, r in zip(self.positions, self.requests, strict=True) if r == request]
            start = min(own)
            used = max(own) // page_tokens + 1
            table = order[request * max_pages :][:max_pages].tolist()
            rows = cases.rows_of((start, width), 300 + request)
            stored = ref.store_rows(rows, self.setting.cache_dtype, self.scale)
            for position in range(start):
                page = table[position // page_tokens]
                self.pages[page, position % page_tokens] = stored[position]
            poison_tail_(self.pages, table[:used], start)
            # Entries behind the context are no page numbers at all, as the runner leaves them.
            self.tables.append(table[:used] + [-1] * (max_pages - used))
            self.stored.append(stored)

    def run(self):
        cases.run_poisoned(self.step, self.buffers)

    def cached(self, row):
        """The cache row that this row inserted."""
        position = self.positions[row]
        page = self.tables[self.requests[row]][position // self.setting.page_tokens]
        return self.pages[page, position % self.setting.page_tokens]


def reference_values(run, inputs):
    """The covered stages: buffers by name, and the inserted cache rows."""
    p, config, rounding = run.parameters, run.config, ref.ROUNDED
    mla = config.mla
    mixed = ref.attn_mix(p.attn_mix, inputs[-1], inputs[:-1], config.rms_eps, rounding)
    attn_in = ref.attn_norm(mixed, p.input_norm, config.rms_eps, rounding)
    proj = ref.mla_in_proj(p.attention, attn_in, rounding)
    query = ref.mla_query(p.attention, mla, proj, rounding)
    inserted = ref.mla_insert(p.attention, mla, proj, rounding)
    inserted = ref.store_rows(inserted, run.setting.cache_dtype, run.scale)
    latent = torch.empty(len(query), mla.num_heads, mla.kv_rank, dtype=torch.bfloat16)
    for request, stored in enumerate(run.stored):
        rows = [row for row, other in enumerate(run.requests) if other == request]
        cached = torch.cat([stored.view(torch.uint8), inserted[rows].view(torch.uint8)])
        cached = ref.load_rows(cached.view(stored.dtype), rounding, run.scale)
        latent[rows] = ref.mla_attend(mla, query[rows], cached, len(stored), rounding)
    values = {
        "attn_mix": mixed,
        "attn_in": attn_in,
        "mla_proj": proj,
        "mla_query": query,
        "mla_latent": latent,
        "attn_out": ref.mla_value(p.attention, mla, latent, proj, rounding),
    }
    return values, inserted
