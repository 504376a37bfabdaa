"""Fill in the middle: a vocabulary's marks for the text before and after a gap.

Keys of the file name the tokens of the marks (tokenizer.ggml.fim_pre_token_id, ...), or their texts do:

    Qwen Coder           <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|>
    StarCoder, Granite   <fim_prefix> prefix <fim_suffix> suffix <fim_middle>
    DeepSeek             <｜fim▁begin｜> prefix <｜fim▁hole｜> suffix <｜fim▁end｜>
    CodeLlama            <PRE> prefix <SUF> suffix <MID>
    GLM                  <|code_prefix|> prefix <|code_suffix|> suffix <|code_middle|>
    Mellum               <fim_suffix> suffix <fim_prefix> prefix <fim_middle>

Other files of the repository come first (arXiv 2409.12186). If the vocabulary has tokens for file names, each
file follows its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hotset.errors import ContextLengthError, InvalidRequestError
from hotset.text.tokenizer import Tokenizer

_KEYS = {
    "prefix": ("fim_pre_token_id", "prefix_token_id"),
    "suffix": ("fim_suf_token_id", "suffix_token_id"),
    "middle": ("fim_mid_token_id", "middle_token_id"),
    "repository": ("fim_rep_token_id",),
    "file": ("fim_sep_token_id",),
}
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
_REPOSITORIES = ("<|repo_name|>", "<|fim_repo|>", "<fim-repo>", "<REPO>", "<reponame>", "<repo_name>")
_FILES = ("<|file_sep|>", "<file_sep>")
_MOST_CHARS = 16  # characters of a text that are tokenized per token of room
_MOST_NAME = 1024  # characters of a file's name
_SNIPPET = "\n\n--- snippet ---\n\n"  # before each file, if the vocabulary has no token for names


class File(NamedTuple):
    """Another file of the repository, or a part of it."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A gap to fill. begun: the given beginning of the answer. files: other files, the nearest last.

    trims: text that does not fit in the context is left out. files requires trims.
    """

    prefix: str
    suffix: str
    begun: str = ""
    files: Sequence[File] = ()
    trims: bool = False


@dataclass(frozen=True, kw_only=True)
class InfillTokens:
    """Token ids of the marks. suffix_first: the suffix comes before the prefix."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None
    suffix_first: bool = False

    @classmethod
    def of(
        cls, vocabulary: Mapping[str, int], n_vocab: int, metadata: Mapping[str, Any]
    ) -> InfillTokens | None:
        """Return the tokens of a model file, or None if it has none.

        vocabulary: token → id. n_vocab: the number of ids (two ids may have the same text).
        """
        ids: dict[str, int] = {}
        for name, keys in _KEYS.items():
            for key in keys:
                id = metadata.get(f"tokenizer.ggml.{key}")
                if type(id) is int and 0 <= id < n_vocab:
                    ids.setdefault(name, id)
        for marks in _MARKS:
            if all(mark in vocabulary for mark in marks):
                for name, mark in zip(("prefix", "suffix", "middle"), marks, strict=True):
                    ids.setdefault(name, vocabulary[mark])
                break
        if not {"prefix", "suffix", "middle"} <= ids.keys():
            return None
        is_mellum = any(
            "mellum" in str(metadata.get(f"general.{key}", "")).lower()[:256]
            for key in ("architecture", "basename", "name")
        )
        files = ("<filename>",) if is_mellum else _FILES
        for name, texts in ("file", files), ("repository", () if is_mellum else _REPOSITORIES):
            for text in texts:
                if text in vocabulary:
                    ids.setdefault(name, vocabulary[text])
        return cls(**ids, suffix_first=is_mellum)

    def encode(self, tokenizer: Tokenizer, gap: Gap, most: int) -> list[int]:
        """Return the ids after which a model writes the text of the gap. Texts hold no special tokens.

        most: tokens. Without `gap.trims` a longer prompt raises ContextLengthError. With it, the farthest
        files are left out first, then the text farthest from the gap. The suffix keeps at least a quarter of
        the room if it is that long.
        """
        prefix_text, suffix_text = gap.prefix, gap.suffix
        if gap.trims:
            n_chars = most * _MOST_CHARS
            prefix_text, suffix_text = prefix_text[-n_chars:], suffix_text[:n_chars]
        start = [] if tokenizer.text_bos_id is None else [tokenizer.text_bos_id]
        for text in (prefix_text, suffix_text, gap.begun):
            if not gap.trims or text is gap.begun:
                _check_length(tokenizer.fewest_tokens(text), most)
        prefix = tokenizer.encode(prefix_text, add_special=False)
        suffix = tokenizer.encode_inside(suffix_text)
        begun = tokenizer.encode_inside(gap.begun)
        context: list[int] = []
        if gap.trims:
            _check_length(n_needed := len(start) + 3 + len(begun), most)
            room = most - n_needed
            n_suffix = min(len(suffix), max(room // 4, room - len(prefix)))
            n_prefix = min(len(prefix), room - n_suffix)
            suffix, prefix = suffix[:n_suffix], prefix[len(prefix) - n_prefix :]
            context = self._context(tokenizer, gap.files, room - n_prefix - n_suffix)
        before, behind = [self.prefix, *prefix, *begun], [self.suffix, *suffix]
        both = [*behind, *before] if self.suffix_first else [*before, *behind]
        return [*start, *context, *both, self.middle]

    def _context(self, tokenizer: Tokenizer, files: Sequence[File], room: int) -> list[int]:
        """Return the last `room` tokens of the other files and of a name for the file with the gap."""
        if not files:
            return []
        pieces: list[list[int]] = []  # from the last to the first
        n_left = room
        for name, text in [File("filename", ""), *reversed(files)]:
            if n_left <= 0:
                break
            head = tokenizer.encode_inside(_SNIPPET)
            if self.file is not None:
                head = [self.file, *tokenizer.encode_inside(f"{name[:_MOST_NAME]}\n")]
            pieces.append([*head, *tokenizer.encode_inside(text[-n_left * _MOST_CHARS :])])
            n_left -= len(pieces[-1])
        if self.repository is not None and self.file is not None:
            pieces.append([self.repository, *tokenizer.encode_inside("repository\n")])
        ids = [id for piece in reversed(pieces) for id in piece]
        return ids[max(len(ids) - room, 0) :]


def _check_length(n_tokens: int, most: int) -> None:
    if n_tokens > most:
        raise ContextLengthError(
            f"the text around the gap has {n_tokens} tokens or more, which do not fit in the context of "
            f"{most}; shorten it or load the model with a larger n_ctx",
            n_tokens=n_tokens,
            n_ctx=most,
        )


def encode_gap(tokenizer: Tokenizer, metadata: Mapping[str, Any], gap: Gap, most: int) -> list[int]:
    """Call `InfillTokens.encode` for a model file. Raises InvalidRequestError if it has no such tokens."""
    marks = InfillTokens.of(tokenizer.vocabulary, tokenizer.n_vocab, metadata)
    if marks is None:
        raise InvalidRequestError(
            "this model has no tokens for the text after a gap, so it cannot fill in the middle; leave the "
            "suffix out, or use a model that was trained for it, such as Qwen Coder or StarCoder"
        )
    return marks.encode(tokenizer, gap, most)
