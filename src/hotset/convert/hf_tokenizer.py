"""The tokenizer of a Hugging Face checkpoint as the keys `tokenizer.*` of a GGUF file.

Sources, in this order: tokenizer.model (SentencePiece BPE), tokenizer.json (byte-level BPE, BPE over
characters, WordPiece or unigram), RWKV's vocabulary, a file of tiktoken's ranks or Mistral's tekken.json
(byte-level BPE), vocab.json with merges.txt (byte-level BPE as GPT-2's; OPT has only these), vocab.txt
(WordPiece).
Anything without a name in GGUF raises an error: a guess would silently change the tokens.
"""

from __future__ import annotations

import ast
import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hotset.convert.hf_config import read_json
from hotset.convert.hf_tiktoken import TIKTOKEN_CLASSES, merged_pairs, read_ranks, read_tekken
from hotset.convert.hf_values import integer
from hotset.errors import FormatError, TokenizerError
from hotset.files import read_small_file, read_small_text
from hotset.text.pretokenizers import PRE_TOKENIZERS
from hotset.text.tokenizer import (
    BYTE_OF_LETTER,
    IGNORE_MERGES_KEY,
    LSTRIP_KEY,
    METASPACE_KEY,
    NFC_KEY,
    RSTRIP_KEY,
    UNIGRAM_SCORES_KEY,
    UNIGRAM_STEPS_KEY,
    WHOLE_TEXT_KEY,
)

NO_TOKEN = 0xFFFFFFFF  # an id that no vocabulary has
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

# Values of tokenizer.ggml.pre that are written: the best known among several names of one way to split.
_WRITTEN = (
    "gpt-2",
    "smollm",
    "llama-bpe",
    "dbrx",
    "qwen2",
    "qwen35",
    "gpt-4o",  # o200k: gpt-oss, Phi 4 mini
    "tekken",
    "falcon",
    "deepseek-llm",  # and V2
    "deepseek-coder",
    "deepseek-v3",
)
# Expressions of steps of a tokenizer.json other than Split.
_BYTE_LEVEL = PRE_TOKENIZERS["gpt-2"].patterns[0]
_PUNCTUATION = PRE_TOKENIZERS["falcon"].patterns[0]
_DIGIT, _DIGITS, _THREE_DIGITS = r"\p{N}", r"\p{N}+", "[0-9][0-9][0-9]"


def _spelled(pattern: str) -> str:
    """Return a regular expression in one spelling: some files have a line feed, others \\n."""
    return pattern.replace("\r", r"\r").replace("\n", r"\n").replace(r"\"", '"')


def _names() -> dict[tuple[tuple[str, ...], bool], str]:
    """Return the name by patterns, and by whether a word that is a token becomes it, whatever the merges."""
    rows = {name: PRE_TOKENIZERS[name] for name in _WRITTEN}
    found = {(tuple(map(_spelled, row.patterns)), row.ignore_merges): name for name, row in rows.items()}
    # Falcon 7B also splits " 12" into " " and "12": it has no merge across that split.
    found[(_PUNCTUATION, _BYTE_LEVEL, _DIGITS, _THREE_DIGITS), False] = "falcon"
    return found


NAMES = _names()
RWKV_VOCABULARY = "rwkv_vocab_v20230424.txt"
_LONGEST_LITERAL = 4096  # characters of a token as a Python literal
# The World models' training format: a name, a colon, and an empty line after each turn.
_RWKV_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role']|capitalize + ': ' + m['content']|trim + '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_SPACE = "\u2581"  # SentencePiece's visible space
# Normalizers of BPE over characters: spaces become visible, and SentencePiece's adds one before each text.
_SPACES = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
_PREFIX_AND_SPACES = [{"type": "Prepend", "prepend": _SPACE}, *_SPACES]
_SPECIAL_KINDS = {"bos": "bos", "eos": "eos", "eot": "eot", "unk": "unknown", "pad": "padding"}  # of keys
_TEXT_KINDS = {"cls": "cls", "sep": "seperator", "mask": "mask"}  # (sic)
# Patterns whose matches cover every character, so that gaps between matches are empty.
_COVERING = {
    _spelled(PRE_TOKENIZERS[name].patterns[0])
    for name in ("llama-bpe", "qwen2", "qwen35", "gpt-4o", "tekken")
}


