"""From a row of logits to a token.

The order is llama.cpp's: what a constraint allows, logit bias, penalties, DRY, top-n-sigma, top-k, typical,
top-p, min-p, XTC, temperature, draw. With mirostat it is bias, penalties, DRY, temperature, mirostat. A
vocabulary may have 150,000 entries and a step 3 ms, so the few candidates are selected first and everything
else is done on them, in float64. Where the backend has found the largest logits of groups, `Draw`
(csrc/draw.h) does in one call what is written here, and reads only the groups that can matter. Each sampler
draws from its own generator, exactly one number per token (XTC from a second one): what it returns never
depends on the sequences beside it.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import secrets
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

import numpy as np

from hotset import _core
from hotset.backends.base import LOGIT_GROUP, N_CANDIDATES
from hotset.engine.filters import Mirostat, drawn, dynamic_temperature, top_k, top_n_sigma, typical, xtc
from hotset.engine.repetitions import Repetitions
from hotset.errors import HotsetError, InvalidRequestError
from hotset.parameters import below_infinity, flag, real_number, shown, text, whole_number
from hotset.text.mask import TokenMask

_F = TypeVar("_F", bound=Callable[..., Any])

_LARGEST = float(np.finfo(np.float32).max)  # what becomes of a logit beyond it
_SMALLEST = float(np.finfo(np.float32).tiny)
# What a byte of a constraint's mask adds to eight logits: zeros, and -inf for what is not allowed. To look
# rows up and add them takes a fraction of the time that a choice per token does.
_ALLOWING = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(0),
    np.float32(-math.inf),
)


class Constraint(Protocol):
    """What an answer must follow, token by token. It belongs to one sequence."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and nothing can follow: it ends without a token that says so."""

    def look_ahead(self) -> None:
        """Announces that the mask is wanted soon: the step whose logits it is for begins."""

    @property
    def is_slow(self) -> bool:
        """Whether finding the mask may take longer than a step."""

    def is_busy(self, seconds: float) -> bool:
        """Whether the mask that is looked for is still not there after so many seconds."""

    def mask(self) -> TokenMask:
        """The tokens that may come next. Where the answer may end here, tokens that end it are among them."""

    def accept(self, token: int) -> None:
        """Takes the next token of the answer, one that `mask` allowed."""


class Forcing(Protocol):
    """Tokens that an answer must have whatever the logits say, such as the end of its reasoning.

    It belongs to one sequence. A constraint is stronger: a token that it does not allow is not forced.
    """

    def next_token(self) -> int | None:
        """Return the token that must come next, or None if the sampler chooses it."""

    def accept(self, token: int) -> None:
        """Take in the next token of the answer."""

    def clone(self) -> Forcing:
        """Return a copy that goes its own way."""


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities (no bias, penalty or temperature).

    token, text: the chosen token, its id and its text. top: the most likely (token, logprob), best first.
    top_texts: their texts. Texts are empty in the engine, which knows ids only; generation.py adds them.
    Part of a character is U+FFFD.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    text: str = ""
    top_texts: tuple[str, ...] = ()


