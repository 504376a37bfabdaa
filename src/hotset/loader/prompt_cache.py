"""The reusable part of a model's cache: the identity of who may reuse its blocks, and their storage."""

from __future__ import annotations

import hashlib
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from hotset.backends.base import BLOCK_SIZE, Backend, CacheMemory
from hotset.backends.cpu.backend import native_code
from hotset.backends.registry import all_capabilities
from hotset.backends.stage import WholeModel
from hotset.engine.blocks import VERSION, Identity
from hotset.engine.driver import EngineThread
from hotset.engine.mtp import CacheWithMtp, MtpDrafter
from hotset.engine.speculation import Speculator
from hotset.errors import UnsupportedModelError
from hotset.files import expanded
from hotset.loader.decide import Decided
from hotset.sparsity.sidecar import fingerprint

if TYPE_CHECKING:
    from hotset.engine.prompt_cache import PromptCache
    from hotset.engine.saved_prefix import SessionFiles


class LoadedModel(Protocol):
    """The part of a hotset.Model that this module uses."""

    decided: Decided
    backend: Backend
    thread: EngineThread


def identity_of(decided: Decided) -> Identity:
    """Return the identity of everything that the bits in a model's cache depend on, except tokens.

    That is the file, the graph (with activation, thresholds and rotations), predictors that were built, the
    type of keys and values, and the code that computes."""
    digest = hashlib.blake2b(digest_size=16)
    facts = [VERSION, BLOCK_SIZE, sys.byteorder, version("hotset"), decided.settings.kv_type]
    if decided.settings.drafter == "mtp":  # its layer has a part of each block
        facts.append("mtp")
    if decided.placement is not None:  # a device has its own order of bytes
        from hotset.placement.planner import planner_of

        device = decided.placement.devices[0]
        facts += planner_of(device).cache_facts(device)
    digest.update(repr([*facts, fingerprint(decided.gguf), decided.graph.ops]).encode())
    digest.update(native_code())
    if decided.predictor is not None:
        for sidecar in decided.weights.sidecars:
            digest.update(fingerprint(sidecar).encode())
    cost, kv_type = decided.cost, decided.settings.kv_type
    n_bytes = cost.kv_bytes_per_token(kv_type) or cost.state_bytes / BLOCK_SIZE
    name = decided.gguf.path.name
    return Identity(digest.digest(), name, kv_type, cost.flops_per_token(0) / max(n_bytes, 1))


def memory_of(decided: Decided, backend: Backend, speculator: Speculator | None, asked: str) -> CacheMemory:
    """Return the cache whose blocks and states are stored and restored. asked: the option, for the message.

    Raises UnsupportedModelError for a cache that cannot be stored, and for an embedding model.
    """
    if decided.graph.is_encoder:
        raise UnsupportedModelError(f"an embedding model has no cache that could be kept; leave out {asked}")
    if not isinstance(backend, WholeModel):
        devices = "".join(f", or {one.title}" for one in all_capabilities() if one.prompt_cache)
        raise UnsupportedModelError(
            f"{asked} needs the whole model on this machine's CPU{devices}, but parts of this one are "
            f"elsewhere (backend {backend.name!r}); leave it out, or use device='cpu' and no `stages`"
        )
    memory: CacheMemory = backend.stage
    drafter = None if speculator is None else speculator.drafter
    return CacheWithMtp(memory, drafter) if isinstance(drafter, MtpDrafter) else memory


def open_prompt_cache(
    decided: Decided, backend: Backend, speculator: Speculator | None
) -> PromptCache | None:
    """Open the prompt cache on disk of a model.

    Return None if its settings name no directory, or the model generates nothing.

    The caller closes it. Raises UnsupportedModelError for a model whose cache cannot be stored, and the
    InvalidRequestError and HotsetError of PromptCache.
    """
    settings = decided.settings
    if settings.cache_dir is None or decided.graph.is_encoder:
        return None
    from hotset.engine.prompt_cache import PromptCache

    memory = memory_of(decided, backend, speculator, "cache_dir")
    folder = expanded(settings.cache_dir).absolute()
    return PromptCache(folder, identity_of(decided), memory, settings.cache_disk_bytes)


def session_files(model: LoadedModel, asked: str) -> SessionFiles:
    """Return an object that writes conversations of a model to files and reads them again.

    From now on the engine keeps the tokens of its latest answers (Engine.keep_slots). asked, errors: see
    memory_of.
    """
    from hotset.engine.saved_prefix import SessionFiles

    memory = memory_of(model.decided, model.backend, model.thread.engine.speculator, asked)
    model.thread.engine.keep_slots()
    return SessionFiles(model.thread, identity_of(model.decided), memory)