def tokenizer_keys(src: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer.* keys, as GGUFWriter.add accepts them; {} for a folder without tokenizer.

    Raises TokenizerError for a tokenizer that no key describes, FormatError for damaged JSON.
    """
    n_vocab = integer(config, "vocab_size", high=1 << 24)
    path = src / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    if (src / "tokenizer.model").exists():
        tokens, types, keys = _sentencepiece(src, settings, n_vocab)
    elif (src / "tokenizer.json").exists():
        tokenizer = read_json(src / "tokenizer.json")
        settings = _template_settings(tokenizer.get("post_processor"), settings)
        tokens, types, keys = _of_json(tokenizer, settings)
    elif (src / RWKV_VOCABULARY).exists():
        tokens, types, keys = _rwkv_world(src, n_vocab)
    elif (name := next((name for name in TIKTOKEN_CLASSES if (src / name).exists()), None)) is not None:
        tokens, types, keys = _tiktoken(src, name, settings, n_vocab)
        settings, config = _tiktoken_ids(settings, config)
    elif (src / "tekken.json").exists():
        settings = _TEKKEN_SETTINGS | settings
        tokens, types, keys = _tekken(src / "tekken.json", settings, n_vocab)
    elif (src / "vocab.json").exists() and (src / "merges.txt").exists():
        tokens, types, keys = _gpt2_bpe(src, settings, config)
    elif (src / "vocab.txt").exists():
        tokens, types, keys = _vocab_txt(src, settings)
    else:
        return {}
    if len(tokens) > n_vocab:
        raise TokenizerError(f"the tokenizer has {len(tokens)} tokens, the model only {n_vocab}")
    missing = range(len(tokens), n_vocab)  # rows that pad the embedding to a round number
    keys["tokenizer.ggml.tokens"] = tokens + [f"[PAD{i}]" for i in missing]
    keys["tokenizer.ggml.token_type"] = np.array(types + [UNUSED for _ in missing], np.int32)
    for scores, dtype in (("tokenizer.ggml.scores", np.float32), (UNIGRAM_SCORES_KEY, np.float64)):
        if scores in keys:
            keys[scores] = np.array([*keys[scores], *(-1000.0 for _ in missing)], dtype)
    ids = {token: i for i, token in enumerate(tokens)}
    of_texts = _TEXT_KINDS if keys["tokenizer.ggml.model"] in ("bert", "t5") else {}
    for kind, key in (_SPECIAL_KINDS | of_texts).items():
        if (id := _special_id(f"{kind}_token", settings, config, ids)) is not None:
            keys[f"tokenizer.ggml.{key}_token_id"] = id
    if (template := _chat_template(src, settings)) is not None:
        keys["tokenizer.chat_template"] = template
    keys |= _stripping(src, settings)
    if settings.get("add_sep_token") is True:
        keys["tokenizer.ggml.add_sep_token"] = True
    return keys


def _stripping(src: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the keys with the ids of the added tokens that take in white space next to them."""
    added: Any = settings.get("added_tokens_decoder")
    if (path := src / "tokenizer.json").exists():
        tokens = read_json(path).get("added_tokens")
        listed = tokens if isinstance(tokens, list) else []
        added = {token.get("id"): token for token in listed if isinstance(token, dict)}
    sides: dict[str, list[int]] = {"lstrip": [], "rstrip": []}
    for id, token in added.items() if isinstance(added, dict) else ():
        for side, ids in sides.items():
            if isinstance(token, dict) and token.get(side) is True and re.fullmatch("[0-9]{1,8}", str(id)):
                ids.append(int(id))
    named = zip((LSTRIP_KEY, RSTRIP_KEY), sides.values(), strict=True)
    return {key: np.array(ids, np.int32) for key, ids in named if ids}


def _special_id(
    kind: str, settings: dict[str, Any], config: dict[str, Any], ids: dict[str, int]
) -> int | None:
    """Return an id by its text in tokenizer_config.json, otherwise by its (first) number in config.json."""
    token = settings.get(kind)
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str) and token in ids:
        return ids[token]
    id = config.get(f"{kind}_id")
    id = id[0] if isinstance(id, list) and id else id
    return id if isinstance(id, int) and 0 <= id < len(ids) else None


def _chat_template(src: Path, settings: dict[str, Any]) -> str | None:
    if (path := src / "chat_template.jinja").exists():
        return read_small_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several templates with names
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _of_json(
    tokenizer: dict[str, Any], settings: dict[str, Any]
) -> tuple[list[str], list[int], dict[str, Any]]:
    """Return tokens, their types and further keys of a tokenizer.json."""
    kinds = {"WordPiece": _word_piece, "Unigram": _unigram}
    model = tokenizer.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    try:
        return kinds.get(str(kind), _byte_level_bpe)(tokenizer, settings)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        raise TokenizerError(f"tokenizer.json is damaged: {str(error)[:100]!r}") from None


def _rows(by_id: dict[int, tuple[str, int]], added: list[dict[str, Any]]) -> tuple[list[str], list[int]]:
    """Return tokens and types by id. added: tokens of a tokenizer.json, which replace others."""
    for token in added:
        by_id[int(token["id"])] = (str(token["content"]), CONTROL if token["special"] else USER_DEFINED)
    n = max(by_id) + 1
    if n > 2 * len(by_id) + 65536:
        raise TokenizerError(f"tokenizer.json numbers its {len(by_id)} tokens up to {n - 1}")
    rows = [by_id.get(i, (f"[PAD{i}]", UNUSED)) for i in range(n)]
    return [token for token, _ in rows], [kind for _, kind in rows]