MAX_STOPS, MAX_STOP_CHARS = 64, 1024
"""How many strings may end an answer, and how long each may be: all are looked for at every token."""
MAX_BUDGET_MESSAGE_CHARS = 4096
"""The longest text that may be forced at the end of reasoning."""
MAX_BREAKER_BYTES = 40
"""How long a string may be that no repetition goes beyond; as many as of stops."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. The defaults are llama.cpp's.

    temperature: 0 takes the most likely token, after bias, penalties and DRY alone. Applied last, as
        llama.cpp does.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the fewest tokens whose probabilities reach top_p; 1 keeps all.
    min_p: keep tokens at least min_p times as likely as the most likely; 0 keeps all.
    repetition_penalty: divides positive and multiplies negative logits of recent tokens; 1 is off.
    frequency_penalty, presence_penalty: subtracted from the logit of a recent token, per occurrence and once.
    penalty_last_n: how many tokens, of prompt and answer, are recent; -1 means all, 0 none.
    top_n_sigma: keep tokens whose logit is at most so many standard deviations of all logits below the
        largest; 0 or less keeps all.
    typical_p: keep the tokens whose surprise is nearest to the expected one, the fewest that together are
        more likely than typical_p; 1 keeps all.
    xtc_probability, xtc_threshold: with this probability, of the tokens that are at least as likely as the
        threshold only the least likely is kept; a probability of 0 is off.
    dynatemp_range, dynatemp_exponent: the temperature is between temperature - range (0 at least) and
        temperature + range, by the entropy of the tokens that are left, over the largest possible, to the
        power of the exponent; a range of 0 is off.
    mirostat: 1 or 2 draws by that version of mirostat, in place of top_n_sigma, top_k, typical_p, top_p,
        min_p, XTC and the dynamic temperature, which then have no effect; 0 is off.
    mirostat_tau, mirostat_eta: the surprise in bits that mirostat keeps to (100 at most), and how fast.
    dry_multiplier: a token that would go on with a repetition of n tokens, n at least dry_allowed_length,
        loses dry_multiplier * dry_base ** (n - dry_allowed_length) of its logit; 0 is off.
    dry_base, dry_allowed_length: see dry_multiplier.
    dry_penalty_last_n: how many tokens, of prompt and answer, DRY looks at; -1 means all, 0 none.
    dry_sequence_breakers: strings that no repetition goes beyond; at most 64 of 40 bytes.
    logit_bias: token id → number added to its logit; -inf forbids the token.
    seed: any integer from 0 to 2**64 - 1; None picks one (`Sampler.seed` is that one).
    logprobs: None for none, n for those of the chosen token and of the n most likely.
    max_tokens: None runs to the end of the context.
    stop: strings that end the answer and are not part of it; at most 64 of 1,024 characters.
    stop_token_ids: further tokens that end the answer, and have no text in it; at most 64.
    ignore_eos: forbids the model's own tokens that would end the answer.
    reasoning_budget: the most tokens that the model thinks before it answers; then the end of its reasoning
        is forced. 0 turns thinking off; -1 and None set no limit.
    reasoning_budget_message: a text that is forced before that end; at most 4,096 characters.
    json_schema, json_object, regex, grammar: what the answer must follow, at most one of them: a JSON schema
        (an object, or its text), any JSON object, a regular expression that the whole answer matches, or
        rules in GBNF or Lark (text/constraint.py, which makes a Constraint of it).
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    top_n_sigma: float = -1.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    reasoning_budget: int | None = None
    reasoning_budget_message: str = ""
    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "temperature": real_number("temperature", self.temperature, 0),
            "top_k": whole_number("top_k", self.top_k, 0),
            "top_p": real_number("top_p", self.top_p, 0, 1),
            "min_p": real_number("min_p", self.min_p, 0, 1),
            "repetition_penalty": real_number("repetition_penalty", self.repetition_penalty, 0),
            "frequency_penalty": real_number("frequency_penalty", self.frequency_penalty),
            "presence_penalty": real_number("presence_penalty", self.presence_penalty),
            "penalty_last_n": whole_number("penalty_last_n", self.penalty_last_n, -1),
            "top_n_sigma": real_number("top_n_sigma", self.top_n_sigma),
            "typical_p": real_number("typical_p", self.typical_p, 0, 1),
            "xtc_probability": real_number("xtc_probability", self.xtc_probability, 0, 1),
            "xtc_threshold": real_number("xtc_threshold", self.xtc_threshold, 0, 1),
            "dynatemp_range": real_number("dynatemp_range", self.dynatemp_range, 0),
            "dynatemp_exponent": real_number("dynatemp_exponent", self.dynatemp_exponent, 0),
            "mirostat": whole_number("mirostat", self.mirostat, 0, 2),
            "mirostat_tau": real_number("mirostat_tau", self.mirostat_tau, 0, 100),
            "mirostat_eta": real_number("mirostat_eta", self.mirostat_eta, 0, 1),
            "dry_multiplier": real_number("dry_multiplier", self.dry_multiplier, 0),
            "dry_base": real_number("dry_base", self.dry_base, 1),
            "dry_allowed_length": whole_number("dry_allowed_length", self.dry_allowed_length, 0),
            "dry_penalty_last_n": whole_number("dry_penalty_last_n", self.dry_penalty_last_n, -1),
            "dry_sequence_breakers": _breakers(self.dry_sequence_breakers),
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "reasoning_budget_message": _budget_message(self.reasoning_budget_message),
            "stop": _stops(self.stop),
            "stop_token_ids": _stop_tokens(self.stop_token_ids),
            "logit_bias": _biases(self.logit_bias),
            "json_schema": _schema(self.json_schema),
            "json_object": flag("json_object", self.json_object),
            "regex": None if self.regex is None else text("regex", self.regex),
            "grammar": None if self.grammar is None else text("grammar", self.grammar),
        }
        if checked["repetition_penalty"] == 0:
            raise InvalidRequestError("repetition_penalty must be greater than 0 (1 turns it off)")
        if self.seed is not None:
            checked["seed"] = whole_number("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            checked["logprobs"] = whole_number("logprobs", self.logprobs, 0)
        if self.max_tokens is not None:
            checked["max_tokens"] = whole_number("max_tokens", self.max_tokens, 1)
        if self.reasoning_budget is not None:
            checked["reasoning_budget"] = whole_number("reasoning_budget", self.reasoning_budget, -1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            raise InvalidRequestError(f"{' and '.join(given)} cannot be asked for together; give one of them")

    @property
    def form(self) -> tuple[str, str] | None:
        """What the answer must follow: "json_schema", "regex" or "grammar", and its text."""
        if self.json_object:
            return "json_schema", '{"type": "object"}'
        for name in ("json_schema", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None:
                return name, value
        return None

    @property
    def penalizes(self) -> bool:
        """Whether any penalty can change a logit."""
        return self.penalty_last_n != 0 and (
            self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        )

    @property
    def is_dry(self) -> bool:
        """Whether DRY can change a logit."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def breakers(self) -> tuple[str, ...]:
        """The strings that DRY looks for."""
        return self.dry_sequence_breakers if self.is_dry else ()

    @property
    def orders(self) -> bool:
        """Whether a filter beside top-k, top-p and min-p may leave tokens out, or the temperature change."""
        return (
            self.top_n_sigma > 0 or self.typical_p < 1 or self.xtc_probability > 0 or self.dynatemp_range > 0
        )


