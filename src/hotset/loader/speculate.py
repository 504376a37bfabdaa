"""Opening of the drafter of a model, from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hotset.backends.base import Backend
from hotset.backends.decoded import decoded_vector
from hotset.backends.reference import normalised
from hotset.backends.stage import WholeModel
from hotset.engine.draft_model import ModelDrafter, SelfDrafter
from hotset.engine.lookup import LookupDrafter, LookupText
from hotset.engine.mtp import MtpDrafter
from hotset.engine.speculation import Drafter, Speculator
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.files import missing, read_small_text
from hotset.formats.gguf import GGUFFile
from hotset.loader.build import build, open_model, plan_model
from hotset.loader.decide import DEFAULT_N_CTX, Decided, Opened, cache_bytes
from hotset.model.cost import Cost
from hotset.model.decoder import NEXTN_INPUT, describe_nextn
from hotset.model.graph import Graph
from hotset.model.operations import Embed, RMSNorm, SelectOutputs
from hotset.settings import LoadSettings, ModelPath
from hotset.sparsity.thresholds import thresholds_path

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo
    from hotset.text.tokenizer import Tokenizer

_LONGEST_TEXT = 64 << 20  # bytes of a text to look up
_DRAFT_STEP = 128  # tokens of a step of a draft model
_WORKSPACE = 32 << 20  # bytes of a draft model in addition to its file and its cache


def open_speculator(
    decided: Decided, backend: Backend, tokenizer: Callable[[], Tokenizer]
) -> Speculator | None:
    """Open the speculator of a model; None if its settings request none, or the model generates nothing.

    backend: of the model; a draft model shares its threads. tokenizer: returns the model's tokenizer. The
    caller closes the result. Raises InvalidRequestError for a device that cannot speculate, for
    a text that cannot be looked up, for a draft model with another vocabulary, and for a model without a
    sparser mode to draft in. Raises UnsupportedModelError for a model without layers for multi-token
    prediction, and the errors of `load` for a draft model.
    """
    settings = decided.settings
    if settings.drafter == "off" or decided.graph.is_encoder:
        return None
    device = decided.capabilities
    if device is not None and not device.speculation:
        raise InvalidRequestError(
            "speculative decoding is exact only on the CPU: on a GPU a token's last bits depend on how many "
            "tokens are in its step; leave `speculate` out, or use device='cpu'"
        )
    if settings.drafter == "mtp":
        mtp = _open_mtp(decided, backend)
        return Speculator(mtp, settings.draft_max, mtp)
    drafter: Drafter
    if settings.draft is not None:
        drafter = _open_draft(decided, settings.draft, backend)
    elif settings.drafter == "self":
        drafter = _open_self(decided, backend)
    else:
        drafter = LookupDrafter(_lookup_text(settings, tokenizer))
    return Speculator(drafter, settings.draft_max)


def drafting_bytes(opened: Opened) -> int:
    """Return the bytes of memory for a draft model, or a layer for multi-token prediction; 0 without one.

    Raises UnsupportedModelError if `speculate` is "mtp" and the file lacks such a layer."""
    settings = opened.settings
    if settings.drafter == "mtp":
        return _mtp_bytes(opened)
    if settings.draft is None:
        return 0
    with ExitStack() as closing:
        return _n_bytes(_plan_draft(settings.draft, settings, closing, max_batch=_DRAFT_STEP))


def _n_bytes(draft: Decided) -> int:
    return draft.gguf.nbytes + cache_bytes(draft.settings, draft.cost, draft.n_ctx) + _WORKSPACE


def _plan_draft(
    model: ModelPath, settings: LoadSettings, closing: ExitStack, *, for_device: bool = False, **changes: Any
) -> Decided:
    """Plan a model that drafts: on the CPU, with its file mapped.

    settings: of the target model; some are shared, not the type of cache. changes: fields that replace
    them. closing: closes its files. for_device: a device computes it, as in plan_model.
    """
    same = ("n_ctx", "n_threads", "n_seqs", "max_sequences", "progress")
    own = LoadSettings(
        device="cpu", no_mmproj=True, **{name: getattr(settings, name) for name in same} | changes
    )
    opened = open_model(model, own)
    closing.callback(opened.gguf.close)
    if "n_ctx" not in changes and opened.config.n_ctx_train < (own.n_ctx or 0):
        # Longer conversations get no drafts.
        opened = opened.with_settings(n_ctx=opened.config.n_ctx_train)
    decided = plan_model(opened, mapped=True, for_device=for_device)
    closing.callback(decided.weights.close)
    return decided


def _open_draft(decided: Decided, name: ModelPath, backend: Backend) -> ModelDrafter:
    with ExitStack() as closing:
        draft = _plan_draft(name, decided.settings, closing, max_batch=_DRAFT_STEP)
        n_vocab = _shared_vocabulary(decided.gguf, draft.gguf)
        if draft.graph.is_encoder or draft.n_states:
            kind = "is an embedding model" if draft.graph.is_encoder else "has recurrent layers"
            raise UnsupportedModelError(
                f"the draft model {name} {kind}, and cannot take drafted tokens back; choose a model "
                "that has only attention"
            )
        draft, own = build(draft, runtime=backend.runtime)
        closing.callback(own.close)
        n_shared = min(n_vocab, own.n_vocab, backend.n_vocab)
        sequences = decided.settings.max_sequences
        return ModelDrafter(own, draft.n_ctx, sequences, (n_shared, backend.n_vocab), closing.pop_all().close)


def _open_self(decided: Decided, backend: Backend) -> SelfDrafter:
    """Open the model in a sparser mode.

    The mode is the one that its settings name, otherwise `threshold` with the thresholds next to the file,
    otherwise `predicted` with the predictors in it, otherwise half of the experts.
    """
    settings, path = decided.settings, decided.gguf.path
    if not isinstance(backend, WholeModel) or decided.ram is not None:
        raise InvalidRequestError(
            "speculate='self' needs the whole model in memory, computed by one process on the CPU, or by one "
            "device; leave it out, or what divides the model"
        )
    if decided.n_states:
        raise UnsupportedModelError(
            "speculate='self' cannot take drafted tokens back from recurrent layers; use speculate='ngram'"
        )
    mode, asked = settings.sparsity, (settings.sparsity, settings.predictor, settings.thresholds)
    if asked == (None, None, None) and thresholds_path(path).is_file():
        mode = "threshold"
    changes = {
        "n_ctx": decided.n_ctx, "max_batch": settings.max_sequences, "kv_type": settings.kv_type,
        "activation": settings.activation, "sparsity": mode, "predictor": settings.predictor,
        "thresholds": settings.thresholds, "profile": settings.profile,
    }  # fmt: skip
    with ExitStack() as closing:
        draft = _plan_draft(path, settings, closing, for_device=backend.is_on_device, **changes)
        if draft.choice.mode == decided.choice.mode:
            draft = _with_fewer_experts(draft)
        decided.notes.extend(f"drafts: {note}" for note in (draft.choice.reason, *draft.notes))
        draft, own = build(draft, drafts_for=backend)
        closing.callback(own.close)
        return SelfDrafter(own, draft.traits.thresholded != "none", closing.pop_all().close)


def _with_fewer_experts(draft: Decided) -> Decided:
    """Return the same model, in which each token uses half of its experts."""
    layers = tuple(
        replace(layer, experts=replace(layer.experts, n_used=max(layer.experts.n_used // 2, 1)))
        if layer.experts is not None
        else layer
        for layer in draft.config.layers
    )
    if layers == draft.config.layers:
        raise InvalidRequestError(
            f"{draft.gguf.path.name} has no sparser mode to draft in: make thresholds with 'hotset "
            "calibrate', train a predictor where its neurons can be zero, or use ngram or draft"
        )
    draft.notes.append("each token passes half of its experts")
    return draft.changed(config=replace(draft.config, layers=layers))


def _mtp_graph(decided: Decided | Opened, tensors: Mapping[str, TensorInfo]) -> Graph:
    """Return the step of the file's first layer for multi-token prediction."""
    if not decided.config.n_extra_layers:
        raise UnsupportedModelError(
            f"{decided.gguf.path.name} has no layer for multi-token prediction (MTP, nextn), which speculate "
            "mtp drafts with; use ngram, draft or self, or a file that has one"
        )
    return describe_nextn(decided.config, tensors)