def _word_piece(
    tokenizer: dict[str, Any], settings: dict[str, Any]
) -> tuple[list[str], list[int], dict[str, Any]]:
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer") or {}
    pre = tokenizer.get("pre_tokenizer") or {}
    plain = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    if any(model.get(entry, value) != value for entry, value in plain.items()):
        raise TokenizerError("a WordPiece model in tokenizer.json with settings of its own is not supported")
    cleans = normalizer.get("clean_text", True) and normalizer.get("handle_chinese_chars", True)
    if (normalizer.get("type"), pre.get("type")) != ("BertNormalizer", "BertPreTokenizer") or not cleans:
        raise TokenizerError("a WordPiece model in tokenizer.json without BERT's normalizer is not supported")
    vocabulary = {int(id): str(token) for token, id in model["vocab"].items()}
    unknown = model.get("unk_token", "[UNK]")
    added = tokenizer.get("added_tokens") or []
    return _word_piece_keys(
        vocabulary,
        added,
        settings | {"unk_token": unknown},
        normalizer["lowercase"],
        normalizer["strip_accents"],
    )


def _word_piece_keys(
    vocabulary: dict[int, str],
    added: list[dict[str, Any]],
    settings: dict[str, Any],
    lowercase: Any,
    strips: Any,
) -> tuple[list[str], list[int], dict[str, Any]]:
    """Return the same as _of_json. Words begin with "\u2581" in the file, and later pieces lose "##"."""
    spelled = {
        id: (token[2:] if token.startswith("##") else f"\u2581{token}", NORMAL)
        for id, token in vocabulary.items()
    }
    tokens, types = _rows(spelled, added)
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.normalizer.lowercase": lowercase is not False,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_sep_token": True,
    }
    if strips is not None and strips != lowercase:
        keys["tokenizer.ggml.normalizer.strip_accents"] = strips is True
    for name, kinds in {"unknown": "unk", "bos": "cls", "seperator": "sep"}.items():
        token = settings.get(f"{kinds}_token")
        token = token.get("content") if isinstance(token, dict) else token
        token = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}[kinds] if token is None else token
        if token not in tokens:
            raise TokenizerError(f"the WordPiece vocabulary lacks its special token {str(token)[:60]!r}")
        keys[f"tokenizer.ggml.{name}_token_id"] = tokens.index(token)
    return tokens, types, keys


def _vocab_txt(src: Path, settings: dict[str, Any]) -> tuple[list[str], list[int], dict[str, Any]]:
    """Read vocab.txt, a token per line. Special tokens are those that settings name, otherwise BERT's."""
    lines = read_small_file(src / "vocab.txt").decode("utf-8", "replace").splitlines()
    named = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "cls", "sep", "pad", "mask")}
    special = []
    for entry, default in named.items():
        token = settings.get(entry, default)
        special.append(token.get("content") if isinstance(token, dict) else token)
    added = [
        {"id": id, "content": token, "special": True} for id, token in enumerate(lines) if token in special
    ]
    if settings.get("tokenize_chinese_chars", True) is not True:
        raise TokenizerError("tokenize_chinese_chars set to false in tokenizer_config.json is not supported")
    lowercase = settings.get("do_lower_case", True)
    return _word_piece_keys(dict(enumerate(lines)), added, settings, lowercase, settings.get("strip_accents"))


