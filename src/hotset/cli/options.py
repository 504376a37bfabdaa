"""Options of several subcommands, spelled for users of llama.cpp. Each is declared here once.

Options that belong together form a group; groups about loading a model make its LoadSettings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

from hotset.backends.registry import check_device, device_names, device_words
from hotset.cli.values import OptionType, one_of, type_of
from hotset.load_parameters import LOAD_PARAMETERS
from hotset.parameters import Parameter, size
from hotset.sampling_parameters import FORM, OPTIONS, PARAMETERS

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.reporter import Reporter
    from hotset.settings import LoadSettings

_TEXT = "Input and output"
_LLAMA = "As llama.cpp has it"


def option(
    names: str,
    help: str,
    panel: str | None = None,
    *,
    kind: OptionType | None = None,
    usual: str = "",
    **more: Any,
) -> typer.models.OptionInfo:
    """Return an option. kind: the type of its value. usual: its default as the help shows it."""
    if kind is not None:
        more = {"parser": kind, "metavar": kind.word, "autocompletion": kind.complete} | more
    more = {"help": help, "rich_help_panel": panel, "show_default": usual or True} | more
    info: typer.models.OptionInfo = typer.Option(*names.split(), **more)
    return info


def _usual(parameter: Parameter) -> str:
    """Return the default of a parameter as the help shows it."""
    if parameter.usual or isinstance(parameter.default, bool | tuple | None):
        return parameter.usual
    if parameter.kind is size:
        return f"{parameter.default:g}G"
    return parameter.default if isinstance(parameter.default, str) else f"{parameter.default:g}"


FILE: dict[str, Any] = {"exists": True, "dir_okay": False}
"""Of an option that names a file to read."""
_MADE_FOLDER: dict[str, Any] = {"exists": False, "dir_okay": True, "file_okay": False}


def load_option(name: str, note: str = "", **more: Any) -> typer.models.OptionInfo:
    """Return the option of a load setting. note: more sentences of help."""
    one = LOAD_PARAMETERS[name]
    paths = FILE if one.kind is Path else {}
    own = {"kind": type_of(one), "usual": _usual(one), **paths} | more
    return option(one.option, one.summary + note, one.panel, **own)


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
        help="Paths, names, or a folder of models. Without one: all models of the store, each loaded when a "
        "request names it.",
        autocompletion=_model_names,
    ),
]

Json = Annotated[bool, option("--json", "Print JSON.")]


def _layers_or_auto(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise typer.BadParameter(f"it must be auto or a whole number, not '{text}'.", param_hint="-ngl")
    return int(text)


def _activation(text: str) -> str:
    from hotset.model.activation import parse_activation

    parse_activation(text)
    return text


def _several() -> str:
    """Return an example of several devices."""
    numbered = (word.removesuffix("[:N]") for word in device_words() if word.endswith("[:N]"))
    return ",".join(f"{word}:{i}" for word in [*numbered][:1] for i in range(2))


def _device(text: str) -> str:
    """Return the names of devices in hotset's spelling. Raises InvalidRequestError."""
    names = device_names(text)
    for name in names.split(","):
        check_device(name.strip(), "it")
    return names


Threads = Annotated[int | None, load_option("n_threads")]
ContextSize = Annotated[int | None, load_option("n_ctx")]
Activation = Annotated[str | None, load_option("activation", kind=OptionType("TEXT", _activation))]
Sparsity = Annotated[str | None, load_option("sparsity")]
Predictor = Annotated[str | None, load_option("predictor")]
_DEVICES = f" One of {', '.join(device_words())}; several: {_several()}; list prints this machine's devices."
DeviceNames = Annotated[str | None, load_option("device", _DEVICES, kind=OptionType("DEVICE", _device))]
_KINDS: dict[Any, Any] = {
    bool: bool, int: int | None, float: float | None, Path: Path | None, size: float | None
}  # fmt: skip
_LOAD_OPTIONS: dict[str, Any] = {
    one.name: Annotated[_KINDS.get(one.kind, str | None), load_option(one.name)]
    for one in LOAD_PARAMETERS.values()
    if one.option
} | {
    "activation": Activation,
    "device": DeviceNames,
    "n_gpu_layers": Annotated[
        int | None, load_option("n_gpu_layers", kind=OptionType("N|auto", _layers_or_auto, ends=(0, None)))
    ],
    "draft": Annotated[str | None, load_option("draft", metavar="MODEL")],
    "lora": Annotated[list[str] | None, load_option("lora", metavar="FILE[:SCALE]")],
    "chat_template": Annotated[str | None, load_option("chat_template", metavar="NAME|TEXT")],
    "cache_dir": Annotated[Path | None, load_option("cache_dir", **_MADE_FOLDER)],
}  # fmt: skip
"""Load setting → annotation of its option."""