def _mtp_bytes(opened: Opened) -> int:
    """Return the bytes of its matrices, including a copy of the output, and of its cache at most."""
    settings, config, tensors = opened.settings, opened.config, opened.gguf.tensors
    graph = _mtp_graph(opened, tensors)
    read = {w.name for op in graph.primitives if not isinstance(op, Embed) for w in op.weights_read}
    n_ctx = settings.n_ctx or min(config.n_ctx_train, DEFAULT_N_CTX)
    n_bytes = sum(tensors[name].nbytes for name in read)
    return n_bytes + cache_bytes(settings, Cost(graph, tensors), n_ctx) + _WORKSPACE


def _open_mtp(decided: Decided, backend: Backend) -> MtpDrafter:
    if not isinstance(backend, WholeModel):
        raise InvalidRequestError(
            "speculate='mtp' needs the whole model computed by one process on the CPU, or by one "
            "device; leave it out, or what divides the model"
        )
    graph = _mtp_graph(decided, decided.weights.tensors)
    options = replace(decided.backend_options, max_batch=backend.max_batch, n_states=0)
    layer = backend.open_layer(decided.weights, graph, options)
    ops = decided.graph.ops
    reads = next(op.x.name for op in ops if isinstance(op, SelectOutputs))
    norm = next(op for op in ops if op.out.name == NEXTN_INPUT)
    assert isinstance(norm, RMSNorm), "models with such layers have no other"
    weight = decoded_vector(decided.weights, norm.weight)
    return MtpDrafter(layer, reads, lambda rows: normalised(norm, rows, weight, None), layer.close)


def _shared_vocabulary(target: GGUFFile, draft: GGUFFile) -> int:
    """Return how many tokens both models have. If one list is longer, its further tokens are not drafted.

    Raises InvalidRequestError if an id is one token in one model and another token in the other.
    """
    tokens, others = (file.metadata.get("tokenizer.ggml.tokens") for file in (target, draft))
    if not isinstance(tokens, list) or not isinstance(others, list):
        raise InvalidRequestError(
            f"{draft.path.name} cannot draft for {target.path.name}: one of them has no vocabulary"
        )
    n = min(len(tokens), len(others))
    if tokens[:n] == others[:n]:
        return n
    first = next(i for i in range(n) if tokens[i] != others[i])
    raise InvalidRequestError(
        f"{draft.path.name} cannot draft for {target.path.name}: their vocabularies differ from token "
        f"{first} on; choose a draft model that shares the tokenizer"
    )


def _lookup_text(settings: LoadSettings, tokenizer: Callable[[], Tokenizer]) -> LookupText | None:
    if settings.lookup is None:
        return None
    try:
        text = read_small_text(settings.lookup, _LONGEST_TEXT)
    except FileNotFoundError:
        raise InvalidRequestError(missing(settings.lookup, "text")) from None
    found = tokenizer()
    return LookupText(found.encode_inside(text), found.n_vocab)