def _unigram(
    tokenizer: dict[str, Any], settings: dict[str, Any]
) -> tuple[list[str], list[int], dict[str, Any]]:
    model, charsmap, removes_spaces, steps = tokenizer["model"], b"", False, list[str]()
    for step in _steps(tokenizer.get("normalizer"), "normalizers"):
        if step["type"] == "Precompiled" and not charsmap and not steps:
            charsmap = base64.b64decode(step["precompiled_charsmap"] or "", validate=True)
        elif (step["type"], step.get("pattern"), step.get("content")) == ("Replace", {"Regex": " {2,}"}, " "):
            removes_spaces = True
            steps.append("collapse")
        else:
            raise TokenizerError(f"the normalizer {step['type']!r} of a unigram model is not supported")
    prefix = False
    for step in _steps(tokenizer["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "WhitespaceSplit":
            removes_spaces = True
            steps.append("words")
        elif step["type"] == "Metaspace" and step.get("replacement") == "\u2581":
            scheme = step.get("prepend_scheme", "always")
            if scheme not in ("always", "first", "never"):
                raise TokenizerError(f"the prepend_scheme {scheme!r} in tokenizer.json is not supported")
            prefix = scheme != "never"
            steps += ["pieces"] * (step.get("split", True) is not False) + ["first"] * (scheme == "first")
        else:
            raise TokenizerError(f"the pre-tokenizer {step['type']!r} of a unigram model is not supported")
    if type(model.get("unk_id")) is not int or not 0 <= model["unk_id"] < len(model["vocab"]):
        raise TokenizerError("a unigram model in tokenizer.json without unk_id is not supported")
    by_id = {id: (str(piece), NORMAL) for id, (piece, _) in enumerate(model["vocab"])}
    scores = [float(score) for _, score in model["vocab"]]
    tokens, types = _rows(by_id, tokenizer.get("added_tokens") or [])
    types[model["unk_id"]] = UNKNOWN
    scores += [-10000.0] * (len(tokens) - len(scores))
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.remove_extra_whitespaces": removes_spaces,
        "tokenizer.ggml.add_bos_token": settings.get("add_bos_token") is True,
        "tokenizer.ggml.add_eos_token": settings.get("add_eos_token") is True,
        "tokenizer.ggml.unknown_token_id": model["unk_id"],
        UNIGRAM_STEPS_KEY: steps,
    }
    exact = np.array(scores)
    if (exact != exact.astype(np.float32)).any():
        keys[UNIGRAM_SCORES_KEY] = exact
    if charsmap:
        keys["tokenizer.ggml.precompiled_charsmap"] = np.frombuffer(charsmap, np.uint8)
    return tokens, types, keys


def _rwkv_world(src: Path, n_vocab: int) -> tuple[list[str], list[int], dict[str, Any]]:
    """Read a line for each token: its id, the token as a Python literal, its bytes.

    Id 0 is both the beginning and the end of a text.
    """
    tokens, lines = ["<s>"], read_small_file(src / RWKV_VOCABULARY).decode("utf-8", "replace").splitlines()
    for line in lines[:n_vocab]:
        id, _, rest = line.partition(" ")
        text, _, length = rest.rpartition(" ")
        try:
            token = ast.literal_eval(text[:_LONGEST_LITERAL])  # a deeper expression may crash the process
            data = token.encode() if isinstance(token, str) else token
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # ValueError: also for a surrogate
            data = None
        if not isinstance(data, bytes) or [id, length] != [str(len(tokens)), str(len(data))]:
            raise TokenizerError(f"{RWKV_VOCABULARY} is damaged: {line[:100]!r}")
        tokens.append(repr(data)[2:-1])
    keys: dict[str, Any] = {"tokenizer.ggml.model": "rwkv", "tokenizer.chat_template": _RWKV_TEMPLATE}
    keys |= dict.fromkeys(("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"), 0)
    if (end_of_turn := "\\n\\n") in tokens:
        keys["tokenizer.ggml.eot_token_id"] = tokens.index(end_of_turn)
    return tokens, [CONTROL, *(NORMAL for _ in tokens[1:])], keys


def _byte_level_bpe(
    tokenizer: dict[str, Any], settings: dict[str, Any]
) -> tuple[list[str], list[int], dict[str, Any]]:
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    steps = _steps(tokenizer.get("normalizer"), "normalizers")
    scheme = None if steps else _prefix_scheme(tokenizer.get("pre_tokenizer"))
    of_text = model.get("byte_fallback") and (scheme or steps in (_SPACES, _PREFIX_AND_SPACES))
    if model.get("type", "BPE") != "BPE" or (model.get("byte_fallback") and not of_text):
        raise TokenizerError(
            "tokenizer.json is not byte-level BPE, and there is no tokenizer.model to read instead"
        )
    for entry in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(entry):
            raise TokenizerError(f"{entry} in tokenizer.json is not supported")
    if of_text:
        return _text_bpe(model, added) if steps == _SPACES else _ranked_bpe(model, added, settings, scheme)
    for normalizer in steps:
        if normalizer["type"] != "NFC":
            raise TokenizerError(f"the normalizer {normalizer['type']!r} in tokenizer.json is not supported")
    by_id = {id: (token, NORMAL) for token, id in model["vocab"].items()}
    # "left right" in files of older versions of the library, a pair in newer ones.
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    keys = _byte_level_keys(_pre_tokenizer(tokenizer), merges, settings)
    if bool(steps) != PRE_TOKENIZERS[keys["tokenizer.ggml.pre"]].normalises:
        keys[NFC_KEY] = bool(steps)
    return *_rows(by_id, added), keys


def _byte_level_keys(pre: str, merges: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": settings.get("add_bos_token") is True,
        "tokenizer.ggml.add_eos_token": settings.get("add_eos_token") is True,
    }


def _text_bpe(
    model: dict[str, Any], added: list[dict[str, Any]]
) -> tuple[list[str], list[int], dict[str, Any]]:
    """Return the same as _of_json, for BPE over characters with "\u2581" for spaces: Gemma's.

    Runs of spaces among the added tokens are written with spaces, as llama.cpp's converter does.
    """
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokens, types = _text_rows(model, added)
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
    if any("\n" in merge and merge.replace(" ", "").strip("\n") for merge in merges):
        keys[WHOLE_TEXT_KEY] = True
    return tokens, types, keys


def _text_rows(model: dict[str, Any], added: list[dict[str, Any]]) -> tuple[list[str], list[int]]:
    is_byte = re.compile("<0x[0-9A-F]{2}>").fullmatch
    by_id = {id: (token, BYTE if is_byte(token) else NORMAL) for token, id in model["vocab"].items()}
    shown = [token | {"content": str(token["content"]).replace(_SPACE, " ")} for token in added]
    return _rows(by_id, shown)


def _prefix_scheme(pre_tokenizer: Any) -> str | None:
    """Return the scheme of a Metaspace that does not split; None for any other pre-tokenizer."""
    if not isinstance(pre_tokenizer, dict) or pre_tokenizer.get("type") != "Metaspace":
        return None
    if pre_tokenizer.get("split") is not False or pre_tokenizer.get("replacement") != _SPACE:
        return None
    scheme = pre_tokenizer.get("prepend_scheme")
    return scheme if scheme in ("first", "always", "never") else None


def _ranked_bpe(
    model: dict[str, Any], added: list[dict[str, Any]], settings: dict[str, Any], scheme: str | None
) -> tuple[list[str], list[int], dict[str, Any]]:
    """Return the same as _of_json, for a SentencePiece BPE model rewritten as merges: Llama 2's.

    A SentencePiece model merges any two pieces whose union is a piece, the best score first. So the merges of
    one piece must be all its divisions, and follow each other.
    """
    pairs = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"]]
    vocabulary, last = model["vocab"], None
    ranks: dict[str, int] = {}
    for left, right in pairs:
        if left + right != last and left + right in ranks:
            raise TokenizerError("the merges in tokenizer.json are not in the order of a SentencePiece model")
        last = left + right
        ranks.setdefault(last, len(ranks))
    tokens, types = _text_rows(model, added)
    types[vocabulary[model["unk_token"]]] = UNKNOWN
    usual = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    merged = set(pairs)
    for token in usual:
        for at in range(1, len(token)):
            pair = token[:at], token[at:]
            if pair[0] in usual and pair[1] in usual and pair not in merged:
                raise TokenizerError(
                    f"tokenizer.json lacks the merge of {' and '.join(map(repr, pair))[:100]}"
                )
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [-float(ranks.get(token, 0)) for token in tokens],
        "tokenizer.ggml.add_space_prefix": scheme != "never",
        "tokenizer.ggml.add_bos_token": settings.get("add_bos_token") is True,
        "tokenizer.ggml.add_eos_token": settings.get("add_eos_token") is True,
        "tokenizer.ggml.unknown_token_id": vocabulary[model["unk_token"]],
    }
    keys |= dict.fromkeys(("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"), NO_TOKEN)
    if scheme in ("first", "always"):
        keys[METASPACE_KEY] = scheme
    return tokens, types, keys


