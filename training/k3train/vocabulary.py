"""Trains the byte-pair vocabulary.

The merges are learnt by the `tokenizers` library with the pre-split pattern of
`kdecode.model.tokenizer`; ids 0 to 255 are the bytes, the merges follow in the order learnt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Regex
from tokenizers import Tokenizer as Trainable
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from kdecode.model.tokenizer import NUM_SPECIALS, SPLIT_PATTERN


def train_vocabulary(texts: Iterable[str], vocab_size: int) -> list[bytes]:
    """The base tokens, by rank; with the specials they make vocab_size."""
    trainable = Trainable(BPE())
    split = Split(Regex(SPLIT_PATTERN), behavior="isolated")
    trainable.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    num_base = vocab_size - NUM_SPECIALS
    trainer = BpeTrainer(
        vocab_size=num_base,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    trainable.train_from_iterator(texts, trainer)
    letters = _byte_of_letter()
    merges = json.loads(trainable.to_str())["model"]["merges"]
    tokens = [bytes([value]) for value in range(256)]
    seen = set(tokens)
    for left, right in merges:
        token = bytes(letters[letter] for letter in left + right)
        if token not in seen:
            seen.add(token)
            tokens.append(token)
    if len(tokens) < num_base:
        raise ValueError(f"The texts give {len(tokens)} tokens; {num_base} are needed.")
    return tokens[:num_base]


def _byte_of_letter() -> dict[str, int]:
    """The library writes bytes as printable letters: itself, or the next unused one above 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(value): value for value in printable}
    others = (value for value in range(256) if value not in set(printable))
    table |= {chr(256 + place): value for place, value in enumerate(others)}
    return table
