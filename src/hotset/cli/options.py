"""Options of several subcommands, spelled for users of llama.cpp. Each is declared here once.

Options that belong together form a group; groups about loading a model make its LoadSettings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from hotset.backends.registry import device_words
from hotset.cli.spellings import device_names
from hotset.sampling_parameters import FORM, OPTIONS, PARAMETERS

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.reporter import Reporter
    from hotset.settings import LoadSettings

_ENGINE, _TEXT, _GPU = "Engine", "Input and output", "GPU"
_LLAMA = "As llama.cpp has it"
_SPECULATION = "Speculative decoding"
_CACHE = "Prompt cache on disk"


def _option(names: str, help: str, panel: str | None = None, **more: Any) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(*names.split(), help=help, rich_help_panel=panel, **more)
    return info


# A shell may evaluate a completion (typer's script for zsh does), and strangers can name files.
_PLAIN_NAME = re.compile(r"[\w.:/@+ ()-]+")


def _model_names(incomplete: str) -> list[str]:
    """Return names of the store and the catalogue for a shell, which completes files if no name fits."""
    from hotset.storage import catalogue, on_this_machine

    known = [*(model.name for model in on_this_machine()), *(entry.name for entry in catalogue.ENTRIES)]
    return sorted({name for name in known if name.startswith(incomplete) and _PLAIN_NAME.fullmatch(name)})


MODEL_HELP = "A path, a name ('hotset list --all'), or hf:owner/repository[:file]."
_MODEL: dict[str, Any] = {
    "metavar": "MODEL",
    "help": f"{MODEL_HELP} Also as -m MODEL.",
    "autocompletion": _model_names,
}
ModelName = Annotated[str, typer.Argument(show_default=False, **_MODEL)]
OptionalModel = Annotated[str | None, typer.Argument(**_MODEL)]
Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Paths, names, or a folder; default: every model of the store, loaded when requests name it.",
        autocompletion=_model_names,
    ),
]

Json = Annotated[bool, _option("--json", "Print JSON.")]

Threads = Annotated[
    int | None, _option("--threads -t", "Threads; default: the usable cores.", _ENGINE, min=1)
]
ContextSize = Annotated[
    int | None,
    _option(
        "--ctx-size -c",
        "Tokens of prompt and answer together; default: the model's own, if its cache fits in a quarter of "
        "the free memory; on a GPU 4096 at most.",
        _ENGINE,
        min=1,
    ),
]
LONGEST = 512  # tokens of a sequence in an observation
OBSERVED = 128  # tokens at a time: the values of their neurons, in all layers, are in memory
SequenceSize = Annotated[int | None, _option("--ctx-size -c", "Tokens of a sequence.", min=2, max=LONGEST)]
CacheType = Annotated[
    str, _option("--cache-type --cache-type-k -ctk", "Type of the KV cache: f16, q8_0 or q4_0.", _ENGINE)
]
ValueType = Annotated[
    str | None,
    _option("--cache-type-v -ctv", "Type of the values, where it is not that of the keys.", _ENGINE),
]
Activation = Annotated[
    str | None, _option("--activation", "Override the FFN's activation, such as relu.", _ENGINE)
]
Sparsity = Annotated[
    str | None,
    _option(
        "--sparsity",
        "dense, exact, predicted or threshold; default: the fastest that the file is made for.",
        _ENGINE,
    ),
]
Predictor = Annotated[
    str | None, _option("--predictor", "mlp[:TYPE] or svd[:RANK[:TYPE]]; implies predicted.", _ENGINE)
]
ProfileFile = Annotated[
    Path | None,
    _option(
        "--profile",
        "From 'hotset sparse profile': its hot neurons are always computed.",
        _ENGINE,
        dir_okay=False,
    ),
]
ThresholdsFile = Annotated[
    Path | None,
    _option(
        "--thresholds",
        "From 'hotset sparse calibrate'; default: the file beside the model.",
        _ENGINE,
        dir_okay=False,
    ),
]
SparsePrompts = Annotated[
    bool, _option("--sparse-prompts", "Apply thresholds to prompts too, not to answers alone.", _ENGINE)
]

Speculate = Annotated[
    str | None,
    _option("--speculate", "What drafts tokens: off (the default), ngram, draft, self or mtp.", _SPECULATION),
]
DraftModel = Annotated[
    str | None,
    _option(
        "--draft", "A smaller model with the same vocabulary, that drafts.", _SPECULATION, metavar="MODEL"
    ),
]
DraftMax = Annotated[
    int, _option("--draft-max", "Tokens drafted at a time at most.", _SPECULATION, min=1, max=16)
]
LookupFile = Annotated[
    Path | None,
    _option("--lookup", "A text to look n-grams up in, too.", _SPECULATION, exists=True, dir_okay=False),
]

LoraFiles = Annotated[
    list[str] | None,
    _option(
        "--lora",
        "An adapter, FILE[:SCALE]: a GGUF file or a folder of PEFT's; repeatable.",
        _ENGINE,
        metavar="FILE[:SCALE]",
    ),
]

CacheDir = Annotated[
    Path | None,
    _option(
        "--cache-dir", "Keep the prompt cache in this directory, over restarts.", _CACHE, file_okay=False
    ),
]
CacheDisk = Annotated[
    str | None,
    _option("--cache-disk", "Most bytes in that directory: 500M; default: 20G.", _CACHE, metavar="SIZE"),
]
ChatTemplateText = Annotated[
    str | None,
    _option(
        "--chat-template",
        "In place of the file's template: a name such as chatml, gemma or llama3, or a text in Jinja.",
        _TEXT,
        metavar="NAME|TEXT",
    ),
]
ChatTemplateFile = Annotated[
    Path | None,
    _option("--chat-template-file", "The same, from a file in Jinja.", _TEXT, exists=True, dir_okay=False),
]
Session = Annotated[
    Path | None,
    _option(
        "--session",
        "A file that keeps the conversation and its cache: go on with it, and write it at the end.",
        _CACHE,
        dir_okay=False,
    ),
]

DeviceNames = Annotated[
    str | None,
    _option(
        "--device",
        f"{', '.join(device_words())}; several: cuda:0,cuda:1; list prints those of this machine.",
        _GPU,
        metavar="DEVICE",
    ),
]
VramBudget = Annotated[
    float | None,
    _option(
        "--vram-budget", "GiB of each GPU to use, KV cache included; default, or -1: what is free.", _GPU
    ),
]
GpuLayers = Annotated[
    str | None,
    _option(
        "--n-gpu-layers -ngl",
        "How many layers, the last ones, are on the GPU; default: auto.",
        _GPU,
    ),
]
GpuIndexFile = Annotated[
    Path | None,
    _option(
        "--gpu-index", "A file that names the neurons to put on the GPU.", _GPU, exists=True, dir_okay=False
    ),
]
ResetGpuIndex = Annotated[
    bool, _option("--reset-gpu-index", "Plan the placement anew, even if there is one.", _GPU)
]
SplitOption = Annotated[
    str,
    _option(
        "--split",
        "What devices and CPU share: layers, neurons (or experts, of layers without room for all), or auto.",
        _GPU,
    ),
]
DisableGpuIndex = Annotated[bool, _option("--disable-gpu-index", "The same as --split layers.", _GPU)]
RamBudget = Annotated[
    float | None,
    _option("--ram-budget", "GiB of memory in all; weights beyond it are read from disk as needed.", _ENGINE),
]

# Options of llama.cpp for which hotset has another option.
CpuMoe = Annotated[bool, _option("--cpu-moe -cmoe", "The CPU computes all experts.", _LLAMA, hidden=True)]
NCpuMoe = Annotated[
    int | None,
    _option(
        "--n-cpu-moe -ncmoe", "The CPU computes as many experts as N layers have.", _LLAMA, min=0, hidden=True
    ),
]
OverrideTensor = Annotated[
    list[str] | None,
    _option(
        "--override-tensor -ot",
        "PATTERN=CPU, such as exps=CPU: the same for the layers whose experts match.",
        _LLAMA,
        metavar="PATTERN=CPU",
        hidden=True,
    ),
]

Alias = Annotated[
    list[str] | None, _option("--alias -a", "What the model is called in requests; repeatable.", "Server")
]
Parallel = Annotated[int, _option("--parallel -np", "Answers computed at the same time.", "Server", min=1)]
Contexts = Annotated[int, _option("--contexts", "Size of the KV cache, in full contexts.", "Server", min=1)]


def scale_option(names: str, help: str, **more: object) -> typer.models.OptionInfo:
    """Return an option about several machines."""
    return _option(names, help, "Several machines (needs the extras serve and scale)", **more)


RayAddress = Annotated[
    str | None, scale_option("--ray", "Address of a Ray cluster; auto: this machine's; default: start one.")
]
Stages = Annotated[
    str | None, scale_option("--stages", "Split the model over machines: HOST:LAYERS,HOST:LAYERS or auto.")
]

File = Annotated[
    Path | None,
    _option(
        "--file -f",
        "Read the prompt, or what follows it, from a file; -: the standard input.",
        _TEXT,
        dir_okay=False,
    ),
]
System = Annotated[str | None, _option("--system -sys", "System message of the chat template.", _TEXT)]
Raw = Annotated[bool, _option("--raw", "Continue the prompt as it stands, without a chat template.", _TEXT)]
ParseSpecial = Annotated[
    bool,
    _option(
        "--parse-special/--no-parse-special",
        "Without a chat template: read special tokens in the prompt as tokens.",
        _TEXT,
    ),
]
JsonAnswer = Annotated[bool, _option("--json", "Print one JSON object: text, tokens, speeds.", _TEXT)]

Stats = Annotated[bool, _option("--stats", "At the end, print what each layer computed and read.", _TEXT)]


def _sampling(name: str, note: str = "", **more: Any) -> typer.models.OptionInfo:
    """Return the option of a sampling parameter. note: how the option takes a value."""
    parameter = PARAMETERS[name]
    has_default = parameter.kind is not None and parameter.default is not None
    default = f" Default: {parameter.default:g}." if has_default else ""
    return _option(parameter.option, f"{parameter.summary}{note}{default}", parameter.panel, **more)


ReasoningBudget = Annotated[int | None, _sampling("reasoning_budget", metavar="N")]
ReasoningBudgetMessage = Annotated[str | None, _sampling("reasoning_budget_message", metavar="TEXT")]
_SAMPLING_OPTIONS: dict[str, Any] = {
    one.name: Annotated[one.kind | None, _sampling(one.name)]
    for one in PARAMETERS.values()
    if one.kind is not None and one.option
} | {
    "max_tokens": Annotated[int | None, _sampling("max_tokens", min=-1)],
    "dry_sequence_breakers": Annotated[
        list[str] | None, _sampling("dry_sequence_breakers", " Repeatable; none: no defaults.")
    ],
    "logit_bias": Annotated[
        list[str] | None, _sampling("logit_bias", " ID+BIAS or ID-BIAS, such as 15043-1; repeatable.")
    ],
    "stop": Annotated[list[str] | None, _sampling("stop", " Repeatable.")],
    "ignore_eos": Annotated[bool, _sampling("ignore_eos")],
    "reasoning_budget": ReasoningBudget,
    "reasoning_budget_message": ReasoningBudgetMessage,
    "json_schema": Annotated[str | None, _sampling("json_schema", " A file, or its text.")],
    "grammar": Annotated[str | None, _sampling("grammar")],
}
"""Sampling parameter → annotation of its option."""

GrammarFile = Annotated[
    Path | None,
    _option("--grammar-file", "The same, from a file.", FORM, exists=True, dir_okay=False),
]


# -- groups: parameters of a subcommand; `spread` shows their options -------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options for loading a model: the base of all such groups."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of LoadSettings that these options set."""
        return {}

    def settings(self, **more: Any) -> LoadSettings:
        """Return the LoadSettings. more: fields that no option of this group sets."""
        from hotset.settings import LoadSettings

        return LoadSettings(**self.fields(), **more)


