"""Translation of the library's messages to the words of the command line.

The library names settings as in Python: bare names with an underscore (`n_ctx`), words such as `device`
between backticks, and values as `device='auto'`. A message may begin with a name and "must" or "requires".
Each of these names becomes its option.
"""

from __future__ import annotations

import re

from hotset.sampling_parameters import OPTIONS

# Settings whose options have a different name.
OTHERS = OPTIONS | {
    "grace_seconds": "--grace", "kv_type": "-ctk", "max_seconds": "--timeout", "max_sequences": "-np",
    "n_ctx": "-c", "n_gpu_layers": "-ngl", "n_seqs": "--contexts", "n_threads": "-t", "n_tokens": "-n",
}  # fmt: skip
# Further settings that messages name without backticks or with a value.
ALIKE = (
    "allow_requantize", "cache_dir", "cache_disk", "chat_template", "draft_max", "gpu_bandwidth", "gpu_index",
    "keep_alive", "log_form", "max_bytes", "max_ppl_increase", "max_queue", "max_share", "ram_budget",
    "reset_gpu_index", "sparse_prompts", "tls_cert", "tls_key", "vram_budget",
)  # fmt: skip
WORDS = (
    "activation", "device", "draft", "idle", "jobs", "labels", "lookup", "lora", "predictor",
    "profile", "scored", "sparsity", "speculate", "split", "thresholds", "uniform",
)  # fmt: skip
_UNDERSCORED = "|".join(name for name in (*OTHERS, *ALIKE) if "_" in name)
_NAMED = re.compile(
    rf"(?<![\w./\\'`-])(?P<value_of>{_UNDERSCORED}|{'|'.join(WORDS)})=(?P<value>'[^']*'|[\w.%]*[\w%])"
    r"|`(?P<word>[a-z][a-z0-9_]*)`"
    rf"|(?<![\w./\\'-])(?P<name>{_UNDERSCORED})(?![\w/\\'-]|\.\w)"
    rf"|^(?P<first>{'|'.join(WORDS)})(?= (?:must|requires|cannot) )"
)
# Messages about a models file or a Modelfile, which use these names themselves.
_OF_A_FILE = re.compile(
    r"\[(models\.|default\])|\b(models\..+|default)\.(load|sampling)\b|\.toml\b|^PARAMETER\b"
)


def option_of(name: str) -> str:
    """Return the option for a setting or parameter of Python."""
    return OTHERS.get(name) or f"--{name.replace('_', '-')}"


def in_options(message: str) -> str:
    """Return a message of the library with options in place of Python's names."""
    return message if _OF_A_FILE.search(message) else _NAMED.sub(_spelled, message)


def _spelled(found: re.Match[str]) -> str:
    if (name := found["value_of"]) is None:
        return option_of(found["word"] or found["name"] or found["first"])
    value = found["value"].strip("'")
    return option_of(name) if value == "True" else f"{option_of(name)} {value}"