def _gpt2_bpe(
    src: Path, settings: dict[str, Any], config: dict[str, Any]
) -> tuple[list[str], list[int], dict[str, Any]]:
    """Read vocab.json and merges.txt. Special tokens are those that settings or config.json name."""
    vocabulary = read_json(src / "vocab.json")
    lines = read_small_file(src / "merges.txt").decode("utf-8", "replace").splitlines()
    named = [settings.get(f"{kind}_token") for kind in ("bos", "eos", "unk", "pad")]
    named = [token.get("content") if isinstance(token, dict) else token for token in named]
    ids = [config.get(f"{kind}_token_id") for kind in ("bos", "eos", "pad")]
    special = [token for token, id in vocabulary.items() if token in named or id in ids]
    tokenizer = {
        "model": {"vocab": vocabulary, "merges": [line for line in lines if line and line[:8] != "#version"]},
        "added_tokens": [{"id": vocabulary[t], "content": t, "special": True} for t in special],
        "pre_tokenizer": {"type": "ByteLevel"},
    }
    return _of_json(tokenizer, settings)


def _tiktoken(
    src: Path, name: str, settings: dict[str, Any], n_vocab: int
) -> tuple[list[str], list[int], dict[str, Any]]:
    """Read ranks, and the special tokens after them, some of which added_tokens_decoder may name (Kimi's)."""
    path, row = src / name, TIKTOKEN_CLASSES[name]
    if settings.get("tokenizer_class") != row.name:  # its code, which is not run, splits texts
        raise TokenizerError(f"{path} needs the tokenizer_class {row.name} in tokenizer_config.json")
    ranks = read_ranks(path, n_vocab, row.numbered)
    special = {len(ranks) + i: text.format(len(ranks) + i) for i, text in enumerate(row.special)}
    # As in its class: others do not count, and all are control tokens.
    special |= {id: text for id, text, _ in _added_tokens(src, settings) if id in special}
    if max(special) >= n_vocab:
        what = f"{len(ranks)} tokens and the tokenizer {len(special)} special ones"
        raise FormatError(f"{path} has {what}, the model only {n_vocab} (vocab_size in config.json)")
    tokens, keys = _of_ranks(path, ranks, list(special.values()), row.pre, settings)
    return tokens, [NORMAL] * len(ranks) + [CONTROL] * len(special), keys