@dataclass(frozen=True, kw_only=True)
class SparsityOptions(LoadOptions):
    """Options for the computed neurons of a model, and for the memory that they take."""

    activation: Activation = None
    sparsity: Sparsity = None
    predictor: Predictor = None
    profile: ProfileFile = None
    thresholds: ThresholdsFile = None
    sparse_prompts: SparsePrompts = False
    ram_budget: RamBudget = None

    def fields(self) -> dict[str, Any]:
        names = ("activation", "sparsity", "predictor", "profile", "thresholds", "sparse_prompts")
        own = {name: getattr(self, name) for name in (*names, "ram_budget")}
        return super().fields() | own


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(LoadOptions):
    """Options for the parts of a model on GPUs."""

    device: DeviceNames = None
    vram_budget: VramBudget = None
    n_gpu_layers: GpuLayers = None
    gpu_index: GpuIndexFile = None
    reset_gpu_index: ResetGpuIndex = False
    split: SplitOption = "auto"
    disable_gpu_index: DisableGpuIndex = False

    def fields(self) -> dict[str, Any]:
        layers: int | None = None
        if self.n_gpu_layers not in (None, "auto"):
            try:
                layers = int(str(self.n_gpu_layers))
            except ValueError:
                layers = -1
            if layers < 0:
                raise typer.BadParameter(
                    f"'{self.n_gpu_layers}' is neither a number nor auto.", param_hint="-ngl"
                )
        return super().fields() | {
            "device": device_names(self.device) if self.device else None,
            "vram_budget": self.vram_budget,
            "n_gpu_layers": layers,
            "gpu_index": self.gpu_index,
            "split": "layers" if self.disable_gpu_index else self.split,
            "reset_gpu_index": self.reset_gpu_index,
        }


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlacementOptions, SparsityOptions):
    """Options for a plan: the computed neurons and their placement."""


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(LoadOptions):
    """Options for drafted tokens, of which a step verifies several."""

    speculate: Speculate = None
    draft: DraftModel = None
    draft_max: DraftMax = 8
    lookup: LookupFile = None

    def fields(self) -> dict[str, Any]:
        names = ("speculate", "draft", "draft_max", "lookup")
        return super().fields() | {name: getattr(self, name) for name in names}

    @property
    def asks_for_drafts(self) -> bool:
        return bool(self.lookup or self.draft) or self.speculate not in (None, "off")


