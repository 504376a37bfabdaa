"""What makes an embedding model or a reranker of a checkpoint: files beside its tensors, and keys for them.

Names and keys are those of llama.cpp's converter: _try_set_pooling_type in conversion/base.py, and its
Qwen3Model in conversion/qwen.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotset.convert.hf_config import HFConfig, read_json
from hotset.errors import FormatError, TokenizerError, UnsupportedModelError
from hotset.files import read_small_text

_MODES = {"mean": 1, "cls": 2, "lasttoken": 3}  # of sentence-transformers → pooling_type
_OLDER_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
}
_RANK = 4
_RERANKER = "qwen3-reranker"
_ANSWERS = ("yes", "no")  # tokens whose logits are the scores
_RERANK_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the "
    "query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def pooling_keys(src: Path, config: HFConfig) -> dict[str, Any]:
    """How a checkpoint of sentence-transformers pools, and the classifier of one that has some; none for
    another.

    Raises UnsupportedModelError for a way that no key describes, FormatError for damaged files.
    """
    found: dict[str, Any] = {}
    for module in modules(src):
        if str(module.get("type")).endswith("Pooling"):
            pooling = read_json(src / str(module.get("path")) / "config.json")
            modes = [mode for entry, mode in _OLDER_MODES.items() if pooling.get(entry) is True]
            found["pooling_type"] = _mode(modes or [pooling.get("pooling_mode")])
            break
    if (mode := config.raw.get("classifier_pooling")) is not None:
        found["classifier.pooling_type"] = _mode([mode])
    return found


def modules(src: Path) -> list[dict[str, Any]]:
    """The parts of a checkpoint of sentence-transformers (modules.json); none for another."""
    path = src / "modules.json"
    if not path.exists():
        return []
    try:
        found = json.loads(read_small_text(path))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(module, dict) for module in found):
        raise FormatError(f"{path} is not a list of modules")
    return found


def _mode(modes: list[Any]) -> int:
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _MODES:
        raise UnsupportedModelError(
            f"the checkpoint pools hidden states by {', '.join(map(str, modes))}; supported is one of "
            f"{', '.join(_MODES)}"
        )
    return _MODES[modes[0]]


def is_reranker(src: Path, config: HFConfig) -> bool:
    """Whether a checkpoint is a Qwen3 Reranker, which its configuration does not tell from a Qwen3."""
    if config.architecture != "qwen3":
        return False
    names = (src.resolve().name, str(config.raw.get("_name_or_path")))
    readme = src / "README.md"
    is_named = any(_RERANKER in name.lower() for name in names)
    return is_named or (readme.is_file() and f"# {_RERANKER}" in read_small_text(readme).lower())


def reranker_keys() -> dict[str, Any]:
    """The keys of a Qwen3 Reranker that bear the name of its architecture."""
    return {"pooling_type": _RANK, "classifier.output_labels": list(_ANSWERS)}


def reranker_template() -> dict[str, Any]:
    """Its template, in keys of the tokenizer."""
    return {"tokenizer.chat_templates": ["rerank"], "tokenizer.chat_template.rerank": _RERANK_TEMPLATE}


def answer_ids(tokenizer: Mapping[str, Any]) -> list[int]:
    """The tokens that a Qwen3 Reranker answers with. tokenizer: keys of the file. Raises TokenizerError."""
    tokens = tokenizer.get("tokenizer.ggml.tokens", [])
    if missing := [answer for answer in _ANSWERS if answer not in tokens]:
        raise TokenizerError(
            f"the checkpoint is a reranker, and its tokenizer lacks the token {missing[0]!r} of its answers"
        )
    return [tokens.index(answer) for answer in _ANSWERS]