def _tensor_type(text: str) -> str:
    from hotset.formats.requantize import target_of

    target_of(text)
    return text


TENSOR_TYPE = OptionType("TYPE", _tensor_type)
TensorTypes = Annotated[
    list[str] | None,
    option(
        "--tensor-type",
        "Type of the matrices whose names match a regular expression; repeatable, the first wins.",
        metavar="PATTERN=TYPE",
    ),
]
LONGEST = 512  # tokens of a sequence in an observation
OBSERVED = 128  # tokens at a time: the values of their neurons, in all layers, are in memory
SequenceSize = Annotated[int | None, option("--ctx-size -c", "Tokens of a sequence.", min=2, max=LONGEST)]
ChatTemplateFile = Annotated[
    Path | None,
    option("--chat-template-file", "The same, from a file in Jinja.", _TEXT, **FILE),
]
Session = Annotated[
    Path | None,
    option(
        "--session",
        "File that keeps the conversation and its cache between runs.",
        LOAD_PARAMETERS["cache_dir"].panel,
        dir_okay=False,
    ),
]

# Options of llama.cpp for which hotset has another option.
CpuMoe = Annotated[bool, option("--cpu-moe -cmoe", "The CPU computes all experts.", _LLAMA, hidden=True)]
NCpuMoe = Annotated[
    int | None,
    option(
        "--n-cpu-moe -ncmoe", "The CPU computes as many experts as N layers have.", _LLAMA, min=0, hidden=True
    ),
]
OverrideTensor = Annotated[
    list[str] | None,
    option(
        "--override-tensor -ot",
        "The CPU computes the experts of the layers that match, such as exps=CPU.",
        _LLAMA,
        metavar="PATTERN=CPU",
        hidden=True,
    ),
]

Alias = Annotated[
    list[str] | None, option("--alias -a", "Name of the model in requests; repeatable.", "Server")
]
Parallel = Annotated[int, load_option("max_sequences", usual="")]
Contexts = Annotated[int, load_option("n_seqs", usual="")]


def scale_option(names: str, help: str, **more: Any) -> typer.models.OptionInfo:
    """Return an option about several machines."""
    return option(names, help, "Several machines (needs the extras serve and scale)", **more)


RayAddress = Annotated[
    str | None,
    scale_option("--ray", "Address of a Ray cluster; auto: this machine's.", show_default="start one"),
]
Stages = Annotated[
    str | None, scale_option("--stages", "Split the model over machines: HOST:LAYERS,HOST:LAYERS or auto.")
]

File = Annotated[
    Path | None,
    option(
        "--file -f",
        "File with the prompt, or with a text that follows it; - is the standard input.",
        _TEXT,
        allow_dash=True,
        **FILE,
    ),
]
System = Annotated[str | None, option("--system -sys", "System message of the chat template.", _TEXT)]
Raw = Annotated[bool, option("--raw", "Continue the prompt without a chat template.", _TEXT)]
ParseSpecial = Annotated[
    bool,
    option(
        "--parse-special/--no-parse-special",
        "Without a chat template: read special tokens in the prompt as tokens.",
        _TEXT,
    ),
]
JsonAnswer = Annotated[bool, option("--json", "Print one JSON object: text, tokens, speeds.", _TEXT)]

Stats = Annotated[bool, option("--stats", "At the end, print what each layer computed and read.", _TEXT)]