@dataclass(frozen=True, kw_only=True)
class PromptCacheOptions(LoadOptions):
    """Options for the cache of finished answers on the disk."""

    cache_dir: CacheDir = None
    cache_disk: CacheDisk = None

    def fields(self) -> dict[str, Any]:
        size = {} if self.cache_disk is None else {"cache_disk": self.cache_disk}
        return super().fields() | {"cache_dir": self.cache_dir} | size

    def check_cache_disk(self, folder: str = "--cache-dir", *, has_folder: bool = False) -> None:
        """Raise BadParameter for a size without a directory. folder: the options that name a directory."""
        if self.cache_disk is not None and self.cache_dir is None and not has_folder:
            raise typer.BadParameter(
                f"it is of a directory; name that by {folder}.", param_hint="--cache-disk"
            )


@dataclass(frozen=True, kw_only=True)
class LoraOptions(LoadOptions):
    """Options for the adapters of a model."""

    lora: LoraFiles = None

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"lora": self.lora}


@dataclass(frozen=True, kw_only=True)
class BenchOptions(SpeculationOptions, LoraOptions, PlacementOptions, SparsityOptions):
    """Options for loading a model, except the ones that a bench varies."""


def kv_type(keys: str, values: str | None) -> str:
    """Return the setting `kv_type`: one type for keys and values, or one for each. Raises BadParameter."""
    from hotset.model.cost import KVType

    known, one = "f16, q8_0 and q4_0", [name for name in get_args(KVType) if "/" not in name]
    if keys not in one and (values is not None or set(keys.split("/")) - set(one)):
        raise typer.BadParameter(f"'{keys}' is none of {known}.", param_hint="--cache-type")
    if values is not None and values not in one:
        raise typer.BadParameter(f"'{values}' is none of {known}.", param_hint="--cache-type-v")
    return keys if values in (None, keys) else f"{keys}/{values}"


