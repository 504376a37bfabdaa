"""The options for loading a model, of `hotset.load`, `hotset.plan` and every subcommand."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, overload

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
from hotset.load_parameters import LOAD_PARAMETERS, KVType, SparsityMode, Speculate, Split
from hotset.model.activation import parse_activation
from hotset.parameters import path, real_number, shown, text, whole_number
from hotset.reporter import Reporter
from hotset.sparsity.modes import asked_mode
from hotset.text import turn_formats

ModelPath = str | os.PathLike[str]  # a file, or the name of a model
Lora = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]  # an adapter, or (adapter, scale)
LARGEST_SCALE = 1e6  # of an adapter


def _default(name: str) -> Any:
    return LOAD_PARAMETERS[name].default


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
    vram_budget: memory of each device for weights, cache, workspace and context together: GiB, or a text such
    as "20G" or "512M"; None or -1: all free memory.
    n_gpu_layers: the number of last layers on the device; None: the planner decides (placement/solver.py).
    gpu_index: a file in PowerInfer's format with the neurons on the device.
    split: "layers" keeps the neurons of a layer together, and on Vulkan its experts too; "neurons" puts all
    layers on devices, and of layers that do not fit the most active neurons, or experts; "auto": the faster
    of these by prediction.
    cpu_experts: numbers of layers. The device keeps only as many experts as the other layers have: the most
    used ones of any layer. The CPU computes the others.
    reset_gpu_index: solve the placement again even if it is known. Model.placement has the result.

    ram_budget: this machine's memory for program, weights, cache and workspace together, as GiB or a text.
    Weights that do not fit are read from the file when needed (offload/weight_store.py). Memory of devices
    does not count. None: the file is mapped, or if it is larger than the free memory, the budget is the free
    memory.

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

    mmproj: the file with the encoder of images (docs/guides/images.md); None: the one next to the model.
    no_mmproj: leave it out. image_max_tokens: the most tokens of an image, which lowers its resolution; None:
    the limit of the model's family. image_cache: memory for encoded images, as GiB or a text.

    cache_dir: a directory for the cache of finished answers, which is used again after a restart
    (docs/guides/prompt-cache.md); None: no such cache. cache_disk: its limit for all models, as GiB or a
    text; a server's folder of saved slots has the same limit.

    max_batch: the most tokens computed in one step.
    n_seqs: full contexts that the cache can hold at once; more sequences can run while they are shorter.
    max_sequences: the most sequences that run at once.
    progress: receives reports of long operations; it is ignored when settings are compared.
    """

    n_ctx: int | None = _default("n_ctx")
    n_threads: int | None = _default("n_threads")
    kv_type: KVType = _default("kv_type")
    device: Sequence[str] | None = _default("device")
    vram_budget: float | str | None = _default("vram_budget")
    n_gpu_layers: int | None = _default("n_gpu_layers")
    gpu_index: str | os.PathLike[str] | None = _default("gpu_index")
    split: Split = _default("split")
    cpu_experts: Sequence[int] = _default("cpu_experts")
    reset_gpu_index: bool = _default("reset_gpu_index")
    ram_budget: float | str | None = _default("ram_budget")
    activation: str | None = _default("activation")
    sparsity: SparsityMode | None = _default("sparsity")
    predictor: str | None = _default("predictor")
    profile: str | os.PathLike[str] | None = _default("profile")
    thresholds: str | os.PathLike[str] | None = _default("thresholds")
    sparse_prompts: bool = _default("sparse_prompts")
    speculate: Speculate | None = _default("speculate")
    draft: str | os.PathLike[str] | None = _default("draft")
    draft_max: int = _default("draft_max")
    lookup: str | os.PathLike[str] | None = _default("lookup")
    lora: Lora | Sequence[Lora] | None = _default("lora")
    chat_template: str | None = _default("chat_template")
    mmproj: str | os.PathLike[str] | None = _default("mmproj")
    no_mmproj: bool = _default("no_mmproj")
    image_max_tokens: int | None = _default("image_max_tokens")
    image_cache: float | str = _default("image_cache")
    cache_dir: str | os.PathLike[str] | None = _default("cache_dir")
    cache_disk: float | str = _default("cache_disk")
    max_batch: int = _default("max_batch")
    n_seqs: int = _default("n_seqs")
    max_sequences: int = _default("max_sequences")
    progress: Reporter | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, parameter in LOAD_PARAMETERS.items():
            value = getattr(self, name)
            if parameter.kind is not None:
                value = parameter.checked(value)
            elif value is not None and name in _CHECKS:
                value = _CHECKS[name](name, value)
            object.__setattr__(self, name, value)
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
        if self.no_mmproj and self.mmproj is not None:
            raise InvalidRequestError("mmproj cannot be combined with no_mmproj")
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

    @property
    def loras(self) -> tuple[tuple[Path, float], ...]:
        """The adapters, each with its scale."""
        return self.lora or ()  # type: ignore[return-value]  # converted when it was checked

    def _check_speculation(self) -> None:
        asked = self.drafter
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
        mode: SparsityMode = "exact" if has_zeros else "dense"
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
    def vram_gib(self) -> float | None:
        """Return vram_budget as GiB; None and -1: all free memory."""
        return None if self.vram_budget is None else float(self.vram_budget)

    @property
    def ram_gib(self) -> float | None:
        """Return ram_budget as GiB; None: no budget."""
        return None if self.ram_budget is None else float(self.ram_budget)

    @property
    def cache_disk_bytes(self) -> int:
        return int(float(self.cache_disk) * 2**30)

    @property
    def image_cache_bytes(self) -> int:
        return int(float(self.image_cache) * 2**30)

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
        file, _, behind = value.rpartition(":")
        with contextlib.suppress(ValueError):
            value, scale = (file, float(behind)) if file else (value, scale)
    if value == "":
        raise InvalidRequestError(f"{name} must be a path, not ''")
    return expanded(path(name, value)), real_number(
        f"the scale of {name}", scale, -LARGEST_SCALE, LARGEST_SCALE
    )


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


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "device": _devices,
    "cpu_experts": _layers,
    "lora": _loras,
    "chat_template": lambda name, value: turn_formats.named(text(name, value)),
}

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