def _sampling(name: str, note: str = "", **more: Any) -> typer.models.OptionInfo:
    """Return the option of a sampling parameter. note: how the option takes a value."""
    parameter = PARAMETERS[name]
    own = {"kind": type_of(parameter), "usual": _usual(parameter)} | more
    return option(parameter.option, parameter.summary + note, parameter.panel, **own)


ReasoningBudget = Annotated[int | None, _sampling("reasoning_budget", metavar="N")]
ReasoningBudgetMessage = Annotated[str | None, _sampling("reasoning_budget_message", metavar="TEXT")]
_SAMPLING_OPTIONS: dict[str, Any] = {
    one.name: Annotated[_KINDS[one.kind], _sampling(one.name)]
    for one in PARAMETERS.values()
    if one.kind is not None and one.option
} | {
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
    option("--grammar-file", "The same, from a file.", FORM, **FILE),
]


# -- groups: parameters of a subcommand; `spread` shows their options -------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options for loading a model: the base of all such groups."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # the fields of `_with`

    def fields(self) -> dict[str, Any]:
        """Return the fields of LoadSettings that these options set."""
        values = {name: getattr(self, name, None) for name in LOAD_PARAMETERS}
        return {name: value for name, value in values.items() if value is not None}

    def check(self) -> None:
        """Raise for wrong values and missing adapters, before a subcommand looks for its model."""
        settings = self.settings()
        if settings.lora:
            from hotset.loader.adapters import check_adapter

            for adapter, _ in settings.loras:
                check_adapter(adapter)

    def settings(self, **more: Any) -> LoadSettings:
        """Return the LoadSettings. more: fields that no option of this group sets."""
        from hotset.settings import LoadSettings

        return LoadSettings(**self.fields() | more)


_Group = TypeVar("_Group", bound=LoadOptions)


def _with(*names: str) -> Callable[[type[_Group]], type[_Group]]:
    """Return a decorator that makes a dataclass, with a field for the option of each of these settings."""

    def decorate(group: type[_Group]) -> type[_Group]:
        group.__annotations__ = {name: _LOAD_OPTIONS[name] for name in names} | group.__annotations__
        for name in names:
            setattr(group, name, False if LOAD_PARAMETERS[name].kind is bool else None)
        return dataclass(frozen=True, kw_only=True)(group)

    return decorate


@_with("activation", "sparsity", "predictor", "profile", "thresholds", "sparse_prompts", "ram_budget")
class SparsityOptions(LoadOptions):
    """Options for the computed neurons of a model, and for the memory that they take."""


@_with("device", "vram_budget", "n_gpu_layers", "gpu_index", "reset_gpu_index", "split")
class PlacementOptions(LoadOptions):
    """Options for the parts of a model on GPUs."""


@_with("kv_type")
class CacheTypeOptions(LoadOptions):
    """The types of keys and values in the KV cache."""

    cache_type_v: Annotated[
        str | None,
        option(
            "--cache-type-v -ctv", "Type of the values.", "Engine", usual="the type of the keys",
            kind=one_of(*LOAD_PARAMETERS["kv_type"].listed),
        ),
    ] = None  # fmt: skip

    def fields(self) -> dict[str, Any]:
        keys, values = self.kv_type or LOAD_PARAMETERS["kv_type"].default, self.cache_type_v
        own = {} if values in (None, keys) else {"kv_type": f"{keys}/{values}"}
        return super().fields() | own


@_with("mmproj", "no_mmproj", "image_max_tokens", "image_cache")
class ImageOptions(LoadOptions):
    """Options for a model's images."""


@_with("n_ctx", "n_seqs", "max_batch", "n_threads")
class PlanOptions(ImageOptions, PlacementOptions, SparsityOptions, CacheTypeOptions):
    """Options for a plan: the computed neurons and their placement."""


@_with("speculate", "draft", "draft_max", "lookup")
class SpeculationOptions(LoadOptions):
    """Options for drafted tokens, of which a step verifies several."""

    @property
    def asks_for_drafts(self) -> bool:
        return bool(self.lookup or self.draft) or self.speculate not in (None, "off")


