"""The options for loading a model, of `hotset.load`, `hotset.plan` and every subcommand."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, get_args, overload

from hotset.backends.base import SAVED_TOKENS
from hotset.backends.registry import (
    CPU,
    REFERENCE,
    Capabilities,
    all_capabilities,
    capabilities_of,
    check_device,
)
from hotset.errors import InvalidRequestError
from hotset.files import expanded
from hotset.model.activation import parse_activation
from hotset.model.cost import KVType
from hotset.parameters import flag, real_number, shown, text, whole_number
from hotset.reporter import Reporter
from hotset.sparsity.modes import asked_mode
from hotset.text import turn_formats

Speculate = Literal["off", "ngram", "draft", "self", "mtp"]
Split = Literal["auto", "layers", "neurons"]
ModelPath = str | os.PathLike[str]  # a file, or the name of a model
Lora = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]  # an adapter, or (adapter, scale)
_MAX_SEQUENCES = 4096  # each has a row of the block table
MOST_DRAFTED = SAVED_TOKENS - 1  # tokens of a draft
LARGEST_SCALE = 1e6  # of an adapter


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """How a model is loaded. Checked on creation: InvalidRequestError says which field is wrong, and why.

    n_ctx: tokens of one conversation, prompt and answers. Default: the model's trained context, or less if
    its cache would take much of the free memory (docs/concepts/memory.md).
    n_threads: threads of the CPU; None: the physical cores that this process may use.
    kv_type: type of keys and values: "f16"; "q8_0" in about half the memory; "q4_0" in about a quarter,
    rotated (docs/guides/kv-cache.md); or "q8_0/q4_0", for keys and for values.

    device: "cpu", which uses no GPU; "cuda:0", "rocm:0", "mps", "xpu" through PyTorch; "vulkan", "vulkan:1"
    without it (docs/guides/vulkan.md); "simulated", a GPU that the CPU simulates, for tests; several as a
    list or as "cuda:0,cuda:1", in the order of their layers. "auto" uses a device if its measured rates make
    it faster than the CPU. "reference" is plain NumPy, slow, that the others are checked against. None uses
    an NVIDIA or AMD GPU if there is one.
    vram_budget: GiB of each device for weights, cache, workspace and context together; None or -1: all that
    is free.
    n_gpu_layers: the number of last layers on the device; None: the planner decides (placement/solver.py).
    gpu_index: a file in PowerInfer's format with the neurons on the device.
    split: "layers" keeps the neurons of a layer together, and on Vulkan its experts too; "neurons" puts all
    layers on devices, and of layers that do not fit the most active neurons, or experts; "auto": the faster
    of these by prediction.
    cpu_experts: numbers of layers. The device keeps only as many experts as the other layers have: the most
    used ones of any layer. The CPU computes the others.
    reset_gpu_index: solve the placement again even if it is known. Model.placement has the result.

    ram_budget: GiB of this machine's memory for program, weights, cache and workspace together. Weights that
    do not fit are read from the file when needed (offload/weight_store.py). Memory of devices does not count.
    None: the file is mapped, or if it is larger than the free memory, the budget is the free memory.

    activation: overrides the FFN activation in the file.
    sparsity: which neurons are computed: "dense", "exact", "predicted" or "threshold" (sparsity/modes.py).
    The default is the fastest mode that keeps the file's meaning.
    predictor: "mlp" or "svd", with their settings (sparsity/predictors.py); implies "predicted".
    profile: a file of `hotset sparse profile`; neurons that fire almost always are computed without
    prediction. Files that these settings need are built once, next to the model.
    thresholds: a file of `hotset sparse calibrate`, by default the one next to the model; implies
    "threshold". sparse_prompts: apply thresholds to prompts too, not only to answers.

    speculate: the source of draft tokens, several of which are verified per step (speculative decoding; the
    text stays the same): "off"; "ngram": the tokens that followed the latest ones earlier in prompt or
    answer; "draft": a smaller model; "self": the model in a sparser mode, which sparsity, predictor and
    thresholds then set for drafts only; "mtp": the file's layer for multi-token prediction.
    draft: the smaller model, as for `load`; implies "draft". draft_max: the most tokens per draft, up to 16.
    lookup: a text file in which n-grams are looked up too; implies "ngram".

    lora: LoRA adapters for the model, one or several: GGUF files or PEFT folders, with ":SCALE" appended if
    the scale is not 1, or as (path, scale). Model.adapters loads and unloads others
    (docs/guides/adapters.md).

    chat_template: replaces the file's template: a name such as "chatml" (text/turn_formats.py), or Jinja.

    cache_dir: a directory for the cache of finished answers, which is used again after a restart
    (docs/guides/prompt-cache.md); None: no such cache. cache_disk: its limit in GiB for all models, or a text
    such as "500M" or "20G"; a server's folder of saved slots has the same limit.

    max_batch: the most tokens computed in one step.
    n_seqs: full contexts that the cache can hold at once; more sequences can run while they are shorter.
    max_sequences: the most sequences that run at once.
    progress: receives reports of long operations; it is ignored when settings are compared.
    """

    n_ctx: int | None = None
    n_threads: int | None = None
    kv_type: KVType = "f16"
    device: Sequence[str] | None = None
    vram_budget: float | None = None
    n_gpu_layers: int | None = None
    gpu_index: str | os.PathLike[str] | None = None
    split: Split = "auto"
    cpu_experts: Sequence[int] = ()
    reset_gpu_index: bool = False
    ram_budget: float | None = None
    activation: str | None = None
    sparsity: str | None = None
    predictor: str | None = None
    profile: str | os.PathLike[str] | None = None
    thresholds: str | os.PathLike[str] | None = None
    sparse_prompts: bool = False
    speculate: Speculate | None = None
    draft: str | os.PathLike[str] | None = None
    draft_max: int = 8
    lookup: str | os.PathLike[str] | None = None
    lora: Lora | Sequence[Lora] | None = None
    chat_template: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    cache_disk: float | str = 20.0
    max_batch: int = 512
    n_seqs: int = 1
    max_sequences: int = 16
    progress: Reporter | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("n_ctx", "n_threads", "max_batch", "n_seqs"):
            self._check(name, whole_number, 1)
        self._check("max_sequences", whole_number, 1, _MAX_SEQUENCES)
        self._check("n_gpu_layers", whole_number, 0)
        self._check("draft_max", whole_number, 1, MOST_DRAFTED)
        for name in ("reset_gpu_index", "sparse_prompts"):
            self._check(name, flag)
        for name in ("activation", "sparsity", "predictor"):
            self._check(name, text)
        for name in ("gpu_index", "profile", "thresholds", "lookup", "cache_dir"):
            self._check(name, _path)
        self._check("vram_budget", _budget)
        self._check("ram_budget", _ram_budget)
        self._check("cache_disk", _disk_size)
        self._check("lora", _loras)
        self._check("device", _devices)
        self._check("cpu_experts", _layers)
        if self.kv_type not in get_args(KVType):
            raise InvalidRequestError(
                f"kv_type must be f16, q8_0, q4_0, or two of them as KEYS/VALUES, not {shown(self.kv_type)}"
            )
        if self.split not in get_args(Split):
            known = ", ".join(get_args(Split))
            raise InvalidRequestError(f"split must be one of {known}, not {shown(self.split)}")
        if self.chat_template is not None:
            self._check("chat_template", lambda name, value: turn_formats.named(text(name, value)))
        if self.activation is not None:
            parse_activation(self.activation)
        asked_mode(self.sparsity, self.predictor, self.thresholds)
        if self.sparse_prompts and not self.asks_for_thresholds:
            raise InvalidRequestError("sparse_prompts requires sparsity='threshold'")
        if self.gpu_index is not None and (self.n_gpu_layers is not None or self.split != "auto"):
            raise InvalidRequestError(
                "gpu_index says which neurons are on the device, and cannot be combined with n_gpu_layers or "
                "`split`"
            )
        if self.is_on_cpu and self.asks_for_a_device:
            raise InvalidRequestError(
                f"device='{','.join(self.device or ())}' cannot be combined with vram_budget, n_gpu_layers, "
                "gpu_index or split='neurons'"
            )
        self._check_undivided()
        self._check_speculation()
        self._check_devices()
        if self.ram_budget is not None and self.is_reference:
            raise InvalidRequestError("device='reference' cannot be combined with ram_budget")

    @property
    def undivided(self) -> tuple[str, str] | None:
        """The setting that needs one processor for the whole model, and the capability that a device needs.

        None if no setting does.
        """
        if self.lora:
            return "lora", "adapters"
        if self.cache_dir is not None:
            return "cache_dir", "prompt_cache"
        return (f"speculate='{self.drafter}'", "speculation") if self.drafter in ("self", "mtp") else None

    def _check_undivided(self) -> None:
        if self.cache_dir is not None and self.is_reference:
            raise InvalidRequestError("cache_dir cannot be combined with device='reference'")
        device = self.device_capabilities
        on_one = self.n_gpu_layers is None and self.split != "neurons" and device is not None
        if self.undivided is None or not self.asks_for_a_device:
            return
        what, capability = self.undivided
        if not (on_one and getattr(device, capability)):
            titles = " or ".join(one.title for one in all_capabilities() if getattr(one, capability))
            others = f", or {titles} that has the whole model" if titles else ""
            raise InvalidRequestError(
                f"{what} needs a model that only the CPU computes{others}; leave it out, or the settings "
                "of devices"
            )

    def _check(self, name: str, checked: Callable[..., Any], *bounds: int) -> None:
        """Replace a given value by its checked plain value; None stays if it is the default."""
        value = getattr(self, name)
        if value is not None or type(self).__dataclass_fields__[name].default is not None:
            object.__setattr__(self, name, checked(name, value, *bounds))

    @property
    def loras(self) -> tuple[tuple[Path, float], ...]:
        """The adapters, each with its scale."""
        return self.lora or ()  # type: ignore[return-value]  # converted when it was checked

    def _check_speculation(self) -> None:
        asked = self.drafter
        if asked not in get_args(Speculate):
            raise InvalidRequestError(
                f"speculate must be one of {', '.join(get_args(Speculate))}, not {shown(asked)}"
            )
        if self.lookup is not None and asked != "ngram":
            raise InvalidRequestError(f"`lookup` requires speculate='ngram', not '{asked}'")
        if (self.draft is not None) != (asked == "draft"):
            raise InvalidRequestError(
                "speculate='draft' requires `draft`, the model that drafts"
                if self.draft is None
                else f"`draft` requires speculate='draft', not '{asked}'"
            )
        if asked == "self":
            self._check_self_drafts()
        if asked != "off" and self.is_reference:
            raise InvalidRequestError(
                "device='reference' cannot be combined with `speculate`: its results depend on the size of "
                "a step, so that drafts could change a text"
            )

    def _check_self_drafts(self) -> None:
        if self.sparsity in ("dense", "exact"):
            raise InvalidRequestError(
                f"speculate='self' cannot be combined with sparsity='{self.sparsity}': it drafts in a "
                "sparser mode, predicted or threshold"
            )
        if self.ram_budget is not None:
            raise InvalidRequestError(
                "speculate='self' cannot be combined with ram_budget: it reads the weights in two modes"
            )

    def verifying(self, has_zeros: bool) -> LoadSettings:
        """Return the settings of the verifying model.

        With `self`, the sparsity settings are only for drafts; otherwise nothing changes. has_zeros: whether
        neurons of the model can be zero.
        """
        if self.drafter != "self":
            return self
        mode = "exact" if has_zeros else "dense"
        return replace(
            self,
            speculate=None,
            sparsity=mode,
            predictor=None,
            thresholds=None,
            profile=None,
            sparse_prompts=False,
        )

    @property
    def drafter(self) -> Speculate:
        """The source of draft tokens, as set or implied."""
        implied: Speculate = "ngram" if self.lookup is not None else "off"
        return self.speculate or ("draft" if self.draft is not None else implied)

    def _check_devices(self) -> None:
        """Raise InvalidRequestError for devices of several backends, and for missing capabilities."""
        device = self.device_capabilities
        if device is None:
            return
        if any(capabilities_of([name]) != device for name in self.device or ()):
            raise InvalidRequestError(
                f"{', '.join(self.device or ())} cannot be combined: devices of one backend compute next to "
                "the CPU and one another; leave out the others"
            )
        if self.ram_budget is not None and not device.ram_budget:
            raise InvalidRequestError(f"ram_budget cannot be combined with {device.title}")

    def layers_on_devices(self, n_layer: int) -> int | None:
        """Return how many of n_layer layers must be on devices; None: the planner decides."""
        return n_layer if self.split == "neurons" and self.n_gpu_layers is None else self.n_gpu_layers

    @property
    def cache_disk_bytes(self) -> int:
        return int(float(self.cache_disk) * 2**30)

    @property
    def is_auto(self) -> bool:
        """Return whether a device is used if it is predicted to be faster than the CPU."""
        return self.device == ("auto",)

    @property
    def is_reference(self) -> bool:
        """Return whether plain NumPy computes."""
        return self.device == (REFERENCE,)

    @property
    def is_on_cpu(self) -> bool:
        """Return whether the device is the processor, by its name."""
        return self.device == (CPU,) or self.is_reference

    @property
    def device_capabilities(self) -> Capabilities | None:
        """Return the capabilities of the named devices; None if none is named, or no layer is on them."""
        if self.device is None or self.is_auto or self.is_on_cpu or self.n_gpu_layers == 0:
            return None
        return capabilities_of(self.device)

    @property
    def asks_for_thresholds(self) -> bool:
        """Return whether the mode threshold is requested, by name or by a file of thresholds."""
        return self.sparsity == "threshold" or self.thresholds is not None

    @property
    def asks_for_a_device(self) -> bool:
        """Return whether a setting requires a device."""
        budget = self.vram_budget is not None or self.gpu_index is not None or self.split == "neurons"
        return (
            budget or bool(self.n_gpu_layers) or not (self.device is None or self.is_auto or self.is_on_cpu)
        )


def _path(name: str, value: Any) -> Path:
    try:
        return Path(value)
    except TypeError:
        raise InvalidRequestError(f"{name} must be a path, not {shown(value)}") from None


def _budget(name: str, value: Any) -> float:
    try:
        budget = real_number(name, value, -1, 2**20)
    except InvalidRequestError:
        budget = 0
    if budget != -1 and not budget > 0:
        raise InvalidRequestError(
            f"a memory budget is a number of GiB above 0, or -1 for all free memory, not {shown(value)}"
        )
    return budget


def _ram_budget(name: str, value: Any) -> float:
    try:
        budget = real_number(name, value, 0, 2**20)
    except InvalidRequestError:
        budget = 0
    if not budget > 0:
        raise InvalidRequestError(f"{name} is a number of GiB above 0, not {shown(value)}")
    return budget


def _loras(name: str, value: Any) -> tuple[tuple[Path, float], ...] | None:
    """Return paths with scales; None for an empty list."""
    is_one = isinstance(value, str | os.PathLike) or (isinstance(value, tuple) and _is_scaled(value))
    each = (value,) if is_one else tuple(value) if isinstance(value, Sequence) else (value,)
    return tuple(_lora(name, one) for one in each) or None


def _is_scaled(value: tuple[Any, ...]) -> bool:
    return len(value) == 2 and isinstance(value[1], int | float)


def _lora(name: str, value: Any) -> tuple[Path, float]:
    scale: Any = 1.0
    if isinstance(value, tuple | list) and len(value) == 2:
        value, scale = value
    elif isinstance(value, str) and not os.path.exists(value):
        path, _, behind = value.rpartition(":")
        with contextlib.suppress(ValueError):
            value, scale = (path, float(behind)) if path else (value, scale)
    if value == "":
        raise InvalidRequestError(f"{name} must be a path, not ''")
    return expanded(_path(name, value)), real_number(
        f"the scale of {name}", scale, -LARGEST_SCALE, LARGEST_SCALE
    )


_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:i?B)?", re.IGNORECASE)
_SIZE_UNITS = {"": 2.0**-30, "K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10}


def _disk_size(name: str, value: Any) -> float:
    """Return GiB, from a number of GiB or a text with a unit (GiB by default)."""
    size: Any = value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        unit = "G" if match[0] == match[1] else match[2].upper()
        size = float(match[1]) * _SIZE_UNITS[unit]
    try:
        found = real_number(name, size, 0, 2**20)
    except InvalidRequestError:
        found = 0
    if not found > 0:
        raise InvalidRequestError(
            f'{name} is GiB above 0, or a text such as "20G" or "500M", not {shown(value)}'
        )
    return found


def _layers(name: str, value: Any) -> Sequence[int]:
    if isinstance(value, range):
        return value
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a list of layers, not {shown(value)}")
    return tuple(whole_number(name, one, 0) for one in value)


def _devices(name: str, value: Any) -> tuple[str, ...] | None:
    """Return the names of devices; None for an empty list."""
    given = value.split(",") if isinstance(value, str) else value
    names = tuple(given) if isinstance(given, Sequence) else (given,)
    found = tuple(text(name, one).strip() for one in names)
    for one in found:
        check_device(one)
    if len(found) > 1 and (alone := {"auto", CPU, REFERENCE}.intersection(found)):
        raise InvalidRequestError(f"the device {min(alone)} cannot be combined with others")
    return found or None


_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")
_Returned = TypeVar("_Returned", covariant=True)


class TakesSettings(Protocol[_Options, _Returned]):
    """A function of a model and LoadSettings, or of a model and the fields of LoadSettings."""

    @overload
    def __call__(self, model: ModelPath, settings: LoadSettings | None, **changes: Any) -> _Returned: ...

    @overload
    def __call__(self, model: ModelPath, *args: _Options.args, **options: _Options.kwargs) -> _Returned: ...


def taking(
    made: Callable[_Options, LoadSettings],
) -> Callable[[Callable[[ModelPath, LoadSettings], _Result]], TakesSettings[_Options, _Result]]:
    """Let f(model, settings) also take the fields of `made`, which is LoadSettings, as keywords.

    So the fields are listed only once, and editors and type checkers know them. Keywords override the fields
    of given settings.
    """

    def decorate(function: Callable[[ModelPath, LoadSettings], _Result]) -> TakesSettings[_Options, _Result]:
        @functools.wraps(function)
        def called(model: ModelPath, settings: LoadSettings | None = None, **options: Any) -> _Result:
            return function(model, replace(settings or LoadSettings(), **options))

        own = inspect.signature(called, follow_wrapped=False)
        model, settings, _ = own.parameters.values()
        fields = inspect.signature(made).parameters.values()
        called.__signature__ = own.replace(parameters=[model, settings, *fields])  # type: ignore[attr-defined]
        return called  # type: ignore[return-value]

    return decorate
