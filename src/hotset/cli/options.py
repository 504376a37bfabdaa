"""Options that several verbs share, spelled as llama.cpp's users know them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_ENGINE, _SAMPLING, _TEXT, _GPU = "Engine", "Sampling", "Input and output", "GPU"


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
BackendName = Annotated[
    str, _option("--backend", "auto, cpu (no GPU), or reference: slow, plain NumPy.", _ENGINE)
]

DeviceNames = Annotated[
    str | None,
    _option("--device", "cuda:0, mps, xpu; several: cuda:0,cuda:1; cpu stands in for a GPU.", _GPU),
]
VramBudget = Annotated[
    float | None,
    _option("--vram-budget", "GiB of each GPU to use, cache and all; default, or -1: what is free.", _GPU),
]
GpuLayers = Annotated[
    str | None,
    _option("--n-gpu-layers --gpu-layers -ngl", "The last so many layers on the GPU; default: auto.", _GPU),
]
GpuIndexFile = Annotated[
    Path | None,
    _option(
        "--gpu-index", "Put the neurons on the GPU that this file names.", _GPU, exists=True, dir_okay=False
    ),
]
ResetGpuIndex = Annotated[
    bool, _option("--reset-gpu-index", "Plan anew even if the placement is known.", _GPU)
]
DisableGpuIndex = Annotated[
    bool, _option("--disable-gpu-index", "Do not split the neurons of a layer.", _GPU)
]
NoGpu = Annotated[bool, _option("--no-gpu", "The CPU alone.", _GPU)]

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


def device_settings(
    *,
    backend: str,
    device: str | None,
    vram_budget: float | None,
    n_gpu_layers: str | None,
    gpu_index: Path | None,
    reset_gpu_index: bool,
    disable_gpu_index: bool,
    no_gpu: bool,
) -> dict[str, Any]:
    """What hotset.load takes for these options."""
    if no_gpu:
        asked = [
            device,
            vram_budget,
            gpu_index,
            None if n_gpu_layers in (None, "0", "auto") else n_gpu_layers,
        ]
        if any(value is not None for value in asked):
            raise typer.BadParameter(
                "it leaves no GPU for what the other options ask.", param_hint="--no-gpu"
            )
        return {"backend": "cpu" if backend == "auto" else backend}
    layers: int | None = None
    if n_gpu_layers not in (None, "auto"):
        try:
            layers = int(str(n_gpu_layers))
        except ValueError:
            layers = -1
        if layers < 0:
            raise typer.BadParameter(f"'{n_gpu_layers}' is neither a number nor auto.", param_hint="-ngl")
    return {
        "backend": backend,
        "device": [name.strip() for name in device.split(",")] if device else None,
        "vram_budget": vram_budget,
        "n_gpu_layers": layers,
        "gpu_index": gpu_index,
        "split_neurons": not disable_gpu_index,
        "plan_anew": reset_gpu_index,
    }


def check_type(name: str) -> None:
    """Wrong usage unless `name` is a --type of convert and quantize."""
    from hotset.errors import InvalidRequestError
    from hotset.formats.requantize import target_of

    try:
        target_of(name)
    except InvalidRequestError as error:
        raise typer.BadParameter(f"{error}.", param_hint="--type") from None
