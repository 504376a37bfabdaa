"""What drafts tokens for a model, by its settings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hotset.backends.base import Backend
from hotset.backends.cpu.backend import CpuBackend
from hotset.engine.draft_model import ModelDrafter
from hotset.engine.lookup import LookupDrafter, LookupText
from hotset.engine.speculation import Drafter, Speculator
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.files import read_small_text
from hotset.formats.gguf import GGUFFile
from hotset.loader.build import build, open_model, plan_model
from hotset.loader.decide import Decided, cache_bytes
from hotset.settings import LoadSettings

if TYPE_CHECKING:
    from hotset.text.tokenizer import Tokenizer

_LONGEST_TEXT = 64 << 20  # bytes of a text to look up
_DRAFT_STEP = 128  # tokens of a step of a draft model
_WORKSPACE = 32 << 20  # bytes of a draft model beside its file and its cache


def open_speculator(
    decided: Decided, backend: Backend, tokenizer: Callable[[], Tokenizer]
) -> Speculator | None:
    """Drafts for a model; None where its settings ask for none, and for a model that generates nothing.

    backend: the model's, whose threads a draft model uses too. tokenizer: the model's, made at the call. The
    caller closes the result. Raises InvalidRequestError for a model on a device, for a text that cannot be
    looked up and for a draft model with another vocabulary; what `load` raises for one that cannot be loaded.
    """
    settings = decided.settings
    if settings.drafter == "off" or decided.graph.is_encoder:
        return None
    if decided.placement is not None:
        raise InvalidRequestError(
            "speculative decoding is exact on the CPU alone: on a GPU a token's last bits depend on how many "
            "tokens are in its step; leave out speculate, or use --no-gpu (backend='cpu')"
        )
    drafter: Drafter
    if settings.draft is not None:
        drafter = _open_draft(decided, settings.draft, backend)
    else:
        drafter = LookupDrafter(_lookup_text(settings, tokenizer))
    return Speculator(drafter, settings.draft_max)


def draft_bytes(settings: LoadSettings) -> int:
    """Of memory that the draft model of these settings takes; 0 without one."""
    if settings.draft is None:
        return 0
    with ExitStack() as closing:
        return _n_bytes(_plan_draft(settings, closing))


def _n_bytes(draft: Decided) -> int:
    return draft.gguf.nbytes + cache_bytes(draft.settings, draft.cost, draft.n_ctx) + _WORKSPACE


def _plan_draft(settings: LoadSettings, closing: ExitStack) -> Decided:
    """The draft model, planned: on the CPU, its file mapped. closing: closes its files."""
    assert settings.draft is not None
    own = LoadSettings(
        n_ctx=settings.n_ctx, n_threads=settings.n_threads, kv_type=settings.kv_type, backend="cpu",
        max_batch=_DRAFT_STEP, n_seqs=settings.n_seqs, max_sequences=settings.max_sequences,
        progress=settings.progress,
    )  # fmt: skip
    opened = open_model(settings.draft, own)
    closing.callback(opened.gguf.close)
    if opened.config.n_ctx_train < (settings.n_ctx or 0):  # what is longer gets no drafts
        opened = opened.with_settings(n_ctx=opened.config.n_ctx_train)
    decided = plan_model(opened, mapped=True)
    closing.callback(decided.weights.close)
    return decided


def _open_draft(decided: Decided, name: object, backend: Backend) -> ModelDrafter:
    with ExitStack() as closing:
        draft = _plan_draft(decided.settings, closing)
        n_vocab = _shared_vocabulary(decided.gguf, draft.gguf)
        if draft.graph.is_encoder or draft.n_states:
            kind = "is an embedding model" if draft.graph.is_encoder else "has recurrent layers"
            raise UnsupportedModelError(
                f"the draft model {name} {kind}, and cannot take drafted tokens back; choose a model with "
                "attention alone"
            )
        draft, own = build(draft, backend.runtime if isinstance(backend, CpuBackend) else None)
        closing.callback(own.close)
        shared = min(n_vocab, own.n_vocab, backend.n_vocab)
        sequences = decided.settings.max_sequences
        return ModelDrafter(own, draft.n_ctx, sequences, (shared, backend.n_vocab), closing.pop_all().close)


def _shared_vocabulary(target: GGUFFile, draft: GGUFFile) -> int:
    """How many tokens both models have. One list may go on where the other ends: what pads it is not drafted.

    Raises InvalidRequestError where token i of one is another token in the other.
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
        raise InvalidRequestError(f"there is no text {settings.lookup} to look n-grams up in") from None
    found = tokenizer()
    return LookupText(found.encode_inside(text), found.n_vocab)