_MOST_LAYERS = 1024  # layers for which a pattern is tested


def _layers_of(override: str) -> set[int]:
    """Return the layers whose experts an --override-tensor puts on the CPU."""
    pattern, _, place = override.rpartition("=")
    try:
        matches = re.compile(pattern).search
    except re.error as error:
        raise typer.BadParameter(f"'{pattern}' does not compile: {error}.", param_hint="-ot") from None
    parts = ("up", "gate", "down", "gate_up")
    found = {
        layer
        for layer in range(_MOST_LAYERS)
        if any(matches(f"blk.{layer}.ffn_{part}_exps.weight") for part in parts)
    }
    if place != "CPU" or not found:
        raise typer.BadParameter(
            f"'{override}' must be PATTERN=CPU with a pattern of experts, such as exps=CPU. --n-gpu-layers "
            "places layers, --gpu-index neurons, and --vram-budget bounds all of it.",
            param_hint="-ot",
        )
    return found


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoraOptions, SparsityOptions, PlacementOptions):
    """Options for loading a model, except the size of its context."""

    threads: Threads = None
    cache_type: CacheType = "f16"
    cache_type_v: ValueType = None
    cpu_moe: CpuMoe = False
    n_cpu_moe: NCpuMoe = None
    override_tensor: OverrideTensor = None

    def _cpu_experts(self) -> Sequence[int]:
        """Return the layers whose experts llama.cpp's options leave to the CPU."""
        if self.cpu_moe:
            return range(_MOST_LAYERS)
        found = set(range(min(self.n_cpu_moe or 0, _MOST_LAYERS)))
        for given in self.override_tensor or ():
            for one in given.split(","):
                found |= _layers_of(one)
        layers = range(len(found))
        return layers if found == set(layers) else tuple(sorted(found))

    def fields(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "n_threads": self.threads,
            "kv_type": kv_type(self.cache_type, self.cache_type_v),
        }
        if layers := self._cpu_experts():
            own["cpu_experts"] = layers
        return super().fields() | own


