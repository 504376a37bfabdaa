"""From a row of logits to a token: the parameters, with their meaning.

The order is llama.cpp's: what a constraint allows, logit bias, penalties, DRY, top-n-sigma, top-k, typical,
top-p, min-p, XTC, temperature, draw. With mirostat it is bias, penalties, DRY, temperature, mirostat. Draws
are native (csrc/draw.h): a vocabulary may have 150,000 entries and a step 3 ms. Each sampler draws from its
own generator, exactly one number per drawn token (XTC from a second one): tokens never depend on other
sequences. A forced token is not drawn: it changes neither the generators nor mirostat's state.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

import numpy as np

from hotset import _core
from hotset.backends.base import N_CANDIDATES
from hotset.errors import HotsetError, InvalidRequestError
from hotset.parameters import below_infinity, flag, real_number, shown, text, whole_number
from hotset.sampling_parameters import PARAMETERS, RULES, Parameter
from hotset.text.mask import TokenMask

_F = TypeVar("_F", bound=Callable[..., Any])

_LARGEST = float(np.finfo(np.float32).max)  # what becomes of a logit beyond it
_SMALLEST = float(np.finfo(np.float32).tiny)


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


# log(sum(exp(logits))) of a row, and the indices of the largest logits by falling logit.
RowLogprobs = tuple[float, list[int]]


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


_NUMBERS = [one for one in PARAMETERS.values() if one.kind is not None]


def _default(name: str) -> Any:
    return PARAMETERS[name].default


def _number(parameter: Parameter, value: Any) -> float | int | None:
    """Return a checked number. Raises InvalidRequestError."""
    low, high, value = parameter.low, parameter.high, parameter.meant(value)
    if value is None and parameter.default is None:
        return None
    if parameter.kind is int:
        return whole_number(parameter.name, value, low or 0, high)
    return real_number(
        parameter.name, value, -math.inf if low is None else low, math.inf if high is None else high
    )


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. The defaults are llama.cpp's.

    temperature: 0 takes the most likely token, after bias, penalties and DRY alone. Applied last, as
        llama.cpp does.
    top_k: keep the k most likely tokens; 0 and -1 keep all.
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
    seed: any integer from 0 to 2**64 - 1; None and -1 pick one (`Sampler.seed` is that one).
    logprobs: None for none, n for those of the chosen token and of the n most likely.
    max_tokens: None and -1 run to the end of the context.
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

    temperature: float = _default("temperature")
    top_k: int = _default("top_k")
    top_p: float = _default("top_p")
    min_p: float = _default("min_p")
    repetition_penalty: float = _default("repetition_penalty")
    penalty_last_n: int = _default("penalty_last_n")
    frequency_penalty: float = _default("frequency_penalty")
    presence_penalty: float = _default("presence_penalty")
    top_n_sigma: float = _default("top_n_sigma")
    typical_p: float = _default("typical_p")
    xtc_probability: float = _default("xtc_probability")
    xtc_threshold: float = _default("xtc_threshold")
    dynatemp_range: float = _default("dynatemp_range")
    dynatemp_exponent: float = _default("dynatemp_exponent")
    mirostat: int = _default("mirostat")
    mirostat_tau: float = _default("mirostat_tau")
    mirostat_eta: float = _default("mirostat_eta")
    dry_multiplier: float = _default("dry_multiplier")
    dry_base: float = _default("dry_base")
    dry_allowed_length: int = _default("dry_allowed_length")
    dry_penalty_last_n: int = _default("dry_penalty_last_n")
    dry_sequence_breakers: tuple[str, ...] = _default("dry_sequence_breakers")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = _default("seed")
    logprobs: int | None = _default("logprobs")
    max_tokens: int | None = _default("max_tokens")
    stop: tuple[str, ...] = _default("stop")
    stop_token_ids: tuple[int, ...] = _default("stop_token_ids")
    ignore_eos: bool = _default("ignore_eos")
    reasoning_budget: int | None = _default("reasoning_budget")
    reasoning_budget_message: str = _default("reasoning_budget_message")
    json_schema: Mapping[str, Any] | str | None = _default("json_schema")
    json_object: bool = _default("json_object")
    regex: str | None = _default("regex")
    grammar: str | None = _default("grammar")

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {one.name: _number(one, getattr(self, one.name)) for one in _NUMBERS} | {
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
        # For XTC's chances: other draws are the same with and without it.
        self._xtc_generator = np.random.Generator(np.random.Philox([self.seed, 1]))
        # Of a draw whose token was not accepted yet: after an interruption it is drawn again.
        self._numbers: tuple[float, float] | None = None
        self._forbids = -math.inf in bias.values()
        self._n_top = None if params.logprobs is None else min(params.logprobs, n_vocab)
        self._n_needed = self._needed(bias)
        counts = tokens if params.penalizes or params.is_dry else []
        self._draw = _core.Draw(n_vocab, _rules(params, n_vocab, bias, breakers), counts)

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
        n_penalised = self._draw.n_penalised + n_rows - 1 if self.params.penalizes else 0
        return self._n_needed is not None and self._n_needed + n_penalised <= N_CANDIDATES

    def clone(self) -> Sampler:
        """A sampler that will draw as this one, with the same random numbers and penalties, and leaves it as
        it is: for drafts. It knows no constraint."""
        other = copy.copy(self)
        vars(other).update(
            _generator=copy.deepcopy(self._generator),
            _xtc_generator=copy.deepcopy(self._xtc_generator),
            _draw=self._draw.clone(),
            constraint=None,
            _n_top=None,
        )
        other.forcing = None if self.forcing is None else self.forcing.clone()
        return other

    def accept(self, token: int) -> None:
        """Take the next token of the answer: the constraint follows it, penalties and DRY count it."""
        if self.constraint is not None:
            self.constraint.accept(token)
        if self.forcing is not None:
            self.forcing.accept(token)
        self._numbers = None
        self._draw.accept(token)

    def look_ahead(self) -> None:
        """Announces that `sample` will be called soon, with the logits of a step that begins."""
        if self.constraint is not None:
            self.constraint.look_ahead()

    def sample(
        self, logits: np.ndarray, largest: np.ndarray | None = None, candidates: np.ndarray | None = None
    ) -> int:
        """Return the next token. See `job` for the arguments."""
        if (forced := self.forced()) is not None:
            return forced
        job = self.job(logits, largest, candidates)
        self._numbers = None
        [(token, _)] = _core.draw_tokens([job], None)
        return self.take(token)

    def job(
        self, logits: np.ndarray, largest: np.ndarray | None = None, candidates: np.ndarray | None = None
    ) -> _core.DrawJob:
        """Return a draw for `draw_tokens`, with the logprobs that the parameters ask for. `take` checks its
        token. It uses up a random number. Call it only if no token is `forced`.

        logits: float32 [n_vocab], unchanged afterwards. largest: this row of StepResult.largest; the
        token is the same without. candidates: this row of StepResult.candidates, if `takes_candidates`.
        """
        params = self.params
        if self._numbers is None:
            u = self._generator.random() if params.temperature else 0.0
            chance = self._xtc_generator.random() if params.temperature and params.xtc_probability else 1.0
            self._numbers = u, chance
        u, chance = self._numbers
        mask = None if self.constraint is None else self.constraint.mask()
        bits, ids = mask or (None, None)
        has_xtc = chance < params.xtc_probability
        return self._draw, logits, largest, candidates, bits, ids, u, has_xtc, self._n_top

    def take(self, token: int) -> int:
        """Return a drawn token. Raises InvalidRequestError if none is allowed, HotsetError for damaged
        logits."""
        if token >= 0:
            return token
        if token == _core.NOTHING_ALLOWED and self.constraint is not None:
            raise InvalidRequestError(
                "no token is left to continue with: the required form of the answer allows none"
                + (" that logit_bias and ignore_eos allow" if self._forbids else " of the vocabulary")
            )
        if token == _core.NOTHING_ALLOWED and self._forbids:
            raise InvalidRequestError("logit_bias forbids every token of the vocabulary")
        raise HotsetError("the model computed logits that are not numbers; the file may be damaged")

    def forced(self) -> int | None:
        """Return the token that must come next; None if a draw chooses it or the constraint forbids it."""
        token = None if self.forcing is None else self.forcing.next_token()
        if token is None or self.constraint is None or self.constraint.mask().allows(token):
            return token
        return None

    def adjusted(self, logits: np.ndarray) -> np.ndarray:
        """Return logits with bias, penalties and DRY, float32 [n_vocab]."""
        return self._draw.adjusted(logits)


def draw_tokens(
    jobs: list[_core.DrawJob], runtime: _core.Runtime | None
) -> list[tuple[int, RowLogprobs | None]]:
    """Draw a token for each job, each of another sampler, on the threads of `runtime` if several are slow.

    One call takes the interpreter's lock once. Each further one may wait for it while another thread runs
    Python.
    """
    return _core.draw_tokens(jobs, runtime)


def row_logprobs(rows: np.ndarray, n_top: int, runtime: _core.Runtime | None = None) -> list[RowLogprobs]:
    """Return log(sum(exp(logits))) and the n_top largest logits of each row, float32 [n, n_vocab].

    The sums are accumulated in float64. They are NaN if the largest logit is not finite.
    """
    return _core.row_logprobs(rows, min(n_top, rows.shape[1]), runtime)


def token_logprobs(logits: np.ndarray, token: int, found: RowLogprobs) -> TokenLogprobs:
    """Return the model's own probabilities for `token` and the most likely ones. found: of these logits,
    which no sampler changed."""
    log_total, ids = found
    values = logits[ids].astype(np.float64) - log_total
    return TokenLogprobs(
        token, float(logits[token]) - log_total, tuple(zip(ids, values.tolist(), strict=True))
    )


def _rules(
    params: SamplingParams, n_vocab: int, bias: Mapping[int, float], breakers: Iterable[Sequence[int]]
) -> dict[str, Any]:
    """Return the parameters of csrc/draw.h: numbers within the ranges of its types.

    Only what forbids a token is infinite: a huge bias or penalty is the largest float32.
    """
    rules = {one.name: getattr(params, one.name) for one in RULES}
    for name in ("frequency_penalty", "presence_penalty"):
        rules[name] = max(-_LARGEST, min(rules[name], _LARGEST))
    rules["repetition_penalty"] = max(_SMALLEST, min(params.repetition_penalty, _LARGEST))
    rules["top_k"] = min(params.top_k, n_vocab)
    for name in ("penalty_last_n", "dry_penalty_last_n", "dry_allowed_length"):
        rules[name] = min(rules[name], sys.maxsize)
    rules["bias"] = [
        (token, value if value == -math.inf else max(-_LARGEST, min(value, _LARGEST)))
        for token, value in sorted(bias.items())
    ]
    rules["breakers"] = [list(breaker) for breaker in breakers] if params.is_dry else []
    return rules
