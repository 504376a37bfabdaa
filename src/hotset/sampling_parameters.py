"""The sampling parameters, one record each, from which every interface is derived.

`SamplingParams` inherits its fields from here; the options of the command line, the fields of requests and
the lines of Modelfiles take names, ranges and sentences. The module must import fast, because the command
line reads it for its help.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypedDict

from hotset.parameters import Parameter, table_of


def _rule(default: Any, summary: str, **row: Any) -> Any:
    """Return a field for a number that determines how a token is drawn."""
    return field(default=default, metadata={"is_rule": True, "row": {"summary": summary, **row}})


def _other(default: Any, summary: str, **row: Any) -> Any:
    metadata = {"is_rule": False, "row": {"summary": summary, **row}}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


_PANEL, _MORE = "Sampling", "More samplers"
_DRY = "Sampling against repetition (DRY)"
FORM = "Form of the answer (needs the extra serve)"


@dataclass(frozen=True)
class ParameterFields:
    """The fields of SamplingParams (engine/sampler.py): the table of parameters.

    temperature: 0 takes the most likely token after bias, penalties and DRY. Applied last, as in llama.cpp.
    top_k: keep the k most likely tokens; 0 and -1 keep all.
    top_p: keep the fewest tokens whose probabilities reach top_p; 1 keeps all.
    min_p: keep tokens at least min_p times as likely as the most likely one; 0 keeps all.
    repetition_penalty: divides positive and multiplies negative logits of recent tokens; 1 is off.
    frequency_penalty, presence_penalty: subtracted from the logit of a recent token, per occurrence and once.
    penalty_last_n: how many tokens, of prompt and answer, are recent; -1 means all, 0 none.
    top_n_sigma: keep tokens whose logit is at most this many standard deviations (of all logits) below the
        largest; 0 or less keeps all.
    typical_p: keep the fewest tokens with a total probability above typical_p, those whose surprisal is
        closest to the entropy first; 1 keeps all.
    xtc_probability, xtc_threshold: with this probability, remove the tokens with a probability ≥ the
        threshold, except the least likely of them; a probability of 0 is off.
    dynatemp_range, dynatemp_exponent: the temperature varies from temperature - range (at least 0) to
        temperature + range. It grows with the entropy of the remaining tokens, divided by the largest
        possible entropy, to the power of the exponent. A range of 0 is off.
    mirostat: 1 or 2 draws by that version of mirostat, and top_n_sigma, top_k, typical_p, top_p, min_p, XTC
        and the dynamic temperature have no effect; 0 is off.
    mirostat_tau, mirostat_eta: the target surprisal in bits (at most 100), and the learning rate.
    adaptive_target: adaptive-p prefers tokens whose probability, after all filters and the temperature, is
        near this one; at most 1, negative is off. It makes up for tokens that were more or less likely, and
        mirostat switches it off.
    adaptive_decay: the weight of the earlier tokens in that mean, from 0 to 1.
    dry_multiplier: a token that would extend a repetition of n ≥ dry_allowed_length tokens loses
        dry_multiplier * dry_base ** (n - dry_allowed_length) of its logit; 0 is off.
    dry_base, dry_allowed_length: see dry_multiplier.
    dry_penalty_last_n: how many tokens, of prompt and answer, DRY searches; -1 means all, 0 none.
    dry_sequence_breakers: strings that end a repetition; at most 64 of 40 bytes.
    logit_bias: token id → number added to its logit; -inf forbids the token.
    seed: any integer from 0 to 2**64 - 1; None and -1 pick one, which is then in `Sampler.seed`.
    logprobs: None for none, n for the chosen token and the n most likely tokens.
    max_tokens: None and -1 continue to the end of the context.
    stop: strings that end the answer and are not part of it; at most 64 of 1,024 characters.
    stop_token_ids: more tokens that end the answer, without their text; at most 64.
    ignore_eos: forbid the model's own end tokens.
    reasoning_budget: the most tokens of reasoning before its end is forced. 0 turns reasoning off; -1 and
        None set no limit.
    reasoning_budget_message: a text that is forced before that end; at most 4,096 characters.
    json_schema, json_object, regex, grammar: a form that the answer must follow, at most one of them: a JSON
        schema (an object or its text), any JSON object, a regular expression that matches the whole answer,
        or a grammar in GBNF or Lark (text/constraint.py makes a Constraint of it).
    """

    # fmt: off
    temperature: float = _rule(0.8, "Randomness; 0 takes the most likely token.", low=0, option="--temp",
        modelfile="temperature", label="Temperature", slider=(0, 2))
    top_k: int = _rule(40, "Keep the k most likely tokens; 0 and -1 keep all.", low=0, minus_one=0,
        option="--top-k", modelfile="top_k", label="Top-k", slider=(0, 200))
    top_p: float = _rule(0.95, "Keep the fewest tokens whose probabilities reach this.", low=0, high=1,
        option="--top-p", modelfile="top_p", label="Top-p", slider=(0, 1))
    min_p: float = _rule(0.05, "Keep tokens at least this many times as likely as the most likely.", low=0,
        high=1, option="--min-p", modelfile="min_p", label="Min-p", slider=(0, 1))
    repetition_penalty: float = _rule(1.0, "Divides logits of recent tokens; 1 is off.", low=0,
        option="--repeat-penalty", also=("repeat_penalty",), modelfile="repeat_penalty",
        label="Repetition penalty", slider=(0.5, 2))
    penalty_last_n: int = _rule(64, "How many tokens are recent; -1: all, 0: none.", low=-1,
        option="--repeat-last-n", also=("repeat_last_n",), modelfile="repeat_last_n")
    frequency_penalty: float = _rule(0.0, "Subtracted from a recent token's logit per occurrence.",
        option="--frequency-penalty", modelfile="frequency_penalty", label="Frequency penalty",
        slider=(-2, 2))
    presence_penalty: float = _rule(0.0, "Subtracted once from a recent token's logit.",
        option="--presence-penalty", modelfile="presence_penalty", label="Presence penalty",
        slider=(-2, 2))
    top_n_sigma: float = _rule(-1.0, "Keep logits at most this many standard deviations below the largest; "
        "0 and less keep all.", panel=_MORE, option="--top-nsigma")
    typical_p: float = _rule(1.0, "Keep tokens of about the expected surprisal; 1 keeps all.", low=0, high=1,
        panel=_MORE, option="--typical", also=("typ_p",), modelfile="typical_p")
    xtc_probability: float = _rule(0.0, "How often XTC removes the most likely tokens.", low=0, high=1,
        panel=_MORE, option="--xtc-probability")
    xtc_threshold: float = _rule(0.1, "Lowest probability of tokens that XTC removes.", low=0, high=1,
        panel=_MORE, option="--xtc-threshold")
    dynatemp_range: float = _rule(0.0, "How far the temperature varies with the entropy.", low=0,
        panel=_MORE, option="--dynatemp-range")
    dynatemp_exponent: float = _rule(1.0, "How the temperature follows the entropy.", low=0,
        panel=_MORE, option="--dynatemp-exp")
    mirostat: int = _rule(0, "Version of mirostat that replaces the other filters; 0 is off.", low=0, high=2,
        panel=_MORE, option="--mirostat", modelfile="mirostat")
    mirostat_tau: float = _rule(5.0, "Target surprisal of mirostat in bits.", low=0, high=100,
        panel=_MORE, option="--mirostat-ent", modelfile="mirostat_tau")
    mirostat_eta: float = _rule(0.1, "How fast mirostat adapts.", low=0, high=1, panel=_MORE,
        option="--mirostat-lr", modelfile="mirostat_eta")
    adaptive_target: float = _rule(-1.0, "Draw tokens of about this probability (adaptive-p); below 0: off.",
        high=1, panel=_MORE, option="--adaptive-target", modelfile="adaptive_target",
        label="Adaptive-p target", slider=(-1, 1))
    adaptive_decay: float = _rule(0.9, "How long adaptive-p remembers the probabilities of tokens.", low=0,
        high=1, panel=_MORE, option="--adaptive-decay", modelfile="adaptive_decay")
    dry_multiplier: float = _rule(0.0, "Strength of DRY, which penalises repetitions; 0 is off.", low=0,
        panel=_DRY, option="--dry-multiplier")
    dry_base: float = _rule(1.75, "Growth of DRY's penalty with the length of a repetition.", low=1,
        panel=_DRY, option="--dry-base")
    dry_allowed_length: int = _rule(2, "Length of repetitions that DRY allows.", low=0,
        panel=_DRY, option="--dry-allowed-length")
    dry_penalty_last_n: int = _rule(-1, "How many tokens DRY searches; -1: all, 0: none.", low=-1,
        panel=_DRY, option="--dry-penalty-last-n")

    dry_sequence_breakers: tuple[str, ...] = _other(("\n", ":", '"', "*"), "Texts that end a repetition.",
        panel=_DRY, option="--dry-sequence-breaker")
    logit_bias: Mapping[int, float] = _other(dict, "Numbers added to logits, by token id.",
        option="--logit-bias")
    seed: int | None = _other(None, "Random seed; -1: a new one for each answer.", low=0, high=2**64 - 1,
        minus_one=None, option="--seed -s", usual="random", modelfile="seed", label="Seed")
    logprobs: int | None = _other(None, "How many of the most likely tokens to return, with logarithms.",
        low=0, also=("n_probs", "top_logprobs"))
    max_tokens: int | None = _other(None, "Maximum tokens of the answer; -1: as many as fit.", low=1,
        minus_one=None, option="--n-predict -n", usual="as many as fit", panel=None, hidden=("--predict",),
        modelfile="num_predict", label="Maximum answer length",
        also=("max_completion_tokens", "max_output_tokens", "n_predict", "max_new_tokens"))
    stop: tuple[str, ...] = _other((), "Texts that end the answer.", option="--stop -r",
        also=("stop_sequences",))
    stop_token_ids: tuple[int, ...] = _other((), "Tokens that end the answer.")
    ignore_eos: bool = _other(False, "Forbid the tokens that end an answer.", option="--ignore-eos")
    reasoning_budget: int | None = _other(None,
        "Most tokens of thinking before the answer; 0: none, -1: no limit.", low=-1,
        option="--reasoning-budget")
    reasoning_budget_message: str = _other("", "Text that ends the thinking when its budget is used up.",
        option="--reasoning-budget-message")
    json_schema: Mapping[str, Any] | str | None = _other(None, "JSON schema that the answer follows.",
        panel=FORM, option="--json-schema -j", hidden=("--schema",), also=("guided_json",))
    json_object: bool = _other(False, "Whether the answer is a JSON object.")
    regex: str | None = _other(None, "Regular expression that the whole answer matches.",
        also=("guided_regex",))
    grammar: str | None = _other(None, "GBNF or Lark that the answer follows.", panel=FORM,
        option="--grammar", also=("guided_grammar",))
    # fmt: on


def _parameter(one: Field[Any]) -> Parameter:
    kind: type[float] | type[int] | None = {"float": float, "int": int, "int | None": int}.get(str(one.type))
    default = None if one.default is MISSING else one.default
    row = {"panel": _PANEL, **one.metadata["row"]}
    return Parameter(name=one.name, kind=kind, default=default, **row)


PARAMETERS = table_of(*map(_parameter, fields(ParameterFields)))
"""Name → record, for all parameters."""

RULES = tuple(PARAMETERS[one.name] for one in fields(ParameterFields) if one.metadata["is_rule"])
"""Numbers that determine how a token is drawn (csrc/draw.h)."""

OPTIONS = {one.name: one.flag for one in PARAMETERS.values() if one.option}
"""Name → option of the command line."""

OTHER_NAMES = {name: one.name for one in PARAMETERS.values() for name in one.names[1:] if len(name) > 1} | {
    "response_format": "json_schema"
}
"""Name in another program or interface → name."""


class Sampling(TypedDict, total=False):
    """The fields of SamplingParams as keywords of `generate`, `stream` and `chat`, for type checkers."""

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
    adaptive_target: float
    adaptive_decay: float
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
