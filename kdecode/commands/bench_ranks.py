"""The bytes that every rank has of a release and reads in a step, for `kdecode bench layer`.

Owns the tables; `model/rank_bytes.py` has the accounting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kdecode.commands.common import table

if TYPE_CHECKING:
    from kdecode.model.rank_bytes import KindBytes, TensorBytes

# Tensors of fewer bytes are one line together: norms, mixes, biases.
_SMALL_BYTES = 50_000


def bytes_document(kinds: Sequence[KindBytes]) -> list[dict[str, Any]]:
    from kdecode.model.rank_bytes import ROUTER_SLOTS

    documents = []
    for kind in kinds:
        stock, router = kind.read_with_whole(ROUTER_SLOTS)
        documents.append(
            {
                "kind": kind.name,
                "layers": kind.count,
                "rank_bytes_divided": kind.divided,
                "rank_bytes_copied": kind.copied,
                "rank_read_bytes_divided": kind.divided_read,
                "rank_read_bytes_copied": kind.copied_read,
                "rank_read_bytes_with_router_whole": stock,
                "of_them_router_bytes": router,
                "all_ranks_bytes": kind.all_ranks,
                "checkpoint_bytes": kind.whole,
                "tensors": [
                    {
                        "slot": tensor.slot,
                        "cut": tensor.cut,
                        "bytes": tensor.whole,
                        "rank_bytes": tensor.of_rank(tensor.whole, kind.size),
                        "rank_read_bytes": tensor.of_rank(tensor.read, kind.size),
                    }
                    for tensor in kind.tensors
                ],
            }
        )
    return documents


def bytes_text(name: str, kinds: Sequence[KindBytes]) -> str:
    """What a rank reads of a layer of each kind, tensor by tensor; then what all of them have."""
    size = kinds[0].size
    layers = [kind for kind in kinds if kind.name != "outside"]
    total, whole = (sum(getattr(kind, field) for kind in kinds) for field in ("all_ranks", "whole"))
    return "\n".join(
        [
            f"{name}: what one rank of {size} reads of a layer in a step of one row, MB (10^6 "
            "bytes of the checkpoint)",
            table([("tensor", "cut", *(kind.name for kind in layers)), *_tensor_rows(layers)]),
            "",
            table([("part", *(kind.name for kind in layers)), *_sum_rows(layers)]),
            "",
            table(_memory_rows(kinds)),
            f"all ranks have {_mb(total)} MB of the checkpoint's {_mb(whole)}: "
            f"{(total - whole) / whole:.2%} of it more, what each has whole",
        ]
    )


def _tensor_rows(kinds: Sequence[KindBytes]) -> list[tuple[str, ...]]:
    slots: dict[str, list[TensorBytes | None]] = {}
    for place, kind in enumerate(kinds):
        for tensor in kind.tensors:
            slots.setdefault(tensor.slot, [None] * len(kinds))[place] = tensor
    rows, small = [], [0] * len(kinds)
    for slot, tensors in slots.items():
        present = [tensor for tensor in tensors if tensor is not None]
        cells = [0 if t is None else t.of_rank(t.read, kinds[0].size) for t in tensors]
        if max(cells) < _SMALL_BYTES:
            small = [sum(pair) for pair in zip(small, cells, strict=True)]
            continue
        numbers = ("-" if t is None else _mb(cell) for t, cell in zip(tensors, cells, strict=True))
        rows.append((slot, present[0].cut, *numbers))
    return [*rows, ("small ones", "", *map(_mb, small))]


def _sum_rows(kinds: Sequence[KindBytes]) -> list[tuple[str, ...]]:
    from kdecode.model.rank_bytes import ROUTER_SLOTS

    stock = [kind.read_with_whole(ROUTER_SLOTS) for kind in kinds]
    return [
        ("divided", *(_mb(kind.divided_read) for kind in kinds)),
        ("whole on every rank", *(_mb(kind.copied_read) for kind in kinds)),
        ("together", *(_mb(kind.divided_read + kind.copied_read) for kind in kinds)),
        (
            "the same with router and latent_down whole on every rank",
            *(_mb(together) for together, _ in stock),
        ),
        ("of which these two", *(_mb(router) for _, router in stock)),
    ]


def _memory_rows(kinds: Sequence[KindBytes]) -> list[tuple[str, ...]]:
    head = ("MB of memory", "layers", "a rank, divided", "a rank, whole", "all ranks, all layers")
    return [
        head,
        *((k.name, str(k.count), _mb(k.divided), _mb(k.copied), _mb(k.all_ranks)) for k in kinds),
    ]


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f}"
