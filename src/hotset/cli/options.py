"""Options that several verbs share, spelled as llama.cpp's users know them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_ENGINE, _SAMPLING, _TEXT = "Engine", "Sampling", "Input and output"


def _option(names: str, help: str, panel: str | None = None, **more: object) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(*names.split(), help=help, rich_help_panel=panel, **more)  # type: ignore[arg-type]
    return info


_MODEL_HELP = "A path, a name ('hotset list --all'), or hf:owner/repository[:file]."
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)]
OptionalModel = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]

Json = Annotated[bool, _option("--json", "Print JSON.")]

Threads = Annotated[
    int | None, _option("--threads -t", "Threads; default: the usable cores.", _ENGINE, min=1)
]
ContextSize = Annotated[
    int | None, _option("--ctx-size -c", "Tokens of prompt and answer together.", _ENGINE, min=1)
]
CacheType = Annotated[str, _option("--cache-type -ctk", "Type of the KV cache: f16 or q8_0.", _ENGINE)]
Activation = Annotated[
    str | None, _option("--activation", "Override the FFN's activation, such as relu.", _ENGINE)
]
Sparsity = Annotated[
    str | None,
    _option("--sparsity", "dense, exact or predicted; default: the fastest that keeps the meaning.", _ENGINE),
]
Predictor = Annotated[
    str | None, _option("--predictor", "mlp[:TYPE], sign[:MARGIN] or svd[:RANK]; implies predicted.", _ENGINE)
]
ProfileFile = Annotated[
    Path | None,
    _option("--profile", "Of 'hotset profile': hot neurons need no prediction.", _ENGINE, dir_okay=False),
]
BackendName = Annotated[str, _option("--backend", "cpu, or reference: slow, plain NumPy.", _ENGINE)]

File = Annotated[
    Path | None, _option("--file -f", "Read the prompt from a file.", _TEXT, exists=True, dir_okay=False)
]
System = Annotated[str | None, _option("--system -sys", "System message of the chat template.", _TEXT)]
Raw = Annotated[bool, _option("--raw", "Continue the prompt as it stands, without a chat template.", _TEXT)]
JsonAnswer = Annotated[bool, _option("--json", "Print one JSON object: text, tokens, speeds.", _TEXT)]

Stats = Annotated[bool, _option("--stats", "At the end, what each layer computed and touched.", _TEXT)]

NPredict = Annotated[
    int, _option("--n-predict -n", "Tokens of an answer at most; -1: until it ends.", min=-1)
]
Temperature = Annotated[
    float | None, _option("--temp", "Temperature; 0: always the likeliest token.", _SAMPLING)
]
TopK = Annotated[int | None, _option("--top-k", "Only the k likeliest tokens; 0: all.", _SAMPLING)]
TopP = Annotated[
    float | None, _option("--top-p", "Only tokens that together reach this probability.", _SAMPLING)
]
MinP = Annotated[
    float | None, _option("--min-p", "Only tokens this likely relative to the likeliest.", _SAMPLING)
]
RepeatPenalty = Annotated[
    float | None, _option("--repeat-penalty", "Penalise recent tokens; 1: off.", _SAMPLING)
]
PresencePenalty = Annotated[float | None, _option("--presence-penalty", "Penalise what occurred.", _SAMPLING)]
FrequencyPenalty = Annotated[
    float | None, _option("--frequency-penalty", "Penalise what occurred, each time.", _SAMPLING)
]
LogitBias = Annotated[
    list[str] | None, _option("--logit-bias", "ID+BIAS or ID-BIAS, such as 15043-1; repeatable.", _SAMPLING)
]
Seed = Annotated[int | None, _option("--seed -s", "The same seed gives the same text; -1: any.", _SAMPLING)]
Stop = Annotated[
    list[str] | None, _option("--stop -r", "End the answer before this text; repeatable.", _SAMPLING)
]
IgnoreEos = Annotated[bool, _option("--ignore-eos", "Go on where the model would end.", _SAMPLING)]