_TEKKEN_SETTINGS = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
    "add_bos_token": True,
}  # fmt: skip


def _tekken(
    path: Path, settings: dict[str, Any], n_vocab: int
) -> tuple[list[str], list[int], dict[str, Any]]:
    """Return the same as _of_json. All special tokens are control tokens, since no text becomes one."""
    read = read_tekken(path, n_vocab)
    pre = NAMES.get(((_spelled(read.pattern),), True))
    if pre is None:
        raise TokenizerError(f"the pattern in {path} is not known: {read.pattern[:200]}")
    tokens, keys = _of_ranks(path, read.ranks, read.special, pre, settings)
    n = len(read.ranks)
    return tokens[n:] + tokens[:n], [CONTROL] * len(read.special) + [NORMAL] * n, keys


def _of_ranks(
    path: Path, ranks: dict[bytes, int], special: list[str], pre: str, settings: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Return the tokens of tiktoken's ranks, then the special ones, and the keys of the tokenizer."""
    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}

    def spelled(token: bytes) -> str:
        return token.decode("latin-1").translate(letters)

    tokens = [*map(spelled, ranks), *special]
    if len(set(tokens)) < len(tokens):
        raise FormatError(f"a special token of {path} has the text of another token")
    pairs, complete = merged_pairs(ranks)
    merges = [f"{spelled(left)} {spelled(right)}" for left, right in pairs]
    keys = _byte_level_keys(pre, merges, settings)
    if not complete and not PRE_TOKENIZERS[pre].ignore_merges:  # tiktoken takes a word that is a token whole
        keys[IGNORE_MERGES_KEY] = True
    return tokens, keys


_TIKTOKEN_SPECIAL = {
    "KimiLinearForCausalLM": {"eos_token": "[EOS]"},
    "HunYuanMoEV1ForCausalLM": {"bos_token": "<|bos|>"},
    "HunYuanDenseV1ForCausalLM": {"bos_token": "<|startoftext|>"},
}


def _tiktoken_ids(settings: dict[str, Any], config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tokenizer_config.json and config.json, changed to give the ids of llama.cpp's converter.

    Its converter prefers numbers in config.json to texts, except numbers that it knows to be wrong.
    _special_id reads the results.
    """
    texts = dict(settings)
    classes = config.get("architectures")
    kind = str(classes[0]) if isinstance(classes, list) and classes else ""
    if kind == "QWenLMHeadModel":
        texts = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>") | texts
    if kind == "HunYuanDenseV1ForCausalLM" and isinstance(config.get("eod_token_id"), int):
        config = config | {"eos_token_id": config["eod_token_id"]}
        texts["eot_token"] = "<|eos|>"
    texts = {entry: text for entry, text in texts.items() if not isinstance(config.get(f"{entry}_id"), int)}
    return texts | _TIKTOKEN_SPECIAL.get(kind, {}), config


def _steps(step: Any, inner: str) -> list[Any]:
    """Flatten a normalizer or pre-tokenizer to a list of steps. inner: the entry of a Sequence's steps."""
    if not step:
        return []
    if isinstance(step, dict) and step.get("type") == "Sequence":
        return [each for one in step[inner] for each in _steps(one, inner)]
    return [step]


def _patterns(step: Any) -> Iterator[str]:
    """Yield the patterns of a tokenizer.json's pre-tokenizer in the engine's form (text/pretokenizers.py)."""
    in_bytes = False  # each byte of the text has become a letter: only ASCII is unchanged
    for one in _steps(step, "pretokenizers"):
        kind, pattern = one.get("type"), None
        if kind == "Split":
            pattern = _spelled(str(one["pattern"].get("Regex")))
            how = (one.get("behavior"), bool(one.get("invert")))
            if how != ("Isolated", False) and not (how == ("Removed", True) and pattern in _COVERING):
                pattern = None
        elif kind == "Digits":
            pattern = _DIGIT if one.get("individual_digits") else _DIGITS
        elif kind == "Punctuation" and one.get("behavior") == "Contiguous":
            pattern = _PUNCTUATION
        elif kind == "ByteLevel" and not one.get("add_prefix_space") and not in_bytes:
            in_bytes = True
            if one.get("use_regex", True):
                yield _BYTE_LEVEL
            continue
        if pattern is None or (in_bytes and pattern not in (_DIGITS, _THREE_DIGITS)):
            pattern = f"an unknown step {kind!r} {str(one.get('pattern') or '')[:60]}".rstrip()
        yield pattern
    if not in_bytes:
        yield "no step 'ByteLevel'"


def _pre_tokenizer(tokenizer: dict[str, Any]) -> str:
    """Return GGUF's name of a tokenizer.json's pre-tokenizer."""
    patterns = tuple(_patterns(tokenizer["pre_tokenizer"]))
    ignore_merges = tokenizer["model"].get("ignore_merges") is True
    if (name := NAMES.get((patterns, ignore_merges))) is not None:
        return name
    name = NAMES.get((patterns, not ignore_merges))
    if name is not None and _merges_lead_to_words(tokenizer):
        return name
    what = (
        "is known with another ignore_merges only" if name else f"is not known: {', '.join(patterns)[:200]}"
    )
    raise TokenizerError(f"the pre-tokenizer in tokenizer.json {what}")


def _merges_lead_to_words(tokenizer: dict[str, Any]) -> bool:
    """Return whether ignore_merges has no effect, since merges lead to every word that is a token."""
    from tokenizers.models import BPE

    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    pairs = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in merges]
    added = {token["content"] for token in tokenizer.get("added_tokens") or []}
    # The library panics at a merge into a text that is longer than the longest token.
    if any(len(pair) != 2 or "".join(pair) not in vocabulary for pair in pairs):
        return False
    try:
        library = BPE(vocabulary, pairs)
        return all(len(library.tokenize(word)) == 1 for word in vocabulary if word and word not in added)
    except Exception:  # the library raises this class itself
        return False