class Sampling(TypedDict, total=False):
    """The fields of SamplingParams as the keywords of `generate`, `stream` and `chat`: for editors and type
    checkers."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    top_n_sigma: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    logit_bias: Mapping[int, float]
    seed: int | None
    logprobs: int | None
    max_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    reasoning_budget: int | None
    reasoning_budget_message: str
    json_schema: Mapping[str, Any] | str | None
    json_object: bool
    regex: str | None
    grammar: str | None


def takes_sampling(function: _F) -> _F:
    """Add the fields of SamplingParams to the signature of a function with such keywords."""
    own = inspect.signature(function)
    *others, rest = own.parameters.values()
    assert rest.kind is rest.VAR_KEYWORD, "the last parameter is **params"
    fields = [
        one.replace(kind=one.KEYWORD_ONLY) for one in inspect.signature(SamplingParams).parameters.values()
    ]
    function.__signature__ = own.replace(parameters=[*others, *fields])  # type: ignore[attr-defined]
    return function


_FORMS = ("json_schema", "json_object", "regex", "grammar")


def _schema(given: Any) -> str | None:
    """A JSON schema as text."""
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"json_schema must be a JSON schema, an object, not {shown(given)}")
    try:
        return json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema must be plain data, as JSON has it ({error})") from None


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (None,)
    if not all(isinstance(text, str) and text for text in stops):
        raise InvalidRequestError("stop must be a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS or max(map(len, stops), default=0) > MAX_STOP_CHARS:
        raise InvalidRequestError(
            f"stop has {len(stops)} strings, the longest of {max(map(len, stops))} characters; at most "
            f"{MAX_STOPS} of {MAX_STOP_CHARS} are taken"
        )
    return stops


def _stop_tokens(given: Any) -> tuple[int, ...]:
    tokens = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
    if len(tokens) > MAX_STOPS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(tokens)} tokens; at most {MAX_STOPS} are accepted"
        )
    return tuple(whole_number("a token in stop_token_ids", token, 0) for token in tokens)


def _budget_message(given: Any) -> str:
    message = text("reasoning_budget_message", given)
    if len(message) > MAX_BUDGET_MESSAGE_CHARS:
        raise InvalidRequestError(
            f"reasoning_budget_message must have at most {MAX_BUDGET_MESSAGE_CHARS} characters, "
            f"not {len(message)}"
        )
    return message


def _breakers(given: Any) -> tuple[str, ...]:
    breakers = tuple(given) if isinstance(given, list | tuple) else (None,)
    if not all(isinstance(one, str) and one for one in breakers):
        raise InvalidRequestError("dry_sequence_breakers must be a list of strings, none of them empty")
    longest = max((len(one.encode(errors="replace")) for one in breakers), default=0)
    if len(breakers) > MAX_STOPS or longest > MAX_BREAKER_BYTES:
        raise InvalidRequestError(
            f"dry_sequence_breakers has {len(breakers)} strings, the longest of {longest} bytes; at most "
            f"{MAX_STOPS} of {MAX_BREAKER_BYTES} are taken"
        )
    return breakers


def _biases(given: Any) -> dict[int, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f"logit_bias must give numbers by token id, such as {{15043: -1}}, not {shown(given)}"
        )
    biases: dict[int, float] = {}
    for token, value in given.items():
        if isinstance(token, str) and token.isdecimal() and len(token) < 20:  # JSON has no other keys
            token = int(token)
        token = whole_number("the token id in logit_bias", token, 0)
        biases[token] = below_infinity(f"logit_bias of token {shown(token)}", value)
    return biases


class Sampler:
    """Chooses the tokens of one sequence.

    tokens: the prompt, which the penalties count. forbidden: token ids that are never chosen. constraint: of
    the tokens that are. breakers: how tokens spell `dry_sequence_breakers` (Tokenizer.sequences_with).
    forcing, an attribute: tokens that come whatever the logits say.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        tokens: Iterable[int] = (),
        forbidden: Iterable[int] = (),
        constraint: Constraint | None = None,
        breakers: Iterable[Sequence[int]] = (),
    ) -> None:
        tokens = list(tokens)
        self.params = params
        self.constraint = constraint
        self.forcing: Forcing | None = None
        self._n_vocab = n_vocab
        self.seed = secrets.randbits(64) if params.seed is None else int(params.seed)
        bias = dict(params.logit_bias) | dict.fromkeys(forbidden, -math.inf)
        for token in bias:
            if token >= n_vocab:
                raise InvalidRequestError(
                    f"token {shown(token)} in logit_bias is not in the vocabulary of {n_vocab} tokens"
                )
        self._generator = np.random.Generator(np.random.Philox(self.seed))
        # Of XTC's chances: what else is drawn is the same with and without it.
        self._xtc_generator = np.random.Generator(np.random.Philox([self.seed, 1]))
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        # Infinite are those alone that forbid: what is merely huge must not become so.
        self._bias = np.fromiter(
            (
                value if value == -math.inf else max(-_LARGEST, min(value, _LARGEST))
                for value in bias.values()
            ),
            np.float32,
            len(bias),
        )
        self._forbids = -math.inf in bias.values()
        last_n = min(params.penalty_last_n, sys.maxsize)  # (a deque knows no more)
        self._recent: deque[int] = deque(maxlen=last_n if last_n >= 0 else None)
        self._counts: Counter[int] = Counter()
        self._repetitions = (
            Repetitions(tokens, params.dry_penalty_last_n, breakers) if params.is_dry else None
        )
        self._adjusts = bool(bias) or params.penalizes or params.is_dry
        self._n_needed = self._needed(bias)
        has_copy = self._adjusts or constraint is not None
        self._scratch = np.empty(n_vocab if has_copy else 0, np.float32)
        self._draw = self._new_draw()
        self._mirostat: Mirostat | None = None
        if params.mirostat:
            self._mirostat = Mirostat(params.mirostat, params.mirostat_tau, params.mirostat_eta, n_vocab)
        for token in tokens:
            self._count(token)

    def _new_draw(self) -> _core.Draw | None:
        """None where the largest of groups would not decide: what a constraint allows is of any group, and
        without top-k the sum of all logits is needed; or where it does not know what is asked for."""
        params, n_vocab = self.params, self._n_vocab
        by_k = 0 < params.top_k < n_vocab and not params.orders and not params.mirostat
        if not (by_k or params.temperature == 0) or params.is_dry:
            return None
        if self.constraint is not None or n_vocab % LOGIT_GROUP:
            return None
        penalties = (
            max(_SMALLEST, min(params.repetition_penalty, _LARGEST)),
            float(_float32(params.frequency_penalty)),
            float(_float32(params.presence_penalty)),
        )
        return _core.Draw(
            n_vocab, params.temperature, min(params.top_k, n_vocab), params.top_p, params.min_p, penalties,
            list(zip(self._bias_ids.tolist(), self._bias.tolist(), strict=True)),
        )  # fmt: skip

    def _needed(self, bias: Mapping[int, float]) -> int | None:
        """How many of the largest logits decide the next token, if no penalty changes them; None: all may.

        Bias and penalties that only lower logits bring no token among the largest but those that were next.
        Whatever looks at all logits needs them: a constraint, logprobs, DRY, mirostat, top-n-sigma, and top-p
        or min-p without top-k.
        """
        params = self.params
        lowers = (
            all(value <= 0 for value in bias.values())
            and params.repetition_penalty >= 1
            and min(params.frequency_penalty, params.presence_penalty) >= 0
        )
        is_greedy = params.temperature == 0
        if not lowers or params.is_dry or self.constraint is not None or params.logprobs is not None:
            return None
        if not is_greedy and (not params.top_k or params.mirostat or params.top_n_sigma > 0):
            return None
        return len(bias) + (1 if is_greedy else params.top_k)

    def takes_candidates(self, n_rows: int) -> bool:
        """Whether the N_CANDIDATES largest logits of a row decide the next token, the same as all logits do,
        in each of so many rows one after the other."""
        n_penalised = len(self._counts) + n_rows - 1 if self.params.penalizes else 0
        return self._n_needed is not None and self._n_needed + n_penalised <= N_CANDIDATES

    def clone(self) -> Sampler:
        """A sampler that will draw as this one, with the same random numbers and penalties, and leaves it as
        it is: for drafts. It knows no constraint."""
        other = copy.copy(self)
        copied = ("_generator", "_xtc_generator", "_recent", "_counts", "_repetitions", "_mirostat")
        vars(other).update({name: copy.deepcopy(getattr(self, name)) for name in copied})
        other.constraint = None
        other.forcing = None if self.forcing is None else self.forcing.clone()
        return other

    def accept(self, token: int) -> None:
        """Takes the next token of the answer: the constraint goes on by it, and the penalties count it."""
        if self.constraint is not None:
            self.constraint.accept(token)
        if self.forcing is not None:
            self.forcing.accept(token)
        self._count(token)
        if self._repetitions is not None:
            self._repetitions.push(token)

    def _count(self, token: int) -> None:
        if not self.params.penalizes:
            return
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._recent.append(token)
        self._counts[token] += 1

    def look_ahead(self) -> None:
        """Announces that `sample` will be called soon, with the logits of a step that begins."""
        if self.constraint is not None:
            self.constraint.look_ahead()

    def sample(
        self, logits: np.ndarray, largest: np.ndarray | None = None, candidates: np.ndarray | None = None
    ) -> int:
        """The next token, from float32 logits [n_vocab], which are left as they are.

        largest: as StepResult.largest, of this row; the token is the same without. candidates: as
        StepResult.candidates, of this row, where `takes_candidates` said so.
        """
        params = self.params
        u = self._generator.random() if params.temperature else 0.0
        chance = self._xtc_generator.random() if params.temperature and params.xtc_probability else 1.0
        if (forced := self._forced()) is not None:
            return forced
        if largest is not None and self._draw is not None:
            token = self._draw.token(logits, largest, self._counts, u)
            if token >= 0:
                return token
        allowed = candidates  # the ids of the logits that are left; None: all of them are
        # What overflows here is what a huge penalty or a tiny temperature means: certainty, or none. What is
        # no number is reported.
        with np.errstate(over="ignore", invalid="ignore"):
            logits = self.adjusted(logits, candidates)
            if self.constraint is not None:
                logits, allowed = self._constrained(logits, self.constraint.mask())
            if params.temperature == 0:
                chosen = int(np.argmax(logits))
                self._check_largest(float(logits[chosen]))
            elif self._mirostat is not None:
                self._check_largest(float(logits.max()))
                chosen = self._mirostat.draw(logits, params.temperature, u)
            else:
                ids, relative = self._candidates(logits, is_xtc=chance < params.xtc_probability)
                chosen = int(ids[drawn(relative, self._temperature(relative), u)])
        return chosen if allowed is None else int(allowed[chosen])

    def _forced(self) -> int | None:
        """Return the token that must come next, unless there is none or the constraint forbids it."""
        token = None if self.forcing is None else self.forcing.next_token()
        if token is None or self.constraint is None or self.constraint.mask().allows(token):
            return token
        return None

    def _constrained(self, logits: np.ndarray, mask: TokenMask) -> tuple[np.ndarray, np.ndarray | None]:
        """The logits of what a constraint allows: with -inf for the others, or, where few are left, without
        them and with their ids."""
        if mask.ids is not None:
            if not len(mask.ids):
                self._check_largest(-math.inf)
            return logits[mask.ids], mask.ids
        n = min(logits.size, 8 * len(mask.bits))
        # (`take` copies rows ten times as fast as an index of arrays does)
        np.add(logits[:n], _ALLOWING.take(mask.bits, axis=0).reshape(-1)[:n], out=self._scratch[:n])
        self._scratch[n:] = -math.inf
        return self._scratch, None

    def logprobs(self, logits: np.ndarray, token: int) -> TokenLogprobs:
        """What the model itself thought of `token` and of the most likely ones, from unmodified logits."""
        return token_logprobs(logits, token, self.params.logprobs or 0)

    def adjusted(self, logits: np.ndarray, candidates: np.ndarray | None = None) -> np.ndarray:
        """Logits with bias and penalties, float32 [n_vocab]: in a buffer that the next call renews; the same
        logits where there are neither. candidates: as of `sample`."""
        if not self._adjusts:
            return logits
        params = self.params
        adjusted = self._scratch[: len(logits)]
        np.copyto(adjusted, logits)
        if len(self._bias):
            ids, bias = _among(candidates, self._bias_ids, self._bias)
            is_out = np.isneginf(adjusted[ids]) | np.isneginf(bias)
            biased = _bounded(adjusted[ids] + bias)
            biased[is_out] = -math.inf
            adjusted[ids] = biased
        if self._counts:
            ids, counts = _among(
                candidates,
                np.fromiter(self._counts.keys(), np.int64, len(self._counts)),
                np.fromiter(self._counts.values(), np.float32, len(self._counts)),
            )
            values = adjusted[ids]
            is_out = np.isneginf(values)
            penalty = np.float32(max(_SMALLEST, min(params.repetition_penalty, _LARGEST)))
            values = _bounded(np.where(values > 0, values / penalty, values * penalty))
            values = _bounded(values - _bounded(counts * _float32(params.frequency_penalty)))
            values = _bounded(values - _float32(params.presence_penalty))
            values[is_out] = -math.inf
            adjusted[ids] = values
        if self._repetitions is not None:
            ids, lengths = self._repetitions.continued(params.dry_allowed_length)
            values = adjusted[ids]
            is_out = np.isneginf(values)
            values = _bounded(values - self._repetition_penalties(lengths))
            values[is_out] = -math.inf
            adjusted[ids] = values
        return adjusted

    def _repetition_penalties(self, lengths: np.ndarray) -> np.ndarray:
        """float32, what DRY takes from logits of tokens that go on with repetitions of these lengths."""
        params = self.params
        powers = np.float64(params.dry_base) ** (lengths - params.dry_allowed_length).astype(np.float64)
        penalties: np.ndarray = np.minimum(params.dry_multiplier * powers, _LARGEST).astype(np.float32)
        return penalties

    def _temperature(self, relative: np.ndarray) -> float:
        params = self.params
        if not params.dynatemp_range:
            return params.temperature
        low = max(params.temperature - params.dynatemp_range, 0.0)
        high = params.temperature + params.dynatemp_range
        return dynamic_temperature(relative, low, high, params.dynatemp_exponent)

    def _check_largest(self, largest: float) -> None:
        """Raises where the likeliest token is none."""
        if math.isfinite(largest):
            return
        if largest == -math.inf and self.constraint is not None:
            raise InvalidRequestError(
                "no token is left to go on with: what the answer must follow allows none"
                + (" that logit_bias and ignore_eos allow" if self._forbids else " of the vocabulary")
            )
        if largest == -math.inf and self._forbids:
            raise InvalidRequestError("logit_bias forbids every token of the vocabulary")
        raise HotsetError("the model computed logits that are not numbers; the file may be damaged")

    def _candidates(self, logits: np.ndarray, is_xtc: bool) -> tuple[np.ndarray, np.ndarray]:
        """Token ids that survive the filters, and their logits less the largest, float64."""
        params = self.params
        near: np.ndarray | None = None
        if params.top_n_sigma > 0:
            self._check_largest(float(logits.max()))
            near = top_n_sigma(logits, params.top_n_sigma)
            logits = logits[near]
        ids, relative, total = self._likely(logits)
        if near is not None:
            ids = near[ids]
        if params.typical_p < 1:
            kept = typical(relative, params.typical_p)
            ids, relative, total = ids[kept], relative[kept] - relative[kept[0]], None
        n = len(ids)
        if params.top_p < 1:
            cumulative = np.exp(relative).cumsum()
            n = int(cumulative.searchsorted(params.top_p * (total or cumulative[-1]))) + 1
        if params.min_p > 0:
            n = min(n, int((-relative).searchsorted(-math.log(params.min_p), side="right")))
        ids, relative = ids[:n], relative[:n]
        if is_xtc and (n_out := xtc(relative, params.xtc_threshold)):
            ids, relative = ids[n_out:], relative[n_out:] - relative[n_out]
        return ids, relative

    def _likely(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, float | None]:
        """Indices of the logits that are left by top-k, or that later filters may keep; these less the
        largest, float64, by falling value where a filter follows; and where some of them were left out that
        top-p counts, the sum of the exponentials of all."""
        params = self.params
        if 0 < params.top_k < self._n_vocab:  # (of few allowed ones it may be all)
            self._check_largest(float(logits.max()))  # NaN where one is
            ids, values = top_k(logits, params.top_k)
            relative = values.astype(np.float64)
            relative -= relative[0]
            if params.orders and relative[-1] == -math.inf:
                n = int((-relative).searchsorted(math.inf))
                ids, relative = ids[:n], relative[:n]
            return ids, relative, None
        largest = logits.max()
        self._check_largest(float(largest))
        relative = logits - largest
        cut, total = -math.inf, None
        if params.typical_p == 1:
            cut = math.log(params.min_p) if params.min_p > 0 else cut
            if params.top_p < 1:
                # All tokens less likely than (1 - top_p) / n together do not reach 1 - top_p: never needed.
                total = float(np.exp(relative).sum())
                cut = max(cut, math.log((1 - params.top_p) * total / logits.size))
        if cut == -math.inf and not params.orders:
            return np.arange(logits.size), relative.astype(np.float64), None
        # (a margin for float32; the exact cut follows)
        ids = np.flatnonzero(relative >= cut - 1e-3 if cut > -math.inf else relative > cut)
        relative = relative[ids].astype(np.float64)
        order = np.argsort(-relative, kind="stable")
        return ids[order], relative[order], total


