"""Answers that follow a grammar: JSON of a schema, a regular expression, or rules in GBNF or Lark.

llguidance (extra `serve`) decides which tokens may come next. This module gives it the vocabulary, and guards
against untrusted grammars. Each grammar is first compiled in a process of its own (grammar_child.py): inside
the library a short one can take minutes, or overflow the stack and end the process.

    grammars = Grammars(tokenizer)                       # once per model: half a second for 150,000 tokens
    constraint = grammars.constraint("json_schema", '{"type": "object"}')    # one per answer
    engine.prepare(tokens, params, constraint=constraint, ...)
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.errors import HotsetError, InvalidRequestError, install_command
from hotset.escaping import clause
from hotset.text import grammar_child
from hotset.text.child import Cause, Child, ChildError, ChildLimits, encoded
from hotset.text.mask import MaskThread, TokenMask
from hotset.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_TEXT_CHARS = 1 << 18
"""The longest grammar or schema that is accepted."""
LIMITS = ChildLimits(seconds=3.0, longest=20.0, n_bytes=1 << 30)
"""Limits of compiling a grammar and matching some bytes. A usual grammar takes milliseconds."""
_MAX_KEPT = 32  # compiled grammars
_SLOW_SECONDS = 0.005  # for a mask: most take less than a tenth of a millisecond

_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}
_MAX_REASON_CHARS = 1000
_MAX_IGNORED = 20  # parts of a schema that the log names

# A token in GBNF, <text> or !<text>, and the places in which one does not count: strings, classes, comments.
_GBNF_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\n]*|<(?!\[)([^>\n]*)>', re.DOTALL)
# An error of the regex library: the expression, a line that points at the fault, and the reason.
_REGEX_FAULT = re.compile(r"regex parse error:\n(?P<shown>.*?)\n[ ^]+\nerror: (?P<reason>[^\n]*)", re.DOTALL)

log = logging.getLogger("hotset.grammar")


class Grammars:
    """The grammars of one model's answers. Several threads may use it.

    Raises HotsetError on first use if llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._library: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._threads = MaskThread(), MaskThread()
        # Matchers before their first token; with each, whether finding its first mask is slow.
        self._kept: OrderedDict[tuple[str, str, str | None], tuple[LLMatcher, bool]] = OrderedDict()

    @property
    def library(self) -> LLTokenizer:
        """Return llguidance's object for the vocabulary; built on first use."""
        with self._lock:
            if self._library is None:
                self._library = _vocabulary(self.tokenizer)
            return self._library

    def prepare(self) -> None:
        """Build `library` now, if llguidance is installed.

        That holds the interpreter's lock for 0.1 s or more. No answer makes progress during that time.
        """
        if find_spec("llguidance") is not None:
            _ = self.library

    def constraint(
        self, kind: str, text: str, around: str | None = None, begun: str = ""
    ) -> GrammarConstraint:
        """Return the constraint of an answer, which applies from its first token on.

        kind: "json_schema", "regex" (the whole answer matches), or "grammar" (GBNF, which has a rule
        `root ::=`, or llguidance's Lark, which has a rule `start:`). around: Lark of the whole output, in
        which `@answer` is this grammar (output_grammar.py). begun: the beginning of the constrained text
        that the prompt already contains.
        Raises InvalidRequestError for a text that is invalid, unsupported or too expensive, and for a
        beginning that the grammar does not allow.
        """
        key = (kind, text, around)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        if kept is None:
            matcher = self._compiled(kind, text, around)
            first = GrammarConstraint(matcher.deep_copy(), self.tokenizer.n_vocab, self._threads)
            first.mask()  # rejects a slow grammar here, and not in the middle of a stream
            kept = matcher, first.is_slow
            with self._lock:
                self._kept[key] = kept
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        matcher, is_slow = kept
        copy = matcher.deep_copy()
        tokens = self.library.tokenize_bytes(begun.encode("utf-8", "replace"))
        if copy.try_consume_tokens(tokens) < len(tokens):
            raise InvalidRequestError(
                f"the last message, which the answer continues, does not begin as the {_NAMES[kind]} of the "
                "answer requires; change the message, or end with a message of the user"
            )
        return GrammarConstraint(copy, self.tokenizer.n_vocab, self._threads, is_slow=is_slow)

    @cached_property
    def _marks(self) -> list[str]:
        tokenizer = self.tokenizer
        return [piece for id, piece in enumerate(tokenizer.tokens) if piece and is_marker(tokenizer, id)]

    def _compiled(self, kind: str, text: str, around: str | None) -> LLMatcher:
        _check_installed()
        if kind == "grammar":
            text = _with_token_ids(text, self.tokenizer)
        # Only Lark may name marks. In other kinds the same characters are ordinary text.
        marks = self._marks if kind == "grammar" or around else []
        grammar = _tried({"kind": kind, "text": text, "around": around, "marks": marks})
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self.library, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        return matcher