def _template_settings(post_processor: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the special tokens that the template of a tokenizer.json puts around one text.

    add_bos_token and add_eos_token of tokenizer_config.json take precedence. A GGUF file can only have one
    token before a text, so a template with more (GLM 4: [gMASK]<sop>) sets none.
    """
    before, after = _template(post_processor)
    added: dict[str, Any] = {}
    if len(before) == 1 and settings.get("add_bos_token") is not False:
        added |= {"bos_token": before[0], "add_bos_token": True}
    if len(after) == 1 and settings.get("add_eos_token") is not False:
        added |= {"eos_token": after[0], "add_eos_token": True}
        eos = settings.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        if eos != after[0]:  # another token ends an answer (Qwen3 Embedding)
            added["eot_token"] = eos
    if _separates(post_processor):
        added["add_sep_token"] = True
    return settings | added


def _separates(post_processor: Any) -> bool:
    """Return whether a separator is between two texts, in addition to the first text's end (RoBERTa)."""
    try:
        for step in _steps(post_processor, "processors"):
            if step["type"] == "RobertaProcessing":
                return True
            if step["type"] == "TemplateProcessing":
                kinds = ["A" if "Sequence" in part else "s" for part in step.get("pair") or ()]
                return "AssA" in "".join(kinds)
    except (KeyError, TypeError, RecursionError):
        raise TokenizerError("the post_processor in tokenizer.json is damaged") from None
    return False


def _template(post_processor: Any) -> tuple[list[str], list[str]]:
    """Return the texts of the special tokens before a single text and after it."""
    before: list[str] = []
    after: list[str] = []
    try:
        for step in _steps(post_processor, "processors"):
            if step["type"] in ("BertProcessing", "RobertaProcessing"):
                before.append(str(step["cls"][0]))
                after.append(str(step["sep"][0]))
            if step["type"] == "TemplateProcessing":
                seen = False
                for part in step["single"]:
                    seen |= "Sequence" in part
                    if "SpecialToken" in part:
                        (after if seen else before).append(str(part["SpecialToken"]["id"]))
    except (KeyError, IndexError, TypeError, RecursionError):
        raise TokenizerError("the post_processor in tokenizer.json is damaged") from None
    return before, after


_MODEL_TYPES = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}  # trainer_spec.model_type


