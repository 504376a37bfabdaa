"""Embedding models and rerankers in a checkpoint: the files that describe them, and keys for these.

Names and keys follow llama.cpp's converter: _try_set_pooling_type in conversion/base.py, and its
Qwen3Model in conversion/qwen.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hotset.convert.hf_checkpoint import Checkpoint
from hotset.convert.hf_config import HFConfig, read_json
from hotset.convert.hf_values import integer
from hotset.errors import FormatError, TokenizerError, UnsupportedModelError
from hotset.files import read_small_text
from hotset.parameters import shown

_MODES = {"mean": 1, "cls": 2, "lasttoken": 3}  # mode of sentence-transformers → pooling_type
_OLDER_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
}
_PROJECTIONS = ("dense_2", "dense_3")
_WITHOUT_KEYS = (
    "Transformer",
    "Normalize",
)  # modules without keys: the model itself, and the normalisation, which all vectors get
_TRANSFORMERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""Kinds of models that name the file in which sentence-transformers stores the limit of a text."""
_RANK = 4
_RERANKER = "qwen3-reranker"
_ANSWERS = ("yes", "no")  # tokens whose logits give the scores
_RERANK_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the "
    "query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def embedding_keys(src: Path, config: HFConfig) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return keys and tensors of sentence-transformers' modules, and the meaning of a classifier's outputs.

    Keys lack the architecture's name. Keys and tensors are empty for other checkpoints.

    Raises UnsupportedModelError for modules that no key describes, FormatError for damaged files.
    """
    keys: dict[str, Any] = {}
    tensors: dict[str, np.ndarray] = {}
    width = config.n_embd
    for module in modules(src):
        kind, folder = str(module.get("type")).rpartition(".")[2], _inside(src, str(module.get("path")))
        if kind == "Pooling":
            pooling = read_json(folder / "config.json")
            modes = [mode for entry, mode in _OLDER_MODES.items() if pooling.get(entry) is True]
            keys["pooling_type"] = _mode(modes or [pooling.get("pooling_mode")])
        elif kind == "Dense":
            if len(found := [n for n in tensors if n.endswith(".weight")]) == len(_PROJECTIONS):
                raise UnsupportedModelError(
                    f"the checkpoint has more than {len(found)} modules of kind Dense"
                )
            name = _PROJECTIONS[len(found)]
            weight, bias = _projection(folder, width)
            width = len(weight)
            tensors[f"{name}.weight"] = weight
            tensors |= {} if bias is None else {f"{name}.bias": bias}
            keys[f"{name}_feat_out"], keys[f"{name}_feat_in"] = weight.shape
        elif kind not in _WITHOUT_KEYS:
            raise UnsupportedModelError(f"the checkpoint has a module of kind {kind}, which is not supported")
    if config.class_name.endswith("ForSequenceClassification"):
        if (mode := config.raw.get("classifier_pooling")) is not None:
            keys["classifier.pooling_type"] = _mode([mode])
        keys["classifier.output_labels"] = _labels(config.raw)
    return keys, tensors


def longest_text(src: Path) -> int | None:
    """Return the maximum tokens of a text in a checkpoint of sentence-transformers; None without a limit.

    sentence-transformers cuts longer texts. The limit is often below the model's own number of positions.
    """
    paths = (src / f"sentence_{kind}_config.json" for kind in _TRANSFORMERS)
    for path in paths:
        if path.exists() and (limits := read_json(path)).get("max_seq_length") is not None:
            return integer(limits, "max_seq_length")
    return None


def use_of(config: HFConfig, keys: Mapping[str, Any]) -> Literal["run", "embed", "rerank"]:
    """Return the subcommand for a file with these keys, named without its architecture."""
    if keys.get("pooling_type") == _RANK or "classifier.output_labels" in keys:
        return "rerank"
    return "embed" if "pooling_type" in keys or config.hf_class.is_encoder else "run"


def _labels(config: dict[str, Any]) -> list[str]:
    """Return the names of a classifier's outputs, in order. config.json may leave out two default names."""
    labels = config.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
    if not isinstance(labels, dict) or not all(str(i) in labels for i in range(len(labels))):
        raise FormatError("id2label in config.json must name the outputs of the classifier, from 0 on")
    return [str(labels[str(i)]) for i in range(len(labels))]


def _projection(folder: Path, n_in: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return weight [n_out, n_in] and bias [n_out] of a module of kind Dense."""
    activation = str(read_json(folder / "config.json").get("activation_function")).rpartition(".")[2]
    if activation != "Identity":
        raise UnsupportedModelError(f"the activation of {folder} is {activation}; supported is Identity")
    tensors = Checkpoint(folder).tensors
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or tensors.keys() - {"linear.weight", "linear.bias"}:
        raise FormatError(f"{folder} must have linear.weight, and perhaps linear.bias")
    if weight.ndim != 2 or weight.shape[1] != n_in or (bias is not None and bias.shape != weight.shape[:1]):
        raise FormatError(f"linear.weight in {folder} is {list(weight.shape)}, and must have {n_in} columns")
    return weight, bias


def modules(src: Path) -> list[dict[str, Any]]:
    """Return the modules of a checkpoint of sentence-transformers (modules.json); [] for others."""
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


def _inside(src: Path, path: str) -> Path:
    """Return the folder of a module. Raises FormatError for a folder outside the checkpoint."""
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise FormatError(f"modules.json names a folder outside of the checkpoint: {shown(path)}")
    return src / path


def _mode(modes: list[Any]) -> int:
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _MODES:
        raise UnsupportedModelError(
            f"the checkpoint pools hidden states by {', '.join(map(str, modes))}; supported is one of "
            f"{', '.join(_MODES)}"
        )
    return _MODES[modes[0]]


def is_reranker(src: Path, config: HFConfig) -> bool:
    """Return whether a checkpoint is a Qwen3 Reranker, whose configuration equals a Qwen3's."""
    if config.architecture != "qwen3":
        return False
    names = (src.resolve().name, str(config.raw.get("_name_or_path")))
    readme = src / "README.md"
    is_named = any(_RERANKER in name.lower() for name in names)
    return is_named or (readme.is_file() and f"# {_RERANKER}" in read_small_text(readme).lower())


def reranker_keys() -> dict[str, Any]:
    """Return the keys of a Qwen3 Reranker, named without its architecture."""
    return {"pooling_type": _RANK, "classifier.output_labels": list(_ANSWERS)}


def reranker_template() -> dict[str, Any]:
    """Return the template of a Qwen3 Reranker, in keys of the tokenizer."""
    return {"tokenizer.chat_templates": ["rerank"], "tokenizer.chat_template.rerank": _RERANK_TEMPLATE}


def answer_ids(tokenizer: Mapping[str, Any]) -> list[int]:
    """Return the tokens that a Qwen3 Reranker answers with. tokenizer: its keys. Raises TokenizerError."""
    tokens = tokenizer.get("tokenizer.ggml.tokens", [])
    if missing := [answer for answer in _ANSWERS if answer not in tokens]:
        raise TokenizerError(
            f"the checkpoint is a reranker, and its tokenizer lacks the token {missing[0]!r} of its answers"
        )
    return [tokens.index(answer) for answer in _ANSWERS]
