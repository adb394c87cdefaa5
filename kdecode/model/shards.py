"""The safetensors container: memory-mapped reading and streaming writing of one file.

Owns the header's checks and the mapping: 8 bytes of header length, a JSON header, the data. Knows
nothing of models. Tensors are views of a private mapping, so nothing that is done to them reaches
the file; `Shard.drop` gives their pages back to the system, and a later read maps them again.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from kdecode.config_json import named, open_regular, parse_json_object, shown

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
MAX_HEADER_BYTES = 256 << 20
MAX_DIMENSIONS = 8
_LENGTH = struct.Struct("<Q")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message has file, tensor, expected and found."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file; begin and end are bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Shard:
    """One safetensors file, mapped. Its header is checked whole before any data is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path, CheckpointError) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            self.entries: Mapping[str, Entry] = _read_header(path, file, file_bytes)
            # Private and writable: no write reaches the file, and none ends the process.
            flags, prot = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(file.fileno(), 0, flags=flags, prot=prot)

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file, or a copy where the file has it unaligned."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.begin % dtype.itemsize:
            size = entry.end - entry.begin
            data = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=entry.begin)
            return data.clone().view(dtype).view(entry.shape)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.begin)
        return flat.view(entry.shape)

    def drop(self, names: Iterable[str]) -> None:
        """Gives the resident pages of these tensors back; the data stays readable."""
        page = mmap.PAGESIZE
        for begin, end in _merge(
            (self.entries[name].begin, self.entries[name].end) for name in names
        ):
            first, last = begin // page * page, -(-end // page) * page
            self._map.madvise(mmap.MADV_DONTNEED, first, min(last, len(self._map)) - first)


def _merge(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _read_header(path: Path, file: BinaryIO, file_bytes: int) -> dict[str, Entry]:
    prefix = file.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes; a safetensors file starts with {_LENGTH.size} bytes "
            "of header length."
        )
    (length,) = _LENGTH.unpack(prefix)
    limit = min(file_bytes - _LENGTH.size, MAX_HEADER_BYTES)
    if length > limit:
        raise CheckpointError(
            f"{path} states a header of {length} bytes; the file has {file_bytes} bytes and a "
            f"header may have {limit}."
        )
    header = parse_json_object(file.read(length), str(path), CheckpointError)
    header.pop("__metadata__", None)
    data_start = _LENGTH.size + length
    entries = {name: _entry(path, name, value, data_start) for name, value in header.items()}
    _check_data(path, entries, data_start, file_bytes)
    return entries


def _entry(path: Path, name: str, value: object, data_start: int) -> Entry:
    where = f"{path}, tensor {named(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where}: the header entry must have dtype, shape and data_offsets, not "
            f"{shown(value)}."
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{where}: unknown dtype {shown(dtype)}; known are {', '.join(DTYPES)}."
        )
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(
            f"{where}: the shape {shown(shape)} is not a list of at most {MAX_DIMENSIONS} sizes."
        )
    if not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: the data_offsets {shown(offsets)} are not two positions.")
    begin, end = offsets
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != size:
        raise CheckpointError(
            f"{where}: {dtype} of shape {shown(shape)} needs {shown(size)} bytes; data_offsets "
            f"{shown(offsets)} hold {end - begin}."
        )
    return Entry(dtype, tuple(shape), data_start + begin, data_start + end)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def _check_data(path: Path, entries: Mapping[str, Entry], data_start: int, file_bytes: int) -> None:
    """The tensors fill the data without overlap or gap, and the file has all of it."""
    position, last = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            kind = "overlaps" if entry.begin < position else "leaves a gap after"
            raise CheckpointError(
                f"{path}, tensor {named(name)}: it starts at byte {entry.begin} and {kind} "
                f"{named(last)}, which ends at {position}."
            )
        if entry.end > file_bytes:
            raise CheckpointError(
                f"{path}, tensor {named(name)}: its data ends at byte {entry.end}, but the file "
                f"has {file_bytes} bytes. The file is truncated."
            )
        position, last = entry.end, name
    if position != file_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes, but its tensors end at byte {position}."
        )


Announced = Mapping[str, tuple[str, tuple[int, ...]]]


def _header_text(specs: Announced) -> tuple[bytes, int]:
    """The header of these tensors, and the bytes of their data."""
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape) in specs.items():
        end = position + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    # The data starts at a multiple of 64 bytes, so that mapped tensors are aligned.
    return text + b" " * (-(_LENGTH.size + len(text)) % 64), position


def write_shard(path: Path, specs: Announced, data: Any) -> int:
    """Writes one file without holding it: ``data(name)`` makes each tensor when its turn comes.

    specs: dtype name and shape of each tensor, in file order. -> bytes of tensor data.
    """
    text, position = _header_text(specs)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)))
        file.write(text)
        for name, (dtype, shape) in specs.items():
            tensor = data(name)
            if tensor.dtype != DTYPES[dtype] or tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{path}, tensor {name}: {list(shape)} {dtype} was announced, "
                    f"{list(tensor.shape)} {tensor.dtype} was made."
                )
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return position