class GrammarConstraint:
    """A grammar and the position of an answer in it; the engine's Constraint for one answer.

    threads: find masks while the model computes. The second serves slow grammars, so that others need not
    wait for them. While one works, only it may use the matcher. is_slow: finding a mask took long.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        n_vocab: int,
        threads: tuple[MaskThread, MaskThread],
        *,
        is_slow: bool = False,
    ) -> None:
        self.is_slow = is_slow
        self._matcher = matcher
        self._n_vocab = n_vocab
        self._words = np.zeros((n_vocab + 31) // 32, np.int32)
        self._threads = threads
        self._free = threading.Lock()  # held while another thread uses the matcher
        self._mask: TokenMask | None = None  # the mask of the current position, once found
        self._error: Exception | None = None  # raised while another thread looked for it

    @property
    def finished(self) -> bool:
        """Return whether the answer is complete and nothing can follow."""
        with self._free:
            return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def can_end(self) -> bool:
        """Return whether the answer would be complete here."""
        with self._free:
            return bool(self._matcher.is_accepting())

    def look_ahead(self) -> None:
        """Start finding the mask in another thread."""
        if self._mask is None and self._error is None and self._free.acquire(blocking=False):
            self._threads[self.is_slow].put(self._find_ahead)

    def is_busy(self, seconds: float) -> bool:
        """Wait up to `seconds`, and return whether another thread still looks for the mask."""
        if not self._free.acquire(timeout=seconds):
            return True
        self._free.release()
        return False

    def mask(self) -> TokenMask:
        """Return the tokens that may come next.

        The mask is valid until a token is accepted. Raises InvalidRequestError if the grammar takes too much.
        """
        with self._free:
            if self._error is not None:
                raise self._error
            if self._mask is None:
                self._mask = self._find()
            return self._mask

    def accept(self, token: int) -> None:
        """Advance the grammar by a token that the mask allowed."""
        with self._free:
            self._mask = None
            if not self._matcher.consume_token(token):
                raise InvalidRequestError(
                    f"the grammar of the answer does not allow token {token} here "
                    f"({_reason(self._matcher.get_error())})"
                )

    def _find_ahead(self) -> None:
        try:
            self._mask = self._find()
        except Exception as error:
            self._error = error
        finally:
            self._free.release()

    def _find(self) -> TokenMask:
        begun = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():  # the mask then allows the end, but the answer is not complete
            raise InvalidRequestError(
                f"the grammar of the answer cannot go on here ({_reason(self._matcher.get_error())}); "
                "simplify it"
            )
        # The computing time of this thread: the load of the machine must not decide.
        seconds = time.thread_time() - begun
        self.is_slow |= seconds > _SLOW_SECONDS
        if seconds > grammar_child.MAX_MASK_SECONDS:
            raise InvalidRequestError(
                "the grammar of the answer is too slow: it takes more than "
                f"{grammar_child.MAX_MASK_SECONDS:g} s to find what may come next; simplify it"
            )
        return TokenMask.of(self._words.view(np.uint8), self._n_vocab)


# --- a grammar, tried


def _check_installed() -> None:
    if find_spec("llguidance") is None:
        raise HotsetError(
            "answers that follow a JSON schema or a grammar need llguidance, which is not installed: "
            f"{install_command('serve')}"
        )


def _tried(request: dict[str, Any]) -> str:
    """Compile a grammar in a child process within limits, and return llguidance's form of it."""
    kind, text = request["kind"], request["text"]
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequestError(
            f"the {_NAMES[kind]} has {len(text)} characters, and at most {MAX_TEXT_CHARS} are accepted"
        )
    if "\0" in text:
        raise InvalidRequestError(f"the {_NAMES[kind]} has a character 0 in it; leave it out")
    try:
        # A process per grammar: it delays no other, and no grammar shares memory with another's text.
        with Child("hotset.text.grammar_child", ("llguidance",), LIMITS) as child:
            answer = child.ask(encoded(request), grammar=str, ignored=list)
    except ChildError as error:
        if error.cause in (Cause.TIME, Cause.MEMORY, Cause.DIED):
            raise _too_much(kind) from None
        raise HotsetError(
            f"the process that tries a grammar cannot be used: {error.cause.value} ({error.detail})"
        ) from None
    if "error" in answer:
        raise _refused(kind, answer["error"], answer.get("name"))
    if answer["ignored"]:
        parts = clause("; ".join(answer["ignored"][:_MAX_IGNORED]), _MAX_REASON_CHARS)
        log.warning("the grammar leaves these parts of a JSON schema to the model: %s", parts)
    return str(answer["grammar"])


