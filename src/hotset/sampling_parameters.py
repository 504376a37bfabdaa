"""The sampling parameters, one record each, from which every interface is derived.

`SamplingParams` takes defaults and ranges from here; the options of the command line, the fields of requests
and the lines of Modelfiles take names and sentences. The module must import fast, because the command line
reads it for its help.
"""

from __future__ import annotations

from typing import Any

from hotset.parameters import Parameter

_PANEL = "Sampling"


def _real(name: str, default: float, summary: str, **more: Any) -> Parameter:
    return _other(name, default, summary, kind=float, **more)


def _whole(name: str, default: int | None, summary: str, **more: Any) -> Parameter:
    return _other(name, default, summary, kind=int, **more)


def _other(name: str, default: Any, summary: str, **more: Any) -> Parameter:
    return Parameter(name=name, summary=summary, default=default, **{"panel": _PANEL, **more})


_MORE = "More samplers"
_DRY = "Sampling against repetition (DRY)"
FORM = "Form of the answer (needs the extra serve)"

RULES = (
    _real("temperature", 0.8, "Randomness; 0 takes the most likely token.", low=0, option="--temp",
        modelfile="temperature", label="Temperature", slider=(0, 2)),
    _whole("top_k", 40, "Keep the k most likely tokens; 0 and -1 keep all.", low=0, minus_one=0,
        option="--top-k", modelfile="top_k", label="Top-k", slider=(0, 200)),
    _real("top_p", 0.95, "Keep the fewest tokens whose probabilities reach this.", low=0, high=1,
        option="--top-p", modelfile="top_p", label="Top-p", slider=(0, 1)),
    _real("min_p", 0.05, "Keep tokens at least this many times as likely as the most likely.", low=0, high=1,
        option="--min-p", modelfile="min_p", label="Min-p", slider=(0, 1)),
    _real("repetition_penalty", 1.0, "Divides logits of recent tokens; 1 is off.", low=0,
        option="--repeat-penalty", also=("repeat_penalty",), modelfile="repeat_penalty",
        label="Repetition penalty", slider=(0.5, 2)),
    _whole("penalty_last_n", 64, "How many tokens are recent; -1: all, 0: none.", low=-1,
        option="--repeat-last-n", also=("repeat_last_n",), modelfile="repeat_last_n"),
    _real("frequency_penalty", 0.0, "Subtracted from a recent token's logit per occurrence.",
        option="--frequency-penalty", modelfile="frequency_penalty", label="Frequency penalty",
        slider=(-2, 2)),
    _real("presence_penalty", 0.0, "Subtracted once from a recent token's logit.",
        option="--presence-penalty", modelfile="presence_penalty", label="Presence penalty",
        slider=(-2, 2)),
    _real("top_n_sigma", -1.0, "Keep logits at most this many standard deviations below the largest; "
        "0 and less keep all.", panel=_MORE, option="--top-nsigma"),
    _real("typical_p", 1.0, "Keep tokens of about the expected surprisal; 1 keeps all.", low=0, high=1,
        panel=_MORE, option="--typical", also=("typ_p",), modelfile="typical_p"),
    _real("xtc_probability", 0.0, "How often XTC removes the most likely tokens.", low=0, high=1,
        panel=_MORE, option="--xtc-probability"),
    _real("xtc_threshold", 0.1, "Lowest probability of tokens that XTC removes.", low=0, high=1,
        panel=_MORE, option="--xtc-threshold"),
    _real("dynatemp_range", 0.0, "How far the temperature varies with the entropy.", low=0,
        panel=_MORE, option="--dynatemp-range"),
    _real("dynatemp_exponent", 1.0, "How the temperature follows the entropy.", low=0,
        panel=_MORE, option="--dynatemp-exp"),
    _whole("mirostat", 0, "Version of mirostat that replaces the other filters; 0 is off.", low=0, high=2,
        panel=_MORE, option="--mirostat", modelfile="mirostat"),
    _real("mirostat_tau", 5.0, "Target surprisal of mirostat in bits.", low=0, high=100,
        panel=_MORE, option="--mirostat-ent", modelfile="mirostat_tau"),
    _real("mirostat_eta", 0.1, "How fast mirostat adapts.", low=0, high=1, panel=_MORE,
        option="--mirostat-lr", modelfile="mirostat_eta"),
    _real("dry_multiplier", 0.0, "Strength of DRY, which penalises repetitions; 0 is off.", low=0,
        panel=_DRY, option="--dry-multiplier"),
    _real("dry_base", 1.75, "Growth of DRY's penalty with the length of a repetition.", low=1,
        panel=_DRY, option="--dry-base"),
    _whole("dry_allowed_length", 2, "Length of repetitions that DRY allows.", low=0,
        panel=_DRY, option="--dry-allowed-length"),
    _whole("dry_penalty_last_n", -1, "How many tokens DRY searches; -1: all, 0: none.", low=-1,
        panel=_DRY, option="--dry-penalty-last-n"),
)  # fmt: skip
"""Numbers that determine how a token is drawn (csrc/draw.h)."""

_OTHERS = (
    _other("dry_sequence_breakers", ("\n", ":", '"', "*"), "Texts that end a repetition.",
        panel=_DRY, option="--dry-sequence-breaker"),
    _other("logit_bias", None, "Numbers added to logits, by token id.", option="--logit-bias"),
    _whole("seed", None, "Seed of the draws; -1: any.", low=0, high=2**64 - 1, minus_one=None,
        option="--seed -s", usual="random", modelfile="seed", label="Seed"),
    _whole("logprobs", None, "How many of the most likely tokens to return, with logarithms.", low=0,
        also=("n_probs", "top_logprobs")),
    _whole("max_tokens", None, "Most tokens of the answer; -1: as many as fit.", low=1, minus_one=None,
        option="--n-predict -n", usual="as many as fit", panel=None, hidden=("--predict",),
        modelfile="num_predict", label="Maximum answer length",
        also=("max_completion_tokens", "max_output_tokens", "n_predict", "max_new_tokens")),
    _other("stop", (), "Texts that end the answer.", option="--stop -r", also=("stop_sequences",)),
    _other("stop_token_ids", (), "Tokens that end the answer."),
    _other("ignore_eos", False, "Forbid the tokens that end an answer.", option="--ignore-eos"),
    _whole("reasoning_budget", None, "Most tokens of thinking before the answer; 0: none, -1: no limit.",
        low=-1, option="--reasoning-budget"),
    _other("reasoning_budget_message", "", "Text that ends the thinking when its budget is used up.",
        option="--reasoning-budget-message"),
    _other("json_schema", None, "JSON schema that the answer follows.", panel=FORM,
        option="--json-schema -j", hidden=("--schema",), also=("guided_json",)),
    _other("json_object", False, "Whether the answer is a JSON object."),
    _other("regex", None, "Regular expression that the whole answer matches.", also=("guided_regex",)),
    _other("grammar", None, "GBNF or Lark that the answer follows.", panel=FORM, option="--grammar",
        also=("guided_grammar",)),
)  # fmt: skip

PARAMETERS = {one.name: one for one in (*RULES, *_OTHERS)}
"""Name → record, for all parameters."""

OPTIONS = {one.name: one.flag for one in PARAMETERS.values() if one.option}
"""Name → option of the command line."""

OTHER_NAMES = {name: one.name for one in PARAMETERS.values() for name in one.names[1:] if len(name) > 1} | {
    "response_format": "json_schema"
}
"""Name in another program or interface → name."""
