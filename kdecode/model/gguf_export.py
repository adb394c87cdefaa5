"""Writes a checkpoint as one GGUF file, for llama.cpp.

Owns the container, through the ``gguf`` package (extra ``peers``; imported when a file is written
and nowhere else), and the vocabulary. Tensors are written one by one, so that memory holds one
stack of experts at most. Names and shapes are `gguf_tensors.py`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdecode.config import ModelConfig
from kdecode.model.gguf_tensors import (
    ARCHITECTURES,
    GgufError,
    Precision,
    Setting,
    check_supported,
    settings,
    tensors,
)
from kdecode.model.tokenizer import Tokenizer
from kdecode.model.weights import CheckpointReader

Progress = Callable[[int, int], None]

# Values of gguf's token types and file types.
_NORMAL, _CONTROL = 1, 3
_FILE_TYPES: Mapping[Precision, int] = {"f32": 0, "released": 32}
# The pre-split pattern that llama.cpp has for this family's tokenizer.
_PRE_SPLIT = "kimi-k2"


def export_gguf(
    directory: Path,
    target: Path,
    precision: Precision,
    progress: Progress = lambda done, of: None,
) -> None:
    """Writes ``target``. "released": every weight with the bits of the checkpoint, but vectors, the
    router and convolutions in F32; "f32": every weight in F32, MXFP4 dequantised, exactly.

    Raises GgufError for a model that llama.cpp cannot run, or without the gguf package.
    """
    reader = CheckpointReader(directory)
    config = reader.config
    check_supported(config)
    gguf = _package()
    tokenizer = Tokenizer.from_directory(directory, config.vocab_size)
    found = list(tensors(config, reader.load_model(), precision))
    writer = gguf.GGUFWriter(target, ARCHITECTURES[config.model_type])
    try:
        writer.add_name(directory.name)
        writer.add_file_type(_FILE_TYPES[precision])
        for key, value in (*settings(config), *_vocabulary(config, tokenizer)):
            _add(writer, key, value)
        for tensor in found:
            kind = getattr(gguf.GGMLQuantizationType, tensor.stored)
            dtype = "float32" if tensor.stored == "F32" else "uint8"
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(dtype), tensor.num_bytes, kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, tensor in enumerate(found):
            writer.write_tensor_data(tensor.make())
            progress(number + 1, len(found))
    finally:
        writer.close()


def tensor_types(path: Path) -> dict[str, tuple[str, int]]:
    """Of every tensor of a GGUF file: the name of its type, and its bytes."""
    reader = _package().GGUFReader(path)
    return {t.name: (t.tensor_type.name, int(t.n_bytes)) for t in reader.tensors}


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise GgufError(
            "GGUF files need the package gguf, which is not installed: "
            "pip install 'kdecode[peers]'."
        ) from error
    return gguf


def _add(writer: Any, key: str, value: Setting | list[str]) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _vocabulary(
    config: ModelConfig, tokenizer: Tokenizer
) -> Iterator[tuple[str, Setting | list[str]]]:
    """Byte-level BPE as llama.cpp reads it: printable tokens, and the merges in order."""
    base = [tokenizer.token_bytes(i) for i in range(tokenizer.num_base)]
    specials = [tokenizer.token_bytes(i).decode() for i in _special_ids(tokenizer)]
    yield "tokenizer.ggml.model", "gpt2"
    yield "tokenizer.ggml.pre", _PRE_SPLIT
    yield "tokenizer.ggml.tokens", [*map(_printable, base), *specials]
    yield "tokenizer.ggml.token_type", [_NORMAL] * len(base) + [_CONTROL] * len(specials)
    yield "tokenizer.ggml.merges", list(_merges(base))
    yield "tokenizer.ggml.bos_token_id", config.bos_id
    yield "tokenizer.ggml.eos_token_id", config.eos_id
    yield "tokenizer.ggml.padding_token_id", config.pad_id


def _special_ids(tokenizer: Tokenizer) -> range:
    return range(tokenizer.num_base, tokenizer.vocab_size)


def _byte_characters() -> list[str]:
    """GPT-2's printable character of each byte: itself if visible, else one from U+0100 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in visible else next(rest)) for byte in range(256)]


_CHARACTERS = _byte_characters()


def _printable(token: bytes) -> str:
    return "".join(_CHARACTERS[byte] for byte in token)


def _merges(tokens: list[bytes]) -> Iterator[str]:
    """The pair that each token is merged from: what the ranks below its own leave of its bytes."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for rank, token in enumerate(tokens):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            best = min(pairs)
            if best >= rank:
                break
            at = pairs.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield " ".join(map(_printable, parts))
