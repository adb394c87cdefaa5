"""Byte-level BPE over the released tokenizer files, and the incremental detokeniser.

Owns: reading `tiktoken.model` (lines "base64(token) rank") and the special names of
`tokenizer_config.json`, the pre-split pattern, text -> ids -> bytes -> text, and writing a small
deterministic tokenizer in the same format for random-weight checkpoints. The merge loop is the
`tiktoken` library's. Does not know chat markup (`model.chat`) and never turns text into a special
id: specials are reached by name through `special_id` only.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import tiktoken

from kdecode.config_json import MAX_DIGITS, open_regular, read_json_object, shown

MODEL_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
NUM_SPECIALS = 256
MIN_VOCAB = 1024
MAX_VOCAB = 1_000_000
# Of the rank file: the longest released token has some hundred bytes.
MAX_LINE_BYTES = 65_536

# Longer inputs are cut as the released tokenizer cuts them, so that ids agree: first into chunks,
# then inside any run of only white space or only other characters. It also bounds the piece that
# the pre-split pattern can backtrack over.
CHUNK_CHARS = 400_000
RUN_CHARS = 25_000

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_RUN = re.compile(r"\s+|\S+")


class TokenizerError(ValueError):
    """A tokenizer file that cannot be used; the message names the file, the line and the limit."""


class Tokenizer:
    """Ids 0 .. num_base - 1 are BPE tokens, the 256 after them are specials."""

    def __init__(self, base_tokens: list[bytes], special_names: list[str]) -> None:
        ranks = {token: rank for rank, token in enumerate(base_tokens)}
        self.num_base = len(base_tokens)
        self.vocab_size = self.num_base + len(special_names)
        self.special_ids: Mapping[str, int] = {
            name: self.num_base + offset for offset, name in enumerate(special_names)
        }
        self._bytes = base_tokens + [name.encode("utf-8") for name in special_names]
        self._encoding = tiktoken.Encoding(
            "kdecode",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=dict(self.special_ids),
        )

    @classmethod
    def from_directory(cls, path: str | Path, vocab_size: int) -> Tokenizer:
        """Reads `tiktoken.model` and `tokenizer_config.json` of a checkpoint directory."""
        directory = Path(path)
        base_tokens = _read_base_tokens(directory / MODEL_FILE)
        if len(base_tokens) + NUM_SPECIALS != vocab_size:
            raise TokenizerError(
                f"{directory / MODEL_FILE} has {len(base_tokens)} tokens; with {NUM_SPECIALS} "
                f"specials that makes {len(base_tokens) + NUM_SPECIALS}, but the model's "
                f"vocab_size is {vocab_size}."
            )
        return cls(base_tokens, _read_special_names(directory / CONFIG_FILE, len(base_tokens)))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text. Text that looks like a special name stays text.

        Surrogate pairs become the character they stand for; lone surrogates become U+FFFD.
        """
        ids: list[int] = []
        for piece in _split_long_text(_replace_surrogates(text)):
            ids.extend(self._encoding.encode_ordinary(piece))
        return ids

    def special_id(self, name: str) -> int:
        if name not in self.special_ids:
            raise TokenizerError(f"This tokenizer has no special token named {shown(name)}.")
        return self.special_ids[name]

    def is_special(self, token_id: int) -> bool:
        return self.num_base <= token_id < self.vocab_size

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a special's bytes are its name."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"Token id {token_id} is outside [0, {self.vocab_size}).")
        return self._bytes[token_id]

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of the ids; bytes that are not valid UTF-8 become U+FFFD."""
        kept = (i for i in token_ids if not (skip_special and self.is_special(i)))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")


class IncrementalDetokenizer:
    """Turns a stream of ids into text deltas that never split a UTF-8 character.

    The concatenated deltas, `flush()` included, equal `Tokenizer.decode` of all ids. The work for
    one id depends on that token's length only: at most three bytes are held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that became complete with this token; empty while a character is incomplete."""
        token = self._tokenizer.token_bytes(token_id)
        if self._skips_special and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(token)

    def flush(self) -> str:
        """Ends the stream: what was held back is invalid UTF-8 now and becomes U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _replace_surrogates(text: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _split_long_text(text: str) -> Iterator[str]:
    """Cuts every CHUNK_CHARS characters, and in a chunk after each RUN_CHARS of one run."""
    for chunk_start in range(0, len(text), CHUNK_CHARS):
        chunk = text[chunk_start : chunk_start + CHUNK_CHARS]
        start = 0
        if len(chunk) > RUN_CHARS:
            for run in _RUN.finditer(chunk):
                for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
                    yield chunk[start:cut]
                    start = cut
        yield chunk[start:]


def _read_base_tokens(path: Path) -> list[bytes]:
    tokens: list[bytes] = []
    seen: set[bytes] = set()
    with open_regular(path, TokenizerError) as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_BYTES or number > MAX_VOCAB:
                raise TokenizerError(
                    f"{path}, line {number}: a file may have {MAX_VOCAB:,} lines of "
                    f"{MAX_LINE_BYTES:,} bytes."
                )
            if not line.strip():
                continue
            token, rank = _parse_rank_line(path, number, line)
            if rank != len(tokens):
                raise TokenizerError(
                    f"{path}, line {number}: rank {rank} where {len(tokens)} was expected; ranks "
                    f"must count up from 0 without gaps."
                )
            if token in seen:
                raise TokenizerError(f"{path}, line {number}: token {shown(token)} occurs twice.")
            seen.add(token)
            tokens.append(token)
    missing = [byte for byte in range(256) if bytes([byte]) not in seen]
    if missing:
        raise TokenizerError(
            f"{path} has no token for {len(missing)} of the 256 single bytes (the first is "
            f"0x{missing[0]:02x}), so some texts could not be encoded."
        )
    return tokens


def _parse_rank_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2:
        raise TokenizerError(
            f"{path}, line {number}: {len(fields)} fields where 2 were expected (base64 token, "
            f"rank)."
        )
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise TokenizerError(f"{path}, line {number}: not base64: {error}.") from error
    if not token:
        raise TokenizerError(f"{path}, line {number}: the token is empty.")
    if not fields[1].isdigit() or len(fields[1]) > MAX_DIGITS:
        raise TokenizerError(
            f"{path}, line {number}: rank {shown(fields[1])} is not a whole number of at most "
            f"{MAX_DIGITS} digits."
        )
    return token, int(fields[1])


def _read_special_names(path: Path, num_base: int) -> list[str]:
    listed = read_json_object(path, TokenizerError).get("added_tokens_decoder")
    if not isinstance(listed, dict):
        raise TokenizerError(f"{path} has no object 'added_tokens_decoder'.")
    names = [f"<|reserved_token_{num_base + offset}|>" for offset in range(NUM_SPECIALS)]
    for key, entry in listed.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            raise TokenizerError(
                f"{path}: added_tokens_decoder[{shown(key)}] has no text 'content'."
            )
        is_number = key.isascii() and key.isdecimal() and len(key) <= MAX_DIGITS
        offset = int(key) - num_base if is_number else -1
        if not 0 <= offset < NUM_SPECIALS:
            raise TokenizerError(
                f"{path}: added_tokens_decoder[{shown(key)}] ({shown(name)}) is outside the "
                f"special ids [{num_base}, {num_base + NUM_SPECIALS})."
            )
        names[offset] = name
    if len(set(names)) != NUM_SPECIALS:
        twice = next(name for name in names if names.count(name) > 1)
        raise TokenizerError(f"{path} gives two special ids the name {shown(twice)}.")
    return names


# Offsets from the first special id, as in the released file; the others are reserved.
SPECIAL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}

# Most common first; blocks of WORD_BLOCK are reordered by the seed.
_WORDS = """
the of and to in is that it for you on with as are this be or at from not have by an can if will
your we all which there they their what when more one so out up has about other into time some would
only then them these no could do any see use make than like new how get its was were been may first
also must where each between through number value name text result error message system user answer
question model data file line list return def self import class None True False else elif while try
except raise print range len str int float dict tuple set open close think response tool call index
function argument type key object array string token layer state weight batch step cache page decode
test check read write start end size shape count length input output default because before after
people work world life year day part place case point group problem fact hand week company system
program run question during without again small large every another much such good great long little
own old right big high different next early young important few public same able know take come give
look want find tell ask seem feel leave keep let begin help show hear play move live believe bring
happen provide include continue change lead understand watch follow stop create speak allow add
spend grow walk win offer remember love consider appear buy wait serve die send expect build fall
cut reach kill remain yield lambda assert global pass break async await with format append extend
update items values keys join split strip encode decode replace torch numpy matrix vector tensor
memory thread kernel linear attention expert router residual norm gate head query config path json
"""
WORD_BLOCK = 32

_PUNCTUATION = (
    "  ", "    ", "        ", "\n\n", "\n    ", " =", " ==", " +", " -", " *", " /", "()", "):",
    " (", "['", "']", "[\"", "\"]", "\",", " \"", " '", "',", ", ", ". ", "...", "->", "=>", "::",
    "//", "/*", "*/", "<=", ">=", "!=", "&&", "||", "{\n", "}\n", ");", "\";", "--", "##", "__",
    "```", "$\\", "\r\n",
)  # fmt: skip
# Common Han characters; Latin-1, Cyrillic, kana and emoji follow as ranges.
_HAN = (
    "的是不了在人有我他这中大来上个国到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可"
    "她里后小么心多天而能好都然没日于起还发成事只作当想看文无开手十用主行方又如前所本见经头面公同"
)
_WIDE_RANGES = (
    (0xA1, 0x100),
    (0x410, 0x450),
    (0x3041, 0x3097),
    (0x2010, 0x2027),
    (0x1F600, 0x1F650),
)
_ONSETS = ("b", "c", "d", "f", "g", "h", "l", "m", "n", "p", "r", "s", "t", "v", "w",
           "st", "tr", "pr", "pl", "gr", "ch", "sh", "th", "br", "cl")  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("", "n", "r", "s", "t", "l", "m", "nt", "st", "ck")


def write_tokenizer(directory: str | Path, vocab_size: int, seed: int) -> None:
    """Writes `tiktoken.model` and `tokenizer_config.json` for `vocab_size` ids."""
    if not MIN_VOCAB <= vocab_size <= MAX_VOCAB:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be at least {MIN_VOCAB} and at most {MAX_VOCAB}."
        )
    save_tokens(directory, itertools.islice(_base_tokens(seed), vocab_size - NUM_SPECIALS))


def save_tokens(directory: str | Path, tokens: Iterable[bytes]) -> None:
    """Writes both files for these base tokens, by rank, and the specials behind them."""
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (Path(directory) / MODEL_FILE).write_bytes(b"".join(lines))
    (Path(directory) / CONFIG_FILE).write_text(_config_text(len(lines)), encoding="utf-8")


def _config_text(num_base: int) -> str:
    decoder = {
        str(num_base + offset): {"content": name, "special": True}
        for name, offset in SPECIAL_OFFSETS.items()
    }
    config = {
        "added_tokens_decoder": decoder,
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
    }
    return json.dumps(config, indent=2) + "\n"


def _base_tokens(seed: int) -> Iterator[bytes]:
    """The 256 bytes, then unique merges, each the concatenation of two earlier tokens."""
    seen = {bytes([byte]) for byte in range(256)}
    yield from (bytes([byte]) for byte in range(256))
    for text in _texts(seed):
        # A text's prefixes come before it, each one byte longer than the one before.
        data = text.encode("utf-8")
        for end in range(2, len(data) + 1):
            if data[:end] not in seen:
                seen.add(data[:end])
                yield data[:end]
    for left, right in _syllable_pairs(seed):
        if left + right not in seen:
            seen.add(left + right)
            yield left + right


def _texts(seed: int) -> Iterator[str]:
    words = _WORDS.split()
    common = [word for text in words[: 2 * WORD_BLOCK] for word in (" " + text, text)]
    yield from _shuffled(seed, common)
    yield from _PUNCTUATION
    for start in range(2 * WORD_BLOCK, len(words), WORD_BLOCK):
        for word in _shuffled(seed, words[start : start + WORD_BLOCK]):
            yield from (" " + word, word, word.capitalize())
    yield from (f"{number:03d}" for number in range(1000))
    yield from _HAN
    yield from (chr(code) for start, end in _WIDE_RANGES for code in range(start, end))
    for syllable in _syllables():
        yield from (syllable, " " + syllable)


def _syllables() -> list[str]:
    return ["".join(parts) for parts in itertools.product(_ONSETS, _VOWELS, _CODAS)]


def _syllable_pairs(seed: int) -> Iterator[tuple[bytes, bytes]]:
    syllables = [syllable.encode("ascii") for syllable in _shuffled(seed, _syllables())]
    for left, right in itertools.product(syllables, syllables):
        yield b" " + left, right
        yield left, right


def _shuffled(seed: int, texts: list[str]) -> list[str]:
    return sorted(texts, key=lambda text: hashlib.sha256(f"{seed}:{text}".encode()).digest())