@_with("cache_dir", "cache_disk")
class PromptCacheOptions(LoadOptions):
    """Options for the cache of finished answers on the disk."""

    def check_cache_disk(self, folder: str = "--cache-dir", *, has_folder: bool = False) -> None:
        """Raise BadParameter for a size without a directory. folder: the options that name a directory."""
        if self.cache_disk is not None and self.cache_dir is None and not has_folder:
            raise typer.BadParameter(f"it requires {folder}.", param_hint="--cache-disk")


@_with("lora")
class BenchOptions(SpeculationOptions, PlacementOptions, SparsityOptions):
    """Options for loading a model, except the ones that a bench varies."""


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


@_with("n_threads", "lora")
class ChunkOptions(CacheTypeOptions, SparsityOptions, PlacementOptions):
    """Options for loading a model, except the size of its context."""

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
        layers = self._cpu_experts()
        return super().fields() | ({"cpu_experts": layers} if layers else {})


@dataclass(frozen=True, kw_only=True)
class ComparedOptions(ChunkOptions):
    """Options for loading a model, whose thresholds may be for another side of a comparison."""

    def check(self) -> None:
        """Check the options, as LoadOptions.check; with thresholds, the subcommand does it."""
        if self.thresholds is None:
            super().check()


@_with("n_ctx")
class ModelOptions(ChunkOptions):
    """How a model is loaded."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions(ModelOptions):
    """Options for loading a model that answers several requests at once."""

    max_sequences: Parallel = 16
    n_seqs: Contexts = 4


@_with("chat_template")
class TemplateOptions(LoadOptions):
    """A chat template that replaces the template of the file."""

    chat_template_file: ChatTemplateFile = None

    def fields(self) -> dict[str, Any]:
        from hotset.files import read_small_text
        from hotset.text.chat import MAX_SOURCE_CHARS

        if self.chat_template_file is None:
            return super().fields()
        if self.chat_template is not None:
            raise typer.BadParameter(
                "it cannot be combined with --chat-template.", param_hint="--chat-template-file"
            )
        return super().fields() | {
            "chat_template": read_small_text(self.chat_template_file, MAX_SOURCE_CHARS)
        }


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(ImageOptions, TemplateOptions, PromptCacheOptions, SpeculationOptions, ModelOptions):
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
                raise typer.BadParameter("it requires --stages.", param_hint="--ray")
            from hotset.api import load

            return load(loaded_by(model, path), settings, progress=progress)
        from hotset.scale.cluster import check_installed

        check_not_created(model, "--stages")
        check_installed("zmq")
        from hotset.scale.stages import load_staged

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
        """Return the arguments of Model.generate for the given options. Raises InvalidRequestError."""
        from hotset.engine.sampler import SamplingParams

        given = {name: getattr(self, name) for name in OPTIONS} | {
            "dry_sequence_breakers": _breakers(self.dry_sequence_breakers),
            "logit_bias": _logit_bias(self.logit_bias or []) or None,
            "stop": tuple(self.stop) if self.stop else None,
            "ignore_eos": self.ignore_eos or None,
            "json_schema": _json_schema(self.json_schema),
            "grammar": self._grammar(),
        }
        found = {key: value for key, value in given.items() if value is not None}
        SamplingParams(**found)  # raises for values that exclude one another
        return found

    def _grammar(self) -> str | None:
        text: str | None = self.grammar
        if self.grammar_file is None:
            return text
        if text is not None:
            raise typer.BadParameter("it cannot be combined with --grammar.", param_hint="--grammar-file")
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
    n_threads: Threads = None
    activation: Activation = None
    device: DeviceNames = "cpu"

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"sparsity": "exact", "max_batch": OBSERVED}


@_with("sparsity", "predictor")
class TraceOptions(ObservationOptions):
    """Options for running a model to observe it in the mode that it would choose."""

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"sparsity": self.sparsity, "predictor": self.predictor}


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
        for group in made.values():
            if isinstance(group, LoadOptions):
                group.check()
        subcommand(**given, **made)

    signature = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters.values()]
    called.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in signature}
    called.__name__, called.__doc__ = subcommand.__name__, subcommand.__doc__
    return called
