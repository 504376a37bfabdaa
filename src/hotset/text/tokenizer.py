"""From text to token ids and back, with only the metadata of a GGUF file.

Libraries do the tokenizing: `tokenizers` for byte-level BPE (tokenizer.ggml.model = "gpt2"), BPE over
characters ("gemma4") and WordPiece ("bert"), `sentencepiece` for SentencePiece BPE ("llama") and unigram
("t5"). RWKV's longest matches ("rwkv") are found here. This module does what GGUF leaves to its reader.
It builds the library's model from pieces, scores, merges and types. It splits text at special tokens. It adds
BOS and EOS. It turns ids back into bytes, which may split a character and are decoded accordingly.
"""

import codecs
import contextlib
import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np

from hotset.errors import ContextLengthError, TokenizerError
from hotset.parameters import shown
from hotset.text.charsmap import CharsMap
from hotset.text.pretokenizers import UNNAMED, pre_tokenizer
from hotset.text.special_tokens import SpecialTokens

# Values of tokenizer.ggml.token_type; they are SentencePiece's own.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# Texts of tokens that end a generation, whatever the file's keys say: many files name only one of several
# (Llama 3: eos is <|end_of_text|>, but a turn ends with <|eot_id|>). Texts that are not written by chance
# count whatever their type, since converters often left these tokens as normal ones; ...
_END_OF_GENERATION = frozenset(
    [
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
        "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_utterance>",
        "<|tool_response>", "<start_function_response>", "<｜end▁of▁sentence｜>", "▁<EOT>",
        # fill-in-the-middle: the end of a file or of a repository
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>",
        "<|file_sep|>",
    ]
)  # fmt: skip
# ... these only as control or user-defined tokens: in Qwen's vocabulary "</s>" is a piece of HTML.
_END_OF_GENERATION_IF_SPECIAL = frozenset(
    [
        "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "[e~[", "<PAD>", "[PAD]", "<REPO>",
        "<reponame>",
    ]
)  # fmt: skip

# Tokens of OpenAI's harmony format that a program must see in the output, although files call them control.
_HARMONY_VISIBLE = frozenset(["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"])

_KNOWN_TEXTS = _END_OF_GENERATION | _END_OF_GENERATION_IF_SPECIAL | _HARMONY_VISIBLE

_SPACE = "\u2581"  # SentencePiece's visible space

WHOLE_TEXT_KEY = "hotset.tokenizer_whole_text"
"""The key of a file whose texts the library tokenizes as a whole: with the user-defined tokens in them
(SentencePiece), or with their line feeds (BPE over characters)."""
IGNORE_MERGES_KEY = "hotset.tokenizer_ignore_merges"
"""The key of a byte-level BPE file in which a word that is a token is taken whole, whatever the merges."""
NFC_KEY = "hotset.tokenizer_nfc"
"""The key that states whether texts of a byte-level BPE file are normalised to NFC. Without it, the
pre-tokenizer's name decides."""
LSTRIP_KEY, RSTRIP_KEY = "hotset.tokenizer_lstrip", "hotset.tokenizer_rstrip"
"""The keys with the ids of added tokens that take in the white space before, or after them."""
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's special tokens
METASPACE_KEY = "hotset.tokenizer_metaspace"
"""The key of a SentencePiece file with the prefix of the library `tokenizers`: a text gets none if it begins
with a space. "first" puts none after special tokens, either; "always" does."""
UNIGRAM_STEPS_KEY = "hotset.tokenizer_unigram_steps"
"""The key of a converted unigram file: the steps of its tokenizer.json between table of characters and model.
"collapse" joins several spaces into one, "words" splits at any white space, "pieces" splits before spaces,
"first" puts no prefix after special tokens."""
UNIGRAM_SCORES_KEY = "hotset.tokenizer_unigram_scores"
"""The key of a converted unigram file whose scores lose digits as float32. These decide between spellings
with nearly the same sum."""
_MOST_SEQUENCES = 256  # texts whose sequences of tokens are cached
_SHORT = 512  # characters: tokenizing more in one call would hold the interpreter's lock for long


class Tokenizer:
    """A converter of text ↔ token ids. Made by `load_tokenizer`; immutable, and safe for several threads.

    tokens: piece text of every id, as the file spells it (byte-level BPE: in GPT-2's alphabet of bytes).
    bos_id, eos_id: None if the file has none.
    stop_ids: every id that ends a generation (eos, eot, eom, and well-known end-of-turn tokens).
    add_bos, add_eos: whether `encode(add_special=True)` adds BOS or EOS.
    """

    _prefixes_parts = True  # whether a part after a special token gets the same prefix as a text

    def __init__(
        self,
        metadata: Mapping[str, Any],
        *,
        bos: int | None,
        eos: int | None,
        add_bos: bool,
        add_eos: bool = False,
    ) -> None:
        self.tokens: list[str] = _strings(metadata, "tokenizer.ggml.tokens")
        self._bytes: dict[int, bytes] = {}  # cache of token_bytes
        self._sequences: dict[str, frozenset[tuple[int, ...]]] = {}  # cache of sequences_with
        n = len(self.tokens)
        if n == 0:
            raise TokenizerError(
                "The file's vocabulary (tokenizer.ggml.tokens) is empty: fetch or convert it again."
            )
        self.types = _types(metadata, self.tokens)
        self.bos_id = _special_id(metadata, "bos_token_id", n, bos)
        self.eos_id = _special_id(metadata, "eos_token_id", n, eos)
        self.unk_id = _special_id(metadata, "unknown_token_id", n, None)
        self.pad_id = _special_id(metadata, "padding_token_id", n, None)
        self.eot_id = _special_id(metadata, "eot_token_id", n, None)
        self.eom_id = _special_id(metadata, "eom_token_id", n, None)
        self.add_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", add_bos)
        self.add_eos = _flag(metadata, "tokenizer.ggml.add_eos_token", add_eos)
        for wanted, id, name in ((self.add_bos, self.bos_id, "bos"), (self.add_eos, self.eos_id, "eos")):
            if wanted and id is None:
                raise TokenizerError(
                    f"The file asks for {name.upper()} around every text but names no valid id for it "
                    f"(tokenizer.ggml.{name}_token_id): set it, or tokenizer.ggml.add_{name}_token to false."
                )
        self.stop_ids = self._find_stop_ids()
        # Texts that are one token everywhere. User-defined ones always are (such as runs of spaces in code
        # models). Control tokens are only if special tokens are parsed, so that a user cannot write them.
        user_defined = self._ids_of(_USER_DEFINED)
        self._user_defined = SpecialTokens(user_defined)
        special = user_defined | self._ids_of(_CONTROL) | self._ids_of(_UNKNOWN)
        self._special = SpecialTokens(special)
        self._strips_before, self._strips_after = (
            frozenset(_numbers(metadata, key, "iu").tolist()) for key in (LSTRIP_KEY, RSTRIP_KEY)
        )
        if re.search(r"\bphi[ -]?3", str(metadata.get("general.name")).lower()):  # no standard key says so
            self._strips_after |= {id for text, id in special.items() if text not in _NOT_STRIPPING}

    # --- text → ids

    def encode(
        self,
        text: str,
        add_special: bool = True,
        parse_special: bool = False,
        *,
        most: int | None = None,
        restored: Callable[[str], str] | None = None,
        after_image: bool = False,
    ) -> list[int]:
        """Return the ids of `text`. Other threads keep running while a long one is tokenized.

        add_special: add BOS and EOS as the file requires (False for a rendered chat template with its own).
        parse_special: special tokens spelled in `text` become their ids. Only for trusted text, such as a
            rendered chat template; otherwise they are plain text.
        most: tokens. Raises ContextLengthError before tokenizing if the text certainly has more
            (`fewest_tokens`). The result may still have more.
        restored: returns the actual text of a part between special tokens (text/plain_text.py).
        after_image: the text follows an image, which counts as a special token.
        """
        text = _without_surrogates(text)
        whole = restored(text) if restored else text
        # A token has a byte or more: most prompts avoid the scan of the vocabulary, which takes 0.1 s once.
        if most is not None and len(_utf8(whole)) > most and (n := self.fewest_tokens(whole)) > most:
            raise ContextLengthError(
                f"the text has {n} tokens or more, which do not fit in the context of {most}; shorten it or "
                "load the model with a larger n_ctx",
                n_tokens=n,
                n_ctx=most,
            )
        ids: list[int] = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        specials = self._special if parse_special else self._user_defined
        after_special = self._prefixes_parts if after_image else True
        for part, special in self._stripped(specials.split(text)):
            if special is None:
                ids += self._encode_plain(restored(part) if restored else part, after_special)
            else:
                ids.append(special)
            after_special = special is not None and self._prefixes_parts
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def _stripped(self, parts: Iterable[tuple[str, int | None]]) -> Iterator[tuple[str, int | None]]:
        """Yield the parts of a text without the white space that tokens next to it take in."""
        before: int | None = None
        for (part, special), (_, after) in pairwise(chain(parts, [("", None)])):
            kept = part
            if special is None:
                kept = part.lstrip() if before in self._strips_after else part
                kept = kept.rstrip() if after in self._strips_before else kept
            if kept:
                yield kept, special
            before = special

    def encode_prompt(self, text: str, parse_special: bool, *, most: int | None = None) -> list[int]:
        """Return the ids of a text that a model continues, with BOS and EOS as the file requires.

        parse_special: special tokens spelled in it become their ids, and BOS at its beginning is not added
            again. False makes them plain text, as untrusted text needs.
        most: as in `encode`.
        """
        ids = self.encode(text, parse_special=parse_special, most=most)
        first = self.text_bos_id
        if parse_special and first is not None and ids[:2] == [first, first]:
            del ids[0]
        return ids

    def special_parts(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yield the parts of `text`: special and user-defined tokens with their ids, others with None."""
        return self._special.split(_without_surrogates(text))

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens of `text`. It is 0 if `encode` may drop characters.

        A byte counts as one over the length of the longest token with this byte, so the bytes of a token
        never count as more than one in total.
        """
        data = self._composed(_without_surrogates(text)).encode()
        n_tokens = np.bincount(np.frombuffer(data, np.uint8), minlength=256) @ self._byte_shares
        return math.ceil(float(n_tokens) - 1e-6)

    def _composed(self, text: str) -> str:
        """Return `text` as `encode` reads it, special tokens included."""
        return text

    @cached_property
    def _byte_shares(self) -> np.ndarray:
        """Return float64 [256]: 1 / length of the longest token with the byte; 0 if texts may lose it."""
        longest = [1] * 256
        spellings = [self._spellings(piece) for piece in self.tokens]
        for texts in (*spellings, *([_utf8(piece)] for piece in self._special.ids)):
            n = max(map(len, texts))
            for byte in set().union(*texts):
                longest[byte] = max(longest[byte], n)
        shares = np.zeros(256)
        spelled = list(self._spelled_bytes())
        shares[spelled] = 1 / np.array(longest)[spelled]
        return shares

    def _spellings(self, piece: str) -> list[bytes]:
        """Return the texts, or their parts, that a token which is not special may represent."""
        raise NotImplementedError

    def _spelled_bytes(self) -> Collection[int]:
        """Return the bytes that no text loses in `encode`."""
        raise NotImplementedError

    def rows(self, tokens: Sequence[int], n_ctx: int) -> np.ndarray:
        """Return tokens as int32 [n_rows, n_ctx], whole rows only. Each row begins with BOS if texts do."""
        rows = np.array(tokens[: len(tokens) // n_ctx * n_ctx], np.int32).reshape(-1, n_ctx)
        if self.add_bos and self.bos_id is not None:
            rows[:, 0] = self.bos_id
        return rows

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of `text` as a continuation of another text: no BOS and no space before it.

        Special tokens spelled in it are plain text.
        """
        ids: list[int] = []
        for part, special in self._user_defined.split(text):
            ids += self._encode_plain(part, after_special=False) if special is None else [special]
        return ids

    def sequences_with(self, texts: Iterable[str]) -> set[tuple[int, ...]]:
        """Return sequences of tokens in which one of `texts` (none empty) occurs.

        They are each token that contains the text, each token that ends with its beginning plus the tokens of
        the rest, and its own tokens.
        """
        found: set[tuple[int, ...]] = set()
        for text in texts:
            known = self._sequences.get(text)
            if known is None:
                if len(self._sequences) >= _MOST_SEQUENCES:
                    self._sequences.clear()
                known = self._sequences[text] = frozenset(self._found_sequences(text))
            found |= known
        return found

    def _found_sequences(self, text: str) -> Iterator[tuple[int, ...]]:
        wanted = _utf8(text)
        data, ends = self._all_bytes
        ends_of = ends[1:]
        for match in re.finditer(b"(?=" + re.escape(wanted) + b")", data):
            id = int(ends_of.searchsorted(match.start(), side="right"))
            if match.start() + len(wanted) <= ends[id + 1]:
                yield (id,)
        bytes_of = np.frombuffer(data, np.uint8)
        lengths = np.diff(ends)
        for n in range(1, len(text)):
            head = _utf8(text[:n])
            ids = np.flatnonzero(lengths >= len(head))
            for i in range(len(head)):
                ids = ids[bytes_of[ends_of[ids] - 1 - i] == head[-1 - i]]
            tail = tuple(self.encode_inside(text[n:]))
            for id in ids.tolist():
                yield (id, *tail)
        if own := self.encode_inside(text):
            yield tuple(own)

    @cached_property
    def _all_bytes(self) -> tuple[bytes, np.ndarray]:
        """Return the bytes of all tokens, joined, and the offset of each token, with the total at the end."""
        pieces = [self.token_bytes(id) for id in range(len(self.tokens))]
        return b"".join(pieces), np.cumsum([0, *map(len, pieces)])

    def _encode_plain(self, text: str, after_special: bool) -> list[int]:
        """Return the ids of `text` (not empty), which contains no special token.

        after_special: it begins the whole text or follows a special token.
        """
        raise NotImplementedError

    # --- ids → text

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Return the text of `ids`: the inverse of `encode`. Bytes that are not UTF-8 become U+FFFD.

        skip_special: leave out control tokens. To decode the continuation of a prompt, use `stream`, which
        keeps the space at the beginning of a SentencePiece text.
        """
        return b"".join(self._whole_text_bytes(ids, skip_special)).decode("utf-8", "replace")

    def _whole_text_bytes(self, ids: Iterable[int], skip_special: bool) -> Iterable[bytes]:
        return (self.token_bytes(id) for id in ids if not (skip_special and self.is_special(id)))

    def stream(self, skip_special: bool = False, shown: Collection[int] = ()) -> "StreamDecoder":
        """Return a decoder for ids that arrive one by one. shown: special tokens that are not left out."""
        return StreamDecoder(self, skip_special, shown)

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of `id` (not always whole characters; a special token's spell its name).

        Raises TokenizerError for an id outside the vocabulary.
        """
        known = self._bytes.get(id)
        if known is None:
            known = self._bytes[id] = self._found_bytes(id)
        return known

    def token_text(self, id: int) -> str:
        """Return the text of a token; part of a character becomes U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def _found_bytes(self, id: int) -> bytes:
        if not 0 <= id < len(self.tokens):
            raise TokenizerError(f"Token id {id} is outside the vocabulary of {len(self.tokens)} tokens.")
        kind = self.types[id]
        piece = self.tokens[id]
        if kind == _UNUSED:
            return b""
        if kind == _BYTE:
            return bytes([int(piece[3:5], 16)])
        if kind in (_CONTROL, _UNKNOWN):
            return _utf8(piece)
        return self._piece_bytes(piece, user_defined=kind == _USER_DEFINED)

    def _piece_bytes(self, piece: str, user_defined: bool) -> bytes:
        raise NotImplementedError

    # --- the vocabulary

    @property
    def n_vocab(self) -> int:
        """Return the number of ids. The model's output may be longer (padding)."""
        return len(self.tokens)

    @property
    def text_bos_id(self) -> int | None:
        """Return the token that every text begins with, or None."""
        return self.bos_id if self.add_bos else None

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Return the ids by piece text, as the file spells it (`tokens` is the inverse)."""
        return {piece: id for id, piece in enumerate(self.tokens)}

    def is_special(self, id: int) -> bool:
        """Return whether `id` is a control or unknown token, which a reader of the text should not see."""
        return bool(self.types[id] in (_CONTROL, _UNKNOWN))

    def is_user_defined(self, id: int) -> bool:
        """Return whether `id` is one token wherever its text occurs, and visible to a reader."""
        return bool(self.types[id] == _USER_DEFINED)

    def piece(self, id: int | None) -> str:
        """Return the spelling of a special token, "" for None, as in `bos_token` of chat templates."""
        return "" if id is None else self.tokens[id]

    def _ids_of(self, kind: int) -> dict[str, int]:
        ids = np.flatnonzero(self.types == kind).tolist()
        return {self.tokens[id]: id for id in ids if self.tokens[id]}

    def _find_stop_ids(self) -> frozenset[int]:
        """Return the ids that end a generation. Also correct the types of tokens with well-known texts."""
        known = {piece: id for id, piece in enumerate(self.tokens) if piece in _KNOWN_TEXTS}
        stops = {
            piece: id
            for piece, id in known.items()
            if piece in _END_OF_GENERATION
            or (piece in _END_OF_GENERATION_IF_SPECIAL and self.types[id] in (_CONTROL, _USER_DEFINED))
        }
        # in harmony and similar formats <|end|> ends a message, not the answer
        if stops.keys() >= {"<|return|>", "<|call|>", "<|end|>"} or stops.keys() >= {
            "<|calls|>",
            "<|flush|>",
            "<|end|>",
        }:
            self.types[stops.pop("<|end|>")] = _USER_DEFINED
        self.types[list(stops.values())] = _CONTROL
        self.types[[known[piece] for piece in _HARMONY_VISIBLE & known.keys()]] = _USER_DEFINED
        named = {id for id in (self.eos_id, self.eot_id, self.eom_id) if id is not None}
        return frozenset(stops.values()) | named


class _MergingTokenizer(Tokenizer):
    """BPE with the library `tokenizers`: pairs of pieces merge in the order of the merges."""

    def _merging(self, metadata: Mapping[str, Any], **settings: Any) -> Any:
        """Return the library's model of the file's tokens and merges."""
        merges = _strings(metadata, "tokenizer.ggml.merges")
        vocab = self._words()
        # Control tokens are not words of the model: text must never become one by merging.
        for piece in ("", *self._ids_of(_CONTROL), *self._ids_of(_UNKNOWN)):
            vocab.pop(piece, None)

        from tokenizers.models import BPE

        pairs: Any = [tuple(merge.split(" ", 1)) for merge in merges]
        try:
            # The library joins two pieces in a buffer as long as the longest token. If they do not fit it
            # panics, which ends the process or is not an Exception.
            if _longest(merges) - len(" ") > _longest(vocab):
                raise ValueError("a merge leads to no token")
            return BPE(vocab, pairs, **settings)
        except Exception:
            # Some files have merges of tokens that were removed from the vocabulary, or pieces that are not
            # text. The library rejects both. Such merges could only produce tokens that do not exist.
            vocab = {piece: id for piece, id in vocab.items() if _is_text(piece)}
            pairs = [
                p for p in pairs if len(p) == 2 and p[0] in vocab and p[1] in vocab and "".join(p) in vocab
            ]
            return BPE(vocab, pairs, **settings)

    def _words(self) -> dict[str, int]:
        """Return the ids of all tokens by their spelling in the merges."""
        return dict(zip(self.tokens, range(self.n_vocab), strict=True))


class BytePairTokenizer(_MergingTokenizer):
    """Byte-level BPE: every byte is a letter of GPT-2's alphabet. Pairs merge in the order of the merges."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        unnamed = UNNAMED.get(str(metadata.get("general.architecture")), "")
        row = pre_tokenizer(metadata.get("tokenizer.ggml.pre", unnamed))
        super().__init__(
            metadata, bos=None, eos=None, add_bos=row.add_bos and "tokenizer.ggml.bos_token_id" in metadata
        )

        from tokenizers import Regex
        from tokenizers import Tokenizer as HFTokenizer
        from tokenizers.normalizers import NFC
        from tokenizers.pre_tokenizers import ByteLevel, Split
        from tokenizers.pre_tokenizers import Sequence as PreTokenizers

        ignore_merges = row.ignore_merges or _flag(metadata, IGNORE_MERGES_KEY, False)
        self.library = HFTokenizer(self._merging(metadata, ignore_merges=ignore_merges))
        self._nfc = NFC() if _flag(metadata, NFC_KEY, row.normalises) else None
        if self._nfc is not None:
            self.library.normalizer = self._nfc
        splits: list[Any] = [Split(Regex(pattern), "isolated") for pattern in row.patterns]
        self.library.pre_tokenizer = PreTokenizers(
            [*splits, ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def _encode_plain(self, text: str, after_special: bool) -> list[int]:  # noqa: ARG002
        if len(text) <= _SHORT:
            ids: list[int] = self.library.encode(text, add_special_tokens=False).ids
        else:  # unlike `encode`, this releases the interpreter's lock
            ids = self.library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _composed(self, text: str) -> str:
        if self._nfc is None or text.isascii():
            return text
        return "".join(self._nfc.normalize_str(part) for part, _ in self._special.split(text))

    def _spellings(self, piece: str) -> list[bytes]:
        return [self._piece_bytes(piece, user_defined=False)]

    def _spelled_bytes(self) -> Collection[int]:
        removed = self._ids_of(_CONTROL).keys() | self._ids_of(_UNKNOWN).keys()
        letters = BYTE_OF_LETTER.keys() & (set(self.tokens) - removed)
        return [BYTE_OF_LETTER[letter] for letter in letters]

    def _piece_bytes(self, piece: str, user_defined: bool) -> bytes:
        if user_defined:
            return _utf8(piece)
        try:
            return bytes([BYTE_OF_LETTER[letter] for letter in piece])
        except KeyError:  # a piece in plain text, as some added tokens are
            return _utf8(piece)


class TextPairTokenizer(_MergingTokenizer):
    """BPE over characters, line by line ("gemma4", of Gemma 3 and 4).

    A space is U+2581, a run of line feeds is one token if the vocabulary has it, and bytes are the fallback.

    Files list runs of spaces as user-defined tokens. In a text they merge like other characters, and only
    U+2581 is matched as a user-defined token. A file may enable merges over line feeds (WHOLE_TEXT_KEY).
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        has_bos = "tokenizer.ggml.bos_token_id" in metadata
        keys = {**metadata, "tokenizer.ggml.add_bos_token": has_bos}  # as llama.cpp, whatever the file says
        super().__init__(keys, bos=None, eos=None, add_bos=has_bos)

        from tokenizers import Tokenizer as HFTokenizer

        self.library = HFTokenizer(self._merging(metadata, byte_fallback=True))
        special = self._ids_of(_CONTROL) | self._ids_of(_UNKNOWN)
        user_defined = self._ids_of(_USER_DEFINED)
        spaces = {piece for piece in user_defined if not piece.strip(" ")}
        named = {_SPACE * len(piece) if piece in spaces else piece: id for piece, id in user_defined.items()}
        self._user_defined, self._special = SpecialTokens(named), SpecialTokens(named | special)
        self._is_whole = _flag(metadata, WHOLE_TEXT_KEY, False)
        breaks = (piece for piece in self.vocabulary if piece and not piece.strip("\n"))
        self._breaks = {piece: self.vocabulary[piece] for piece in breaks if piece not in special}

    def _words(self) -> dict[str, int]:
        user_defined = self._ids_of(_USER_DEFINED)
        spaces = {_SPACE * len(piece): id for piece, id in user_defined.items() if not piece.strip(" ")}
        return super()._words() | spaces

    def _encode_plain(self, text: str, after_special: bool) -> list[int]:  # noqa: ARG002
        text = text.replace(" ", _SPACE)
        if self._is_whole:
            ids: list[int] = self.library.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids
        parts = [part for part in re.split("(\n+)", text) if part]
        merged = iter(
            self.library.encode_batch_fast(
                [part for part in parts if part not in self._breaks], add_special_tokens=False
            )
        )
        ids = []
        for part in parts:
            ids += [self._breaks[part]] if part in self._breaks else next(merged).ids
        return ids

    def _spellings(self, piece: str) -> list[bytes]:
        return [_utf8(piece), self._piece_bytes(piece, user_defined=False)]

    def _spelled_bytes(self) -> Collection[int]:
        return range(256) if _has_byte_pieces(self.tokens, self.types) else ()

    def _piece_bytes(self, piece: str, user_defined: bool) -> bytes:
        return _utf8(piece if user_defined else piece.replace(_SPACE, " "))


class SentencePieceTokenizer(Tokenizer):
    """SentencePiece BPE: the pair whose union has the best score merges first; bytes are the fallback.

    llama.cpp splits a text at user-defined tokens and puts a space before each remaining part. A file may
    select the library's way for the whole text (WHOLE_TEXT_KEY, or remove_extra_whitespaces, which only the
    library implements): one space before the text, and user-defined tokens in place.
    """

    _UNIGRAM = False

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        if self._UNIGRAM:
            super().__init__(metadata, bos=None, eos=1, add_bos=False, add_eos=True)
        else:
            super().__init__(metadata, bos=1, eos=2, add_bos=True)
        n = self.n_vocab
        if self._UNIGRAM and not (self.types == _UNKNOWN).any():
            self.types[min(2, n - 1) if self.unk_id is None else self.unk_id] = _UNKNOWN
        scores = _numbers(metadata, "tokenizer.ggml.scores", "iuf").astype("<f4")
        if np.isnan(scores).any():  # no comparison with it is true
            raise TokenizerError("The file's tokenizer.ggml.scores contain NaN: fetch or convert it again.")
        if len(scores) < n:
            raise TokenizerError(
                f"The file has {n} tokens but {len(scores)} scores (tokenizer.ggml.scores), and "
                "SentencePiece merges by score: fetch or convert it again."
            )
        self.add_space_prefix = _flag(metadata, "tokenizer.ggml.add_space_prefix", True)
        self._removes_spaces = _flag(metadata, "tokenizer.ggml.remove_extra_whitespaces", False)
        self._single_prefix = METASPACE_KEY in metadata
        self._prefixes_parts = metadata.get(METASPACE_KEY) != "first"
        whole_text = self._removes_spaces or self._UNIGRAM or _flag(metadata, WHOLE_TEXT_KEY, False)
        if whole_text:
            self._user_defined = SpecialTokens({})
            self._special = SpecialTokens(self._ids_of(_CONTROL) | self._ids_of(_UNKNOWN))

        from sentencepiece import SentencePieceProcessor

        pieces = _sentencepiece_pieces(self.tokens, scores[:n], self.types, unigram=self._UNIGRAM)
        try:
            self.library = SentencePieceProcessor(model_proto=pieces + _normalizer())
            self._whole = None  # for whole texts
            if whole_text:
                normalizer = _normalizer(prefix=self.add_space_prefix, removes_spaces=self._removes_spaces)
                self._whole = SentencePieceProcessor(model_proto=pieces + normalizer)
        except (RuntimeError, ValueError, OSError) as error:
            raise TokenizerError(
                f"The file's SentencePiece vocabulary is not usable ({error}): fetch or convert it again."
            ) from None

    def _encode_plain(self, text: str, after_special: bool) -> list[int]:
        library = self.library
        if after_special and self._whole is not None:
            library = self._whole
        elif after_special and self.add_space_prefix:
            text = text if self._single_prefix and text.startswith((" ", _SPACE)) else " " + text
        # The unknown piece that `_sentencepiece_pieces` may append is not a token of the file. (The library
        # tokenizes without the interpreter's lock.)
        return [id for id in library.encode(text) if id < self.n_vocab]

    def _spellings(self, piece: str) -> list[bytes]:
        return [
            _utf8(piece),
            self._piece_bytes(piece, user_defined=False),
        ]  # a text may have "\u2581" for a space

    def _spelled_bytes(self) -> Collection[int]:
        all_are = _has_byte_pieces(self.tokens, self.types) and not self._removes_spaces
        return range(256) if all_are else ()

    def _whole_text_bytes(self, ids: Iterable[int], skip_special: bool) -> Iterable[bytes]:
        # `encode` puts a space at the beginning of a text and after a special token: remove it there.
        after_special = self.add_space_prefix
        in_text = (_UNKNOWN, _USER_DEFINED) if self._whole is not None else ()
        for id in ids:
            piece = self.token_bytes(id)
            if self.types[id] in (_CONTROL, _UNKNOWN, _USER_DEFINED):
                after_special = (
                    self.add_space_prefix and self._prefixes_parts and self.types[id] not in in_text
                )
                if not (skip_special and self.is_special(id)):
                    yield piece
            else:
                yield piece.removeprefix(b" ") if after_special else piece
                after_special = False

    def _piece_bytes(self, piece: str, user_defined: bool) -> bytes:  # noqa: ARG002
        return _utf8(piece.replace(_SPACE, " "))


class UnigramTokenizer(SentencePieceTokenizer):
    """SentencePiece's unigram model ("t5", of T5 and XLM-RoBERTa): the pieces with the best sum of scores.

    Text is first normalised with the file's table (text/charsmap.py). Text without pieces is unknown. The
    library `tokenizers` reads the texts of a file with UNIGRAM_STEPS_KEY: its sums have double precision.
    """

    _UNIGRAM = True

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata)
        blob = _numbers(metadata, "tokenizer.ggml.precompiled_charsmap", "iu")
        self._normalised = CharsMap(blob.astype(np.uint8).tobytes())
        self._stepwise: tuple[Any, Any] | None = None  # libraries for inside a text, and for its beginning
        if UNIGRAM_STEPS_KEY in metadata:
            steps = frozenset(_strings(metadata, UNIGRAM_STEPS_KEY))
            self._prefixes_parts = "first" not in steps
            prefix = "always" if self._prefixes_parts else "first"
            schemes = "never", prefix if self.add_space_prefix else "never"
            inside, begin = (
                self._by_steps(scores=metadata, steps=steps, prepend=scheme) for scheme in schemes
            )
            self._stepwise = inside, begin
            self._user_defined = SpecialTokens(self._ids_of(_USER_DEFINED))
            self._special = SpecialTokens(
                self._ids_of(_USER_DEFINED) | self._ids_of(_CONTROL) | self._ids_of(_UNKNOWN)
            )

    def _by_steps(self, scores: Mapping[str, Any], steps: Collection[str], prepend: Any) -> Any:
        from tokenizers import Regex, normalizers, pre_tokenizers
        from tokenizers import Tokenizer as HFTokenizer
        from tokenizers.models import Unigram

        key = UNIGRAM_SCORES_KEY if UNIGRAM_SCORES_KEY in scores else "tokenizer.ggml.scores"
        values = _numbers(scores, key, "iuf").tolist()
        if key == UNIGRAM_SCORES_KEY and not (
            len(values) == len(self.tokens) and all(map(math.isfinite, values))
        ):
            raise TokenizerError(f"{key} must have a finite score for each of {len(self.tokens)} tokens")
        unknown = int(np.flatnonzero(self.types == _UNKNOWN)[0])
        # Words that no text contains keep the ids in place. An unknown character scores the least score - 10.
        words = [
            (piece, score) if kind in (_NORMAL, _UNKNOWN) and _is_text(piece) else (f"\0{id}", 0.0)
            for id, (piece, score, kind) in enumerate(
                zip(self.tokens, values, self.types.tolist(), strict=False)
            )
        ]
        library = HFTokenizer(Unigram(words, unknown, False))
        if "collapse" in steps:
            library.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
        spaces = pre_tokenizers.Metaspace(_SPACE, prepend, split="pieces" in steps)
        splits = [pre_tokenizers.WhitespaceSplit(), spaces] if "words" in steps else [spaces]
        library.pre_tokenizer = pre_tokenizers.Sequence(splits)
        return library

    def _encode_plain(self, text: str, after_special: bool) -> list[int]:
        text = self._normalised(text)
        if self._stepwise is not None:
            library = self._stepwise[after_special]
            ids: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids
        return super()._encode_plain(text, after_special)

    def _spelled_bytes(self) -> Collection[int]:
        return ()  # a text may become shorter, and several unknown characters one token


class WordPieceTokenizer(Tokenizer):
    """BERT's tokenizer: words and signs of normalised text, each spelled by the longest pieces from the left.

    A piece that begins a word has "\u2581" before it in the file, one inside a word has not. A word without
    pieces, or of more than 100 characters, is one unknown token. Texts begin with [CLS] and end with [SEP].
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        first, last = (_ids(metadata, name) for name in ("cls_token_id", "seperator_token_id"))  # (sic)
        keys = dict(metadata)
        keys["tokenizer.ggml.eos_token_id"] = 102 if last is None else last
        keys["tokenizer.ggml.add_eos_token"] = metadata.get("tokenizer.ggml.add_sep_token", True)
        super().__init__(keys, bos=101 if first is None else first, eos=None, add_bos=True)
        unknown = 100 if self.unk_id is None else self.unk_id
        if unknown >= self.n_vocab:
            raise TokenizerError(
                "The file names no valid unknown token (tokenizer.ggml.unknown_token_id), which BERT's "
                "tokenizer needs: fetch or convert it again."
            )
        self.unk_id = unknown
        lowercase = _flag(metadata, "tokenizer.ggml.normalizer.lowercase", True)
        strips = _flag(metadata, "tokenizer.ggml.normalizer.strip_accents", lowercase)

        from tokenizers import Tokenizer as HFTokenizer
        from tokenizers.models import WordPiece
        from tokenizers.normalizers import BertNormalizer
        from tokenizers.pre_tokenizers import BertPreTokenizer

        words: dict[str, int] = {}
        for id in np.flatnonzero(self.types == _NORMAL).tolist():
            piece = self.tokens[id]
            spelled = piece[1:] if piece[:1] == _SPACE else f"##{piece}"
            if _is_text(spelled) and spelled:
                words.setdefault(spelled, id)
        nothing = "\0"  # never in normalised text
        words[nothing] = unknown
        self.library = HFTokenizer(WordPiece(words, unk_token=nothing))
        self.library.normalizer = BertNormalizer(lowercase=lowercase, strip_accents=strips)
        self.library.pre_tokenizer = BertPreTokenizer()

    def _encode_plain(self, text: str, after_special: bool) -> list[int]:  # noqa: ARG002
        ids: list[int] = self.library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _spellings(self, piece: str) -> list[bytes]:
        return [self._piece_bytes(piece, user_defined=False)]

    def _spelled_bytes(self) -> Collection[int]:
        return ()  # spaces and accents are lost, and an unknown word is one token

    def _whole_text_bytes(self, ids: Iterable[int], skip_special: bool) -> Iterable[bytes]:
        begins = True
        for piece in super()._whole_text_bytes(ids, skip_special):
            yield piece.removeprefix(b" ") if begins else piece
            begins = False

    def _piece_bytes(self, piece: str, user_defined: bool) -> bytes:  # noqa: ARG002
        return _utf8(piece.replace(_SPACE, " "))


class RwkvTokenizer(Tokenizer):
    """RWKV's World vocabulary: byte strings, whose longest match is taken repeatedly.

    The file spells a piece like a Python literal: letters, and escapes such as \\n and \\xe4.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata, bos=None, eos=None, add_bos=False)
        self._ids: dict[bytes, int] = {}
        for id, piece in enumerate(self.tokens):
            if self.types[id] not in (_CONTROL, _UNKNOWN, _UNUSED) and (data := _unescaped(piece)):
                self._ids.setdefault(data, id)
        # First two bytes of a piece → the lengths of such pieces, the longest first.
        lengths: dict[bytes, set[int]] = {}
        for data in self._ids:
            lengths.setdefault(data[:2], set()).add(len(data))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}

    def _encode_plain(self, text: str, after_special: bool) -> list[int]:  # noqa: ARG002
        data, at, ids = text.encode(), 0, []
        while at < len(data):
            for n in (*self._lengths.get(data[at : at + 2], ()), 1):
                id = self._ids.get(data[at : at + n])
                if id is not None and at + n <= len(data):
                    ids.append(id)
                    break
            else:
                if self.unk_id is not None:
                    ids.append(self.unk_id)
            at += n
        return ids

    def _spellings(self, piece: str) -> list[bytes]:
        return [_unescaped(piece)]

    def _spelled_bytes(self) -> Collection[int]:
        return [data[0] for data in self._ids if len(data) == 1]

    def _piece_bytes(self, piece: str, user_defined: bool) -> bytes:
        return _utf8(piece) if user_defined else _unescaped(piece)


class StreamDecoder:
    """A decoder of ids that arrive one by one. It holds back the bytes of an incomplete character."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = frozenset(shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """Return the text that `id` completes: "" for part of a character, U+FFFD for invalid bytes."""
        piece = self._tokenizer.token_bytes(id)
        if self._skip_special and self._tokenizer.is_special(id) and id not in self._shown:
            return ""
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """Return the held back bytes, as U+FFFD, and reset the decoder."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


_KINDS: dict[str, Callable[[Mapping[str, Any]], Tokenizer]] = {
    "gpt2": BytePairTokenizer,
    "llama": SentencePieceTokenizer,
    "t5": UnigramTokenizer,
    "bert": WordPieceTokenizer,
    "rwkv": RwkvTokenizer,
    "gemma4": TextPairTokenizer,
}


def load_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that a GGUF file's metadata describes (keys `tokenizer.ggml.*`).

    Arrays of numbers may be NumPy arrays or lists. Strings that were not UTF-8 in the file hold their bytes
    as surrogates (errors="surrogateescape"). Raises TokenizerError for a kind that is not supported or a
    damaged vocabulary.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise TokenizerError(
            "The file has no tokenizer (no key tokenizer.ggml.model): convert the model with one."
        )
    make = _KINDS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise TokenizerError(
            f"The file's tokenizer is of kind {shown(kind)} (tokenizer.ggml.model), which this version "
            f"cannot run: it knows {', '.join(map(repr, _KINDS))} (byte-level BPE, SentencePiece BPE and "
            "unigram, WordPiece, RWKV's)."
        )
    return make(metadata)


# --- reading untrusted metadata


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TokenizerError(
            f"The file's {key} is missing or not a list of strings: fetch or convert it again."
        )
    return values


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool | int | np.bool_ | np.integer):
        raise TokenizerError(
            f"The file's {key} must be true or false, not {shown(value)}: fetch or convert it again."
        )
    return bool(value)


def _numbers(metadata: Mapping[str, Any], key: str, kinds: str) -> np.ndarray:
    """Return a list of numbers with a dtype of one of `kinds`; empty if the file has none."""
    values = metadata.get(key, ())
    array = None
    if isinstance(values, np.ndarray | list | tuple):
        with contextlib.suppress(ValueError, OverflowError):  # lists of lists of several lengths
            array = np.asarray(values) if len(values) else np.empty(0, np.float32)
    if array is None or array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        raise TokenizerError(f"The file's {key} is not a list of numbers: fetch or convert it again.")
    return array


def _longest(pieces: Iterable[str]) -> int:
    """Return the bytes of the longest piece. Raises ValueError for pieces that are not text."""
    return max(map(len, map(str.encode, pieces)), default=0)


def _special_id(metadata: Mapping[str, Any], name: str, n_vocab: int, default: int | None) -> int | None:
    """Return the id under tokenizer.ggml.<name>; an id outside the vocabulary counts as absent."""
    id = metadata.get(f"tokenizer.ggml.{name}", default)
    return int(id) if isinstance(id, (int, np.integer)) and 0 <= id < n_vocab else None


def _ids(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return an id from the file, which may be outside the vocabulary; None if it is absent."""
    id = metadata.get(f"tokenizer.ggml.{name}")
    return int(id) if isinstance(id, int | np.integer) else None


def _types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> np.ndarray:
    """Return each token's type, uint8 [n_vocab]. Without types in the file all but byte pieces are normal."""
    if metadata.get("tokenizer.ggml.token_type") is None:
        return np.array(
            [_BYTE if _BYTE_PIECE.fullmatch(piece) else _NORMAL for piece in tokens], dtype=np.uint8
        )
    types = _numbers(metadata, "tokenizer.ggml.token_type", "iu")
    if len(types) < len(tokens):
        raise TokenizerError(
            f"The file's tokenizer.ggml.token_type does not give a type for each of the {len(tokens)} "
            "tokens: fetch or convert it again."
        )
    types = types[: len(tokens)]
    types = np.where((types >= _NORMAL) & (types <= _BYTE), types, _NORMAL).astype(np.uint8)
    for id in np.flatnonzero(types == _BYTE).tolist():
        if not _BYTE_PIECE.fullmatch(tokens[id]):
            types[id] = _NORMAL
    return types


_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")


# --- text and bytes


def _byte_letters() -> dict[str, int]:
    """Return GPT-2's alphabet as letter → byte: printable Latin-1 is itself, others begin at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_letters()


_ESCAPED = re.compile(rb"\\(?:x([0-9a-f]{2})|(.))", re.DOTALL)
_ESCAPES = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def _unescaped(piece: str) -> bytes:
    """Return the bytes of a piece that is spelled like a Python literal."""
    return _ESCAPED.sub(lambda m: bytes([int(m[1], 16)]) if m[1] else _ESCAPES.get(m[2], m[2]), _utf8(piece))


def _utf8(piece: str) -> bytes:
    try:
        return piece.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return piece.encode("utf-8", "replace")


def _without_surrogates(text: str) -> str:
    """Return `text` with surrogate pairs joined. Lone surrogates, which UTF-8 cannot hold, become U+FFFD."""
    if _is_text(text):
        return text
    # With arrays: a codec calls its error handler for each surrogate.
    codes = np.array([text]).view(np.uint32)[: len(text)].copy()
    high, low = codes >> 10 == 0xD800 >> 10, codes >> 10 == 0xDC00 >> 10
    first = np.flatnonzero(high[:-1] & low[1:])
    pairs = 0x10000 + (codes[first] - 0xD800 << 10) + (codes[first + 1] - 0xDC00)
    codes[high | low] = 0xFFFD
    codes[first] = pairs
    return np.delete(codes, first + 1).astype("<u4").tobytes().decode("utf-32-le")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- SentencePiece's model file, written here: the library's own classes for it would need protobuf


def _sentencepiece_pieces(
    tokens: Sequence[str], scores: np.ndarray, types: np.ndarray, *, unigram: bool
) -> bytes:
    """Serialise a sentencepiece.ModelProto (sentencepiece_model.proto) of a BPE or unigram model.

    Its normalizer_spec is missing (see `_normalizer`).

    The library requires distinct pieces that are not empty, exactly one unknown piece, and all 256 byte
    pieces or none. Other pieces of the file can never come from a text and become control pieces. If the
    unknown piece is missing, one is appended with the id n_vocab.
    """
    byte_fallback = _has_byte_pieces(tokens, types)
    seen = {b""}
    has_unknown = False
    out = []
    for id, (piece, score, kind) in enumerate(zip(tokens, scores.tolist(), types.tolist(), strict=True)):
        text = _utf8(piece)
        if text in seen or not _is_text(piece):
            text, kind = b"[hotset: piece %d]" % id, _CONTROL
        if kind == _UNKNOWN:
            kind = _CONTROL if has_unknown else _UNKNOWN
            has_unknown = True
        elif kind == _BYTE and not byte_fallback:
            kind = _CONTROL
        seen.add(text)
        out.append(_piece_message(text, score, kind))
    if not has_unknown:
        out.append(_piece_message(b"[hotset: unknown]", 0.0, _UNKNOWN))
    trainer_spec = _varint_field(3, 1 if unigram else 2) + _varint_field(35, byte_fallback)
    return b"".join(out) + _bytes_field(2, trainer_spec)


def _normalizer(*, prefix: bool = False, removes_spaces: bool = False) -> bytes:
    """Return the normalizer_spec of a ModelProto: no Unicode normalisation; spaces become U+2581.

    prefix: put a space before a text. removes_spaces: strip spaces, and join several inside the text.
    """
    spec = _bytes_field(1, b"identity") + _varint_field(3, prefix) + _varint_field(4, removes_spaces)
    return _bytes_field(3, spec + _varint_field(5, True))


def _has_byte_pieces(tokens: Sequence[str], types: np.ndarray) -> bool:
    """Return whether every byte has a piece, so that any text can be spelled."""
    return len({tokens[id].upper() for id in np.flatnonzero(types == _BYTE).tolist()}) == 256


def _piece_message(text: bytes, score: float, kind: int) -> bytes:
    return _bytes_field(
        1, _bytes_field(1, text) + struct.pack("<Bf", 2 << 3 | 5, score) + _varint_field(3, kind)
    )


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


@cache
def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