def _with_token_ids(text: str, tokenizer: Tokenizer) -> str:
    """Replace the texts of tokens in GBNF, <text>, by their ids, <[id]>."""
    if not grammar_child.is_gbnf(text):
        return text

    def numbered(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        id = tokenizer.vocabulary.get(match[0])
        ids = tokenizer.encode_inside(match[0]) if id is None else [id]
        if len(ids) != 1:
            raise InvalidRequestError(
                f"the grammar cannot be used: {clause(match[0])} is not one token of this model's vocabulary"
            )
        return f"<[{ids[0]}]>"

    return _GBNF_TOKEN.sub(numbered, text)


def _refused(kind: str, reason: str, name: str | None = None) -> InvalidRequestError:
    which = f"the schema of {clause(name)}" if name else f"the {_NAMES[kind]}"
    return InvalidRequestError(f"{which} cannot be used: {_reason(reason)}")


def _too_much(kind: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the {_NAMES[kind]} does not compile within {LIMITS.seconds:g} s of computing and "
        f"{LIMITS.n_bytes >> 20} MiB, or is nested too deep; simplify it"
    )


def _reason(said: str) -> str:
    """Return llguidance's message in one line, without its excerpt of the grammar and the parser's state."""
    fault = _REGEX_FAULT.search(said)
    if fault is not None:
        said = f"{clause(fault['shown'])} is not a regular expression that grammars know: {fault['reason']}"
    kept: list[str] = []
    for line in said.strip().splitlines():
        if line.startswith("<") or re.match(r" +\d* \|", line):
            break
        kept.append(line)
    return clause(" ".join(kept) or "no reason given", _MAX_REASON_CHARS)


# --- the vocabulary for llguidance


def is_marker(tokenizer: Tokenizer, id: int) -> bool:
    """Return whether a token is a marker: a grammar can name it only by its id (`<[id]>` in Lark).

    Markers are control tokens, and tokens like <|channel|> that files declare visible because a program must
    see them. Inside the text of an answer they would end it, or be read as something else.
    """
    piece = tokenizer.tokens[id]
    return tokenizer.is_special(id) or (
        tokenizer.is_user_defined(id) and piece.startswith("<|") and piece.endswith("|>")
    )


def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    _check_installed()
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapper = TokenizerWrapper(_Bytes(tokenizer))
    stops = sorted(tokenizer.stop_ids) or None
    return LLTokenizer(wrapper, eos_token=stops)


class _Bytes:
    """A vocabulary with the interface that llguidance expects.

    llguidance calls it to tokenize text that a grammar forces, as the model would. It must not raise: an
    exception in the call ends the process.
    """

    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = min(tokenizer.stop_ids, default=None)
        self.tokens = [self._bytes(id) for id in range(tokenizer.n_vocab)]
        self._id = {piece: id for id, piece in enumerate(self.tokens)}
        self._longest = max(map(len, self.tokens))

    def _bytes(self, id: int) -> bytes:
        """Return a token's bytes; only markers begin with the byte FF, by which llguidance knows them."""
        piece = self._tokenizer.token_bytes(id)
        if is_marker(self._tokenizer, id):
            return b"\xff" + piece
        return b"" if piece.startswith(b"\xff") else piece  # llguidance never allows an empty token

    def __call__(self, text: str) -> list[int]:
        wanted = text.encode("utf-8", "replace")
        try:
            ids = self._tokenizer.encode_inside(text)
        except Exception:
            ids = []
        if b"".join(self.tokens[id] for id in ids) == wanted:
            return ids
        return self._longest_first(wanted)  # the text spells a marker, or has bytes the vocabulary lacks

    def _longest_first(self, text: bytes) -> list[int]:
        """Split into the longest tokens, from left to right. Stop at bytes that begin no token."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            longest = min(self._longest, len(text) - at)
            pieces = (text[at : at + n] for n in range(longest, 0, -1))
            found = next((id for piece in pieces if (id := self._id.get(piece)) is not None), None)
            if found is None:
                break
            ids.append(found)
            at += len(self.tokens[found])
        return ids