@dataclass(frozen=True, kw_only=True)
class TemplateOptions(LoadOptions):
    """A chat template that replaces the template of the file."""

    chat_template: ChatTemplateText = None
    chat_template_file: ChatTemplateFile = None

    def fields(self) -> dict[str, Any]:
        from hotset.files import read_small_text
        from hotset.text.chat import MAX_SOURCE_CHARS

        template = self.chat_template
        if self.chat_template_file is not None:
            if template is not None:
                raise typer.BadParameter(
                    "it cannot be combined with --chat-template.", param_hint="--chat-template-file"
                )
            template = read_small_text(self.chat_template_file, MAX_SOURCE_CHARS)
        return super().fields() | {"chat_template": template}


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(TemplateOptions, PromptCacheOptions, SpeculationOptions, ModelOptions):
    """Options for loading a model that generates answers."""


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Options for a model that is split over machines."""

    stages: Stages = None
    ray: RayAddress = None

    def load(self, model: str, path: Path, settings: LoadSettings, progress: Reporter) -> Model:
        """Return the model at a path, or its stages. Each machine opens the stages by the given name.

        A created model is loaded by its name, with its own settings.
        """
        if self.stages is None:
            if self.ray is not None:
                raise typer.BadParameter("it is where --stages are; name these too.", param_hint="--ray")
            from hotset.api import load

            return load(loaded_by(model, path), settings, progress=progress)
        from hotset.scale.cluster import check_installed

        check_installed("zmq")
        from hotset.scale.stages import load_staged

        check_not_created(model, "--stages")
        return load_staged(name_everywhere(model, path), settings, self.stages, self.ray)


def loaded_by(model: str, path: Path) -> str | Path:
    """Return the argument of `load`: a created model's name, which has settings, or another model's file."""
    from hotset.storage import find_created

    return path if find_created(model) is None else model


def check_not_created(model: str, option: str) -> None:
    """Raise BadParameter for a created model, which other machines do not know."""
    from hotset.storage import find_created

    if (found := find_created(model)) is not None:
        raise typer.BadParameter(
            f"'{found[0]}' is a created model, which other machines do not know: name '{found[1].base}', of "
            "which it is made.",
            param_hint=option,
        )


def name_everywhere(model: str, path: Path) -> str:
    """Return how each machine finds a model: by the given name, or by a path that is equal on all."""
    return str(path.resolve()) if Path(model).is_file() else model


_SamplingFields = make_dataclass(
    "_SamplingFields",
    [
        (name, kind, False if get_args(kind)[0] is bool else None)
        for name, kind in _SAMPLING_OPTIONS.items()
    ],
    frozen=True, kw_only=True,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(_SamplingFields):  # type: ignore[misc, valid-type]
    """Options for choosing the tokens of an answer and for its end, from the table of parameters."""

    grammar_file: GrammarFile = None

    def params(self) -> dict[str, Any]:
        """Return the arguments of Model.generate for the given options."""
        if self.max_tokens == 0:
            raise typer.BadParameter("an answer has at least one token.", param_hint="-n")
        given = {name: getattr(self, name) for name in OPTIONS} | {
            "dry_sequence_breakers": _breakers(self.dry_sequence_breakers),
            "logit_bias": _logit_bias(self.logit_bias or []) or None,
            "stop": tuple(self.stop) if self.stop else None,
            "ignore_eos": self.ignore_eos or None,
            "json_schema": _json_schema(self.json_schema),
            "grammar": self._grammar(),
        }
        return {key: value for key, value in given.items() if value is not None}

    def _grammar(self) -> str | None:
        text: str | None = self.grammar
        if self.grammar_file is None:
            return text
        if text is not None:
            raise typer.BadParameter("the grammar is given twice.", param_hint="--grammar-file")
        from hotset.cli.console import read_text

        return read_text(self.grammar_file, "--grammar-file")


def _breakers(given: list[str] | None) -> list[str] | None:
    """Return llama.cpp's sequence breakers: given ones replace the defaults, and "none" is dropped."""
    return None if given is None else [one for one in given if one != "none"]


