"""The load settings, one record each, from which every interface is derived.

`LoadSettings` takes defaults, choices and ranges from here; the options of the command line, the messages
about them, Modelfiles, the models file and the server's page take names and sentences. The module must import
fast, because the command line reads it for its help.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from hotset.parameters import Parameter, size, table_of

# The storage of keys and values: one format for both, or keys/values. f32 is for comparisons and not
# combined.
KVType = Literal[
    "f16", "q8_0", "q4_0", "f16/q8_0", "f16/q4_0", "q8_0/f16", "q8_0/q4_0", "q4_0/f16", "q4_0/q8_0", "f32"
]
SparsityMode = Literal["dense", "exact", "predicted", "threshold"]
Speculate = Literal["off", "ngram", "draft", "self", "mtp"]
Split = Literal["auto", "layers", "neurons"]
MAX_SEQUENCES = 4096  # each has a row of the block table
MOST_DRAFTED = 16  # tokens of a draft

_ENGINE, _GPU, _TEXT, _SERVER = "Engine", "GPU", "Input and output", "Server"
_SPECULATION, _CACHE = "Speculative decoding", "Prompt cache on disk"


def _of(
    name: str, kind: Any, default: Any, summary: str, option: str = "", panel: str = _ENGINE, **more: Any
) -> Parameter:
    return Parameter(
        name=name, kind=kind, default=default, summary=summary, option=option, panel=panel, **more
    )


LOAD_PARAMETERS = table_of(
    _of("n_ctx", int, None, "Tokens of prompt and answer together.", "--ctx-size -c", low=1,
        usual="the model's context, as far as memory allows", modelfile="num_ctx", label="Context",
        hidden=("--max-model-len",)),
    _of("n_threads", int, None, "Threads of the CPU.", "--threads -t", low=1, usual="the usable cores",
        hidden=("--num-threads",)),
    _of("kv_type", str, "f16", "Type of keys and values in the KV cache.",
        "--cache-type --cache-type-k -ctk", choices=get_args(KVType), listed=("f16", "q8_0", "q4_0")),
    _of("device", None, None, "Devices that compute.", "--device", _GPU,
        usual="a GPU if there is one", hidden=("-dev", "--backend")),
    _of("vram_budget", size, None, "Memory of each GPU to use, KV cache included.",
        "--vram-budget", _GPU, low=-1, usual="all free memory"),
    _of("n_gpu_layers", int, None, "How many layers, counted from the last, are on the GPU.",
        "--n-gpu-layers -ngl", _GPU, low=0, usual="auto", hidden=("--ngl", "--num-gpu", "--gpu-layers")),
    _of("gpu_index", Path, None, "File that names the neurons on the GPU.", "--gpu-index", _GPU),
    _of("split", str, "auto", "What devices and CPU share: layers, or also neurons and experts.",
        "--split", _GPU, choices=get_args(Split)),
    _of("cpu_experts", None, (), "Layers whose experts the CPU computes."),
    _of("reset_gpu_index", bool, False, "Plan the placement again, even if one is stored.",
        "--reset-gpu-index", _GPU),
    _of("ram_budget", size, None, "Most memory to use; weights that do not fit are read from disk as needed.",
        "--ram-budget", usual="the free memory, if the file is larger"),
    _of("activation", str, None, "Override the FFN's activation, such as relu.", "--activation",
        usual="the file's"),
    _of("sparsity", str, None, "Which neurons are computed.", "--sparsity", choices=get_args(SparsityMode),
        usual="the fastest mode of the file"),
    _of("predictor", str, None, "mlp[:TYPE] or svd[:RANK[:TYPE]]; implies --sparsity predicted.",
        "--predictor"),
    _of("profile", Path, None, "File of 'hotset sparse profile', whose hot neurons are always computed.",
        "--profile"),
    _of("thresholds", Path, None, "File of 'hotset sparse calibrate'.", "--thresholds",
        usual="the file next to the model"),
    _of("sparse_prompts", bool, False, "Apply thresholds to prompts too, not only to answers.",
        "--sparse-prompts"),
    _of("speculate", str, None, "Source of draft tokens.", "--speculate", _SPECULATION,
        choices=get_args(Speculate), usual="off"),
    _of("draft", None, None, "Smaller model with the same vocabulary, which drafts.", "--draft", _SPECULATION,
        hidden=("-md", "--model-draft")),
    _of("draft_max", int, 8, "Most tokens of a draft.", "--draft-max", _SPECULATION, low=1,
        high=MOST_DRAFTED),
    _of("lookup", Path, None, "Text in which n-grams are looked up too.", "--lookup", _SPECULATION),
    _of("lora", None, None, "Adapter: a GGUF file or a PEFT folder; repeatable.", "--lora"),
    _of("chat_template", None, None, "Replaces the file's template: a name such as chatml, or Jinja.",
        "--chat-template", _TEXT, usual="the file's"),
    _of("mmproj", Path, None, "File that reads the model's images (mmproj).", "--mmproj", _TEXT,
        usual="the one next to the model", hidden=("-mm",)),
    _of("no_mmproj", bool, False, "Leave out the file that reads images.", "--no-mmproj", _TEXT),
    _of("image_max_tokens", int, None, "Most tokens of an image.", "--image-max-tokens", _TEXT, low=1,
        usual="the model's own limit"),
    _of("image_cache", size, 0.25, "Memory for images that were read, for the next messages.",
        "--image-cache", _TEXT),
    _of("cache_dir", Path, None, "Directory that keeps the prompt cache after the end of the program.",
        "--cache-dir", _CACHE),
    _of("cache_disk", size, 20.0, "Largest size of the prompt cache on disk.", "--cache-disk", _CACHE),
    _of("max_batch", int, 512, "Most tokens of a step.", "--batch-size -b", low=1),
    _of("n_seqs", int, 1, "Size of the KV cache, in full contexts.", "--contexts", _SERVER, low=1,
        hidden=("--parallel", "-np")),
    _of("max_sequences", int, 16, "Answers computed at the same time.", "--parallel -np", _SERVER, low=1,
        high=MAX_SEQUENCES),
)  # fmt: skip
"""Name → record, in the order of the fields of LoadSettings, without `progress`."""