def _sentencepiece(
    src: Path, settings: dict[str, Any], n_vocab: int
) -> tuple[list[str], list[int], dict[str, Any]]:
    from sentencepiece import SentencePieceProcessor

    path = src / "tokenizer.model"
    try:
        proto = read_small_file(path)
        sp = SentencePieceProcessor(model_proto=proto)
        fields = list(proto_fields(proto))  # of sentencepiece_model.proto
        trainer, normalizer, denormalizer = (dict(proto_fields(_merged(fields, n))) for n in (2, 3, 5))
        pieces = [dict(proto_fields(value)) for number, value in fields if number == 1]
        n = sp.vocab_size()
        tokens = [sp.id_to_piece(i) for i in range(n)]
        scores = [sp.get_score(i) for i in range(n)]
    except (OSError, RuntimeError, ValueError, IndexError):  # ValueError: text that is not UTF-8
        raise TokenizerError(f"{path} is not a SentencePiece model") from None
    _check_sentencepiece(path, trainer, normalizer, denormalizer)
    kinds = [piece.get(3, NORMAL) for piece in pieces]  # GGUF uses SentencePiece's numbers
    types = [kind for kind in kinds if isinstance(kind, int)]
    if len(types) != n or not {*types} <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
        raise TokenizerError(f"{path} is damaged")
    removes_spaces = bool(normalizer.get(4, True))
    whole_text = removes_spaces or USER_DEFINED in types
    for id, token, special in _added_tokens(src, settings):
        if id >= n_vocab:
            raise TokenizerError(f"an added token has the id {id}, and the model only {n_vocab} tokens")
        while len(tokens) <= id:
            tokens.append(f"[PAD{len(tokens)}]")
            scores.append(-1000.0)
            types.append(UNUSED)
        if id < n and types[id] not in (NORMAL, USER_DEFINED):
            continue  # <s> and </s>, which are already control tokens of the model
        tokens[id], types[id] = token, CONTROL if special else USER_DEFINED
    add_bos = settings.get("add_bos_token")
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, True)),
        "tokenizer.ggml.add_bos_token": add_bos is True or (add_bos is not False and sp.bos_id() >= 0),
        "tokenizer.ggml.add_eos_token": settings.get("add_eos_token") is True,
    }
    if removes_spaces:
        keys["tokenizer.ggml.remove_extra_whitespaces"] = True
    if whole_text:
        keys[WHOLE_TEXT_KEY] = True
    ids = {"bos": sp.bos_id(), "eos": sp.eos_id(), "unknown": sp.unk_id(), "padding": sp.pad_id()}
    for name, id in ids.items():
        if id >= 0 or name in ("bos", "eos"):  # without a key, readers assume 1 and 2
            keys[f"tokenizer.ggml.{name}_token_id"] = id if id >= 0 else NO_TOKEN
    return tokens, types, keys


def _check_sentencepiece(
    path: Path, trainer: dict[int, Any], normalizer: dict[int, Any], denormalizer: dict[int, Any]
) -> None:
    """Raise TokenizerError for settings that no GGUF key describes. Arguments: parts of a ModelProto."""
    kind = trainer.get(3, 1)
    refused = {
        f"a {_MODEL_TYPES.get(kind, kind)} model, not BPE": kind != 2,
        "a model that normalises Unicode (normalization_rule_name other than identity)": normalizer.get(2),
        "a model that normalises what it decodes (denormalizer_spec)": denormalizer.get(2),
        "a model whose words end with a space (treat_whitespace_as_suffix)": trainer.get(24),
        "a model that keeps spaces as they are (escape_whitespaces false)": not normalizer.get(5, True),
    }
    for what, is_so in refused.items():
        if is_so:
            raise TokenizerError(f"{path} is {what}, which is not supported")


def proto_fields(message: bytes | int) -> Iterator[tuple[int, bytes | int]]:
    """Yield (field number, value) of a protocol buffer that the sentencepiece library has accepted."""
    data = message if isinstance(message, bytes) else b""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        kind, n_bytes = tag & 7, {1: 8, 5: 4}.get(tag & 7, 0)
        value = varint() if kind in (0, 2) else int.from_bytes(data[at : at + n_bytes], "little")
        if kind == 2:
            n_bytes = value
            yield tag >> 3, data[at : at + n_bytes]
        else:
            yield tag >> 3, value
        at += n_bytes


def _merged(fields: list[tuple[int, bytes | int]], number: int) -> bytes:
    """Return a message field; if it occurs several times, the merged messages."""
    return b"".join(value for n, value in fields if n == number and isinstance(value, bytes))


def _added_tokens(src: Path, settings: dict[str, Any]) -> list[tuple[int, str, bool]]:
    """Return (id, text, special) of the tokens that Hugging Face added to a SentencePiece model, by id."""
    found: dict[int, tuple[str, bool]] = {}
    try:
        if (path := src / "added_tokens.json").exists():
            found |= {int(id): (token, False) for token, id in read_json(path).items()}
        path = src / "tokenizer_config.json"
        for added, token in (settings.get("added_tokens_decoder") or {}).items():
            found[int(added)] = (str(token["content"]), token.get("special") is True)
        if (path := src / "tokenizer.json").exists():
            for token in read_json(path).get("added_tokens") or []:
                found[int(token["id"])] = (str(token["content"]), bool(token["special"]))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise TokenizerError(f"the added tokens in {path} are damaged") from None
    if found and not 0 <= min(found) <= max(found) < 1 << 24:
        raise TokenizerError(f"an added token has the id {max(found)}, which is out of range")
    return [(id, *found[id]) for id in sorted(found)]