def _json_schema(given: str | None) -> str | None:
    """Return the text of a schema, from a file if the argument is not a schema."""
    if given is None or given.lstrip()[:1] == "{":
        return given
    from hotset.cli.console import read_text

    return read_text(Path(given), "--json-schema")


def _logit_bias(texts: list[str]) -> dict[int, float]:
    bias = {}
    for text in texts:
        match = re.fullmatch(r"(\d+)=?([+-].+)", text)
        try:
            bias[int(match[1])] = float(match[2])  # type: ignore[index]
        except (TypeError, ValueError):
            raise typer.BadParameter(
                f"'{text}' is not ID+BIAS or ID-BIAS, such as 15043-1.", param_hint="--logit-bias"
            ) from None
    return bias


@dataclass(frozen=True, kw_only=True)
class ObservationOptions(LoadOptions):
    """Options for running a model to observe its firing neurons, without the choice of a predictor."""

    n_ctx: SequenceSize = None
    threads: Threads = None
    activation: Activation = None
    device: DeviceNames = "cpu"

    def fields(self) -> dict[str, Any]:
        own = {"n_ctx": self.n_ctx, "n_threads": self.threads, "activation": self.activation}
        return own | {
            "device": device_names(self.device or "cpu"),
            "sparsity": "exact",
            "max_batch": OBSERVED,
        }


def spread(subcommand: Callable[..., None]) -> Callable[..., None]:
    """Return the subcommand with an option for each field of its groups, in the form that typer needs."""
    parameters: dict[str, inspect.Parameter] = {}
    groups: dict[str, tuple[type, tuple[str, ...]]] = {}
    for name, parameter in inspect.signature(subcommand, eval_str=True).parameters.items():
        kind = parameter.annotation
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters[name] = parameter
            continue
        fields = inspect.signature(kind, eval_str=True).parameters
        assert not fields.keys() & parameters.keys(), f"two options of {subcommand.__name__} have one name"
        groups[name] = (kind, tuple(fields))
        parameters |= fields

    def called(**given: Any) -> None:
        made = {
            name: kind(**{field: given.pop(field) for field in fields})
            for name, (kind, fields) in groups.items()
        }
        subcommand(**given, **made)

    signature = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters.values()]
    called.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in signature}
    called.__name__, called.__doc__ = subcommand.__name__, subcommand.__doc__
    return called


def check_type(name: str) -> None:
    """Raise BadParameter unless `name` is a --type of convert and quantize."""
    from hotset.errors import InvalidRequestError
    from hotset.formats.requantize import target_of

    try:
        target_of(name)
    except InvalidRequestError as error:
        raise typer.BadParameter(f"{error}.", param_hint="--type") from None
