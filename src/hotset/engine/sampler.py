"""Sampling: from a row of logits to a token, with the meaning of each parameter.

The order is llama.cpp's: constraint, logit bias, penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p,
XTC, temperature, draw. With mirostat it is constraint, bias, penalties, DRY, temperature, mirostat. Draws are
native (csrc/draw.h): a vocabulary may have 150,000 entries and a step take 3 ms. Each sampler has its own
generator and uses exactly one number per drawn token (XTC has a second generator), so tokens never depend on
other sequences. A forced token is not drawn: it changes neither the generators nor mirostat's state.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from hotset import _core
from hotset.backends.base import N_CANDIDATES
from hotset.errors import HotsetError, InvalidRequestError
from hotset.parameters import below_infinity, flag, shown, text, whole_number
from hotset.sampling_parameters import PARAMETERS, RULES, ParameterFields
from hotset.text.mask import TokenMask

_F = TypeVar("_F", bound=Callable[..., Any])

_LARGEST = float(np.finfo(np.float32).max)  # larger logits are clamped to this
_SMALLEST = float(np.finfo(np.float32).tiny)


class Constraint(Protocol):
    """A form that an answer must follow, token by token. It belongs to one sequence."""

    @property
    def finished(self) -> bool:
        """Return whether the answer is complete, so that it ends without an end token."""

    def look_ahead(self) -> None:
        """Announce that the mask is needed soon: the step that computes its logits begins."""

    @property
    def is_slow(self) -> bool:
        """Return whether computing the mask may take longer than a step."""

    def is_busy(self, seconds: float) -> bool:
        """Wait at most `seconds` for the mask; return whether it is still being computed."""

    def mask(self) -> TokenMask:
        """Return the tokens that may come next. If the answer may end here, end tokens are among them."""

    def accept(self, token: int) -> None:
        """Advance by the next token of the answer, which `mask` allowed."""


class Forcing(Protocol):
    """Tokens that an answer must have regardless of the logits, such as the end of its reasoning.

    It belongs to one sequence. A constraint has priority: a token that it does not allow is not forced.
    """

    def next_token(self) -> int | None:
        """Return the token that must come next, or None if the sampler chooses it."""

    def accept(self, token: int) -> None:
        """Take in the next token of the answer."""

    def clone(self) -> Forcing:
        """Return an independent copy."""


# log(sum(exp(logits))) of a row, and the indices of the largest logits by falling logit.
RowLogprobs = tuple[float, list[int]]


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities (no bias, penalty or temperature).

    token, text: the chosen token, its id and its text. top: the most likely (token, logprob), best first.
    top_texts: their texts. The engine leaves texts empty, because it handles ids only; generation.py adds
    them. Incomplete characters become U+FFFD.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    text: str = ""
    top_texts: tuple[str, ...] = ()


MAX_STOPS, MAX_STOP_CHARS = 64, 1024
"""The limits of stop strings, their number and length: all are searched for at every token."""
MAX_BUDGET_MESSAGE_CHARS = 4096
"""The longest text that may be forced at the end of reasoning."""
MAX_BREAKER_BYTES = 40
"""The longest DRY sequence breaker; their number is limited by MAX_STOPS."""


_FIELDS = (ParameterFields.__doc__ or "").partition("\n\n")[2]
_NUMBERS = [one for one in PARAMETERS.values() if one.kind is not None]


@dataclass(frozen=True)
class SamplingParams(ParameterFields):
    __doc__ = f"""How tokens are chosen and when to stop. The defaults are llama.cpp's.

