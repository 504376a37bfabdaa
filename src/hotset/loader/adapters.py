"""The adapters (LoRA) of a loaded model: from its settings, and others that are loaded later."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hotset.engine.adapters import Adapters
from hotset.engine.driver import EngineThread
from hotset.errors import FormatError, HotsetError, ModelNotFoundError, UnsupportedModelError
from hotset.files import expanded, missing
from hotset.formats.lora import AdapterFile, open_gguf_adapter
from hotset.loader.decide import Decided
from hotset.settings import LoadSettings


def open_adapters(decided: Decided, thread: EngineThread) -> Adapters:
    """Open the adapters of a model, and load those that its settings name.

    Raises the errors of Adapters.load, after it has closed the engine."""
    adapters = Adapters(thread, decided.gguf.architecture, partial(open_adapter, decided))
    try:
        for path, scale in decided.settings.loras:
            adapters.load(str(path), scale)
    except BaseException:
        thread.engine.close()
        raise
    return adapters


def check_adapter(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of an adapter: a file, or a folder of PEFT's.

    Raises ModelNotFoundError, FormatError, and UnsupportedModelError for a file of safetensors.
    """
    found = expanded(path).absolute()
    try:
        is_folder, is_there = found.is_dir(), found.exists()
    except OSError as error:
        raise FormatError(f"the adapter {found} cannot be read ({error.strerror})") from None
    if is_folder:
        if not (found / "adapter_config.json").is_file():
            raise ModelNotFoundError(
                f"the folder {found} has no adapter_config.json; name the folder of an adapter that PEFT "
                "saved, or an adapter in GGUF"
            )
    elif not is_there:
        raise ModelNotFoundError(missing(found, "adapter", "name a GGUF file, or a folder of PEFT's"))
    elif found.suffix == ".safetensors":
        raise UnsupportedModelError(
            f"{found} is a file of safetensors; name its PEFT folder, or an adapter in GGUF (adapters of "
            "'hotset sparse make' become part of a model with its `adapters`)"
        )
    return found


def open_adapter(
    decided: Decided, path: str | os.PathLike[str], check: Callable[[], object] = lambda: None
) -> AdapterFile:
    """Open an adapter for a model: a GGUF file, or a folder of PEFT's.

    check: see Adapters.load. Raises ModelNotFoundError, FormatError, UnsupportedModelError.
    """
    found = check_adapter(path)
    if not found.is_dir():
        return open_gguf_adapter(found)
    from hotset.convert.peft import open_peft_adapter

    if decided.graph.recurrent:
        raise UnsupportedModelError(
            f"the adapter {found} is a folder of PEFT's, which is not read for models with recurrent layers; "
            "convert it to GGUF with llama.cpp's convert_lora_to_gguf.py"
        )
    return open_peft_adapter(found, decided.config.architecture, decided.config.head_dim, check)


def adapter_bytes(settings: LoadSettings) -> int:
    """Return the bytes of memory for the adapters of these settings.

    Missing or damaged adapters count 0: loading them reports the error."""
    return sum(_n_bytes(path) for path, _ in settings.loras)


def _n_bytes(path: Path) -> int:
    try:
        if path.is_dir():  # it may have the adapter in two formats, of which one is read
            return max((file.stat().st_size for file in path.glob("adapter_model.*")), default=0)
        with open_gguf_adapter(path) as file:
            return file.nbytes
    except (HotsetError, OSError):
        return 0