def token_logprobs(logits: np.ndarray, token: int, n_top: int) -> TokenLogprobs:
    """What a row of logits says of `token` and of the n_top most likely ones."""
    log_total = log_sum_exp(logits)
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        ids, values = top_k(logits, min(n_top, logits.size))
        top = tuple(zip(ids.tolist(), (values.astype(np.float64) - log_total).tolist(), strict=True))
    return TokenLogprobs(token, float(logits[token]) - log_total, top)


def log_sum_exp(logits: np.ndarray) -> float:
    """log(sum(exp(logits))) of one row, accumulated in float64."""
    largest = float(logits.max())
    with np.errstate(over="ignore"):  # the distance of two finite floats may be none
        relative = logits - np.float32(largest)
    return largest + math.log(float(np.exp(relative).sum(dtype=np.float64)))


def _among(
    candidates: np.ndarray | None, ids: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where tokens are among candidates, and what was said of those that are; None: every token is."""
    if candidates is None:
        return ids, values
    at = np.minimum(candidates.searchsorted(ids), len(candidates) - 1)
    found = candidates[at] == ids
    return at[found], values[found]


def _float32(value: float) -> np.float32:
    return np.float32(max(-_LARGEST, min(value, _LARGEST)))


def _bounded(values: np.ndarray) -> np.ndarray:
    bounded: np.ndarray = np.clip(values, np.float32(-_LARGEST), np.float32(_LARGEST))
    return bounded