{_FIELDS}"""

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {one.name: one.checked(getattr(self, one.name)) for one in _NUMBERS} | {
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
            raise InvalidRequestError("repetition_penalty must be above 0, not 0 (1 turns it off)")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            names = " and ".join(f"`{name}`" for name in given)
            raise InvalidRequestError(f"{names} cannot be combined; give one of them")

    @property
    def form(self) -> tuple[str, str] | None:
        """Return the form of the answer: "json_schema", "regex" or "grammar", and its text; None: any."""
        if self.json_object:
            return "json_schema", '{"type": "object"}'
        for name in ("json_schema", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None:
                return name, value
        return None

    @property
    def penalizes(self) -> bool:
        """Return whether any penalty can change a logit."""
        return self.penalty_last_n != 0 and (
            self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        )

    @property
    def is_dry(self) -> bool:
        """Return whether DRY can change a logit."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def breakers(self) -> tuple[str, ...]:
        """Return the strings that end a repetition for DRY."""
        return self.dry_sequence_breakers if self.is_dry else ()


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
    """Return a JSON schema as text."""
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"json_schema must be a JSON schema, an object, not {shown(given)}")
    try:
        return json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema must be JSON data ({error})") from None


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (None,)
    if not all(isinstance(text, str) and text for text in stops):
        raise InvalidRequestError("stop must be a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS or max(map(len, stops), default=0) > MAX_STOP_CHARS:
        raise InvalidRequestError(
            f"stop has {len(stops)} strings, the longest of {max(map(len, stops))} characters; at most "
            f"{MAX_STOPS} of {MAX_STOP_CHARS} characters are accepted"
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
            f"{MAX_STOPS} of {MAX_BREAKER_BYTES} bytes are accepted"
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
        if isinstance(token, str) and token.isdecimal() and len(token) < 20:  # keys in JSON are strings
            token = int(token)
        token = whole_number("the token id in logit_bias", token, 0)
        biases[token] = below_infinity(f"logit_bias of token {shown(token)}", value)
    return biases


class Sampler:
    """A sampler of one sequence's tokens.

    tokens: the prompt, which penalties count. forbidden: token ids that are never chosen. constraint: the
    form of the answer. breakers: spellings of `dry_sequence_breakers` in tokens (Tokenizer.sequences_with).
    The attribute `forcing` holds tokens that must come regardless of the logits.
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
        self.generator = np.random.Generator(np.random.Philox(self.seed))
        # Separate, so that the other draws are the same with and without XTC.
        self.xtc_generator = np.random.Generator(np.random.Philox([self.seed, 1]))
        # The numbers of a draw whose token was not accepted yet: after an interruption it is repeated.
        self._numbers: tuple[float, float] | None = None
        self._forbids = -math.inf in bias.values()
        self._n_top = None if params.logprobs is None else min(params.logprobs, n_vocab)
        self._n_needed = self._needed(bias)
        counts = tokens if params.penalizes or params.is_dry else []
        biases = [  # only a forbidden token has an infinite one
            (token, value if value == -math.inf else max(-_LARGEST, min(value, _LARGEST)))
            for token, value in sorted(bias.items())
        ]
        spellings = [list(breaker) for breaker in breakers] if params.is_dry else []
        self._draw = _core.Draw(n_vocab, _rules(params, n_vocab), biases, spellings, counts)

    def _needed(self, bias: Mapping[int, float]) -> int | None:
        """Return how many of the largest logits decide the next token without penalties; None: any may.

        Negative biases and penalties lower logits, so each can only bring in the next largest one.
        Constraints, logprobs, DRY, mirostat, top-n-sigma, and top-p or min-p without top-k need all logits.
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
        """Return whether the N_CANDIDATES largest logits suffice to draw from each of `n_rows` rows."""
        n_penalised = self._draw.n_penalised + n_rows - 1 if self.params.penalizes else 0
        return self._n_needed is not None and self._n_needed + n_penalised <= N_CANDIDATES

    def clone(self) -> Sampler:
        """Return a sampler that will draw the same tokens, for drafts. It has no constraint."""
        other = copy.copy(self)
        vars(other).update(
            generator=copy.deepcopy(self.generator),
            xtc_generator=copy.deepcopy(self.xtc_generator),
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
        """Announce that `sample` will be called soon, with the logits of a step that begins."""
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
        """Return a draw for `draw_tokens`, with the requested logprobs. It uses up a random number.

        `take` checks its token.

        Call it only if no token is `forced`. logits: float32 [n_vocab], unchanged afterwards. largest: this
        row of StepResult.largest; it does not change the token. candidates: this row of
        StepResult.candidates, if `takes_candidates`.
        """
        params = self.params
        if self._numbers is None:
            u = self.generator.random() if params.temperature else 0.0
            chance = self.xtc_generator.random() if params.temperature and params.xtc_probability else 1.0
            self._numbers = u, chance
        u, chance = self._numbers
        mask = None if self.constraint is None else self.constraint.mask()
        bits, ids = mask or (None, None)
        has_xtc = chance < params.xtc_probability
        return self._draw, logits, largest, candidates, bits, ids, u, has_xtc, self._n_top

    def take(self, token: int) -> int:
        """Return a drawn token. Raises InvalidRequestError if none is allowed, HotsetError for NaN logits."""
        if token >= 0:
            return token
        if token == _core.NOTHING_ALLOWED and self.constraint is not None:
            raise InvalidRequestError(
                "the answer cannot continue: its required form allows no token"
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
    """Return the model's own log-probabilities of `token` and the most likely tokens.

    logits: float32 [n_vocab], not changed by a sampler. found: `row_logprobs` of them.
    """
    log_total, ids = found
    values = logits[ids].astype(np.float64) - log_total
    return TokenLogprobs(
        token, float(logits[token]) - log_total, tuple(zip(ids, values.tolist(), strict=True))
    )


def _rules(params: SamplingParams, n_vocab: int) -> dict[str, float]:
    """Return the parameters of csrc/draw.cpp: numbers within the ranges of its types."""
    rules = {one.name: getattr(params, one.name) for one in RULES}
    for name in ("frequency_penalty", "presence_penalty"):
        rules[name] = max(-_LARGEST, min(rules[name], _LARGEST))
    rules["repetition_penalty"] = max(_SMALLEST, min(params.repetition_penalty, _LARGEST))
    rules["top_k"] = min(params.top_k, n_vocab)
    for name in ("penalty_last_n", "dry_penalty_last_n", "dry_allowed_length"):
        rules[name] = min(rules[name], 1 << 53)
    return rules
