"""Runs whole subcommands on small models with odd keys, tensors and settings.

usage: python tests/fuzz/fuzz_models.py [--seconds 60] [--seed 0] [--keep FOLDER]

A GGUF file that is sound as a file, but whose keys and tensors are odd, goes through `hotset show`, `run` and
`quantize`; a checkpoint whose config.json, tokenizer.json or tensors are odd through `hotset convert`, and
the resulting file must load. Half of the cases change a tiny random model of some architecture, the others
change models that are written here. Each may work, or fail with one error message. A case that does anything
else (another exception, a warning of NumPy, more than 10 s) is kept in a folder whose name is printed, and
the exit status is 1. fuzz_gguf.py damages files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # as pytest does for the tests
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("support", "")]

from tiny_gguf import write_llama, write_relu

from hotset.errors import InvalidRequestError
from hotset.formats.gguf import GGUFWriter, ValueType, open_gguf
from hotset.formats.quants import TYPES, GGMLType, row_bytes

SLOW_S = 10.0
ARRAYS = [np.arange(3), np.zeros(0, np.float32), np.array([True, False]), np.array([np.nan, np.inf])]
NUMBERS = [0, 1, -1, 2, 3, 7, 31, 64, 255, 256, 257, 512, 513, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1]
FLOATS = [0.0, -0.0, 0.5, 1.0, -1.0, 1e-30, 1e30, 1e300, math.nan, math.inf, -math.inf]
STRINGS = [
    "", "relu", "drelu", "fatrelu", "silu", "yarn", "linear", "gpt2", "llama", "x" * 500, "\x1b[2J\n", "é",
]  # fmt: skip
NESTED = object()  # an array of arrays, which GGUFWriter does not write
VALUES: list[Any] = [*NUMBERS, *FLOATS, *STRINGS, True, False, ["a", "b"], ["a"] * 400, *ARRAYS, NESTED]
MORE_KEYS = [
    *("attention.sliding_window", "attention.sliding_window_pattern", "rope.scaling.type", "expert_count"),
    *("rope.scaling.factor", "rope.scale_linear", "rope.dimension_count", "rope.scaling.yarn_beta_fast"),
    *("attention.causal", "hidden_activation", "rope.scaling.original_context_length", "vocab_size"),
    *("rope.scaling.yarn_log_multiplier", "attention.key_length", "attention.value_length"),
]
WHOLE_KEYS = [
    *("hotset.n_always", "hotset.fatrelu_threshold", "hotset.up_activation", "powerinfer.sparse_threshold"),
    *("tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.eot_token_id"),
    *("tokenizer.ggml.unknown_token_id", "tokenizer.ggml.padding_token_id", "tokenizer.chat_template"),
    *("tokenizer.chat_templates", "general.name", "general.license", "general.file_type", "split.count"),
]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def byte_pieces() -> list[str]:
    """GPT-2's letters of the 256 bytes."""
    from hotset.text.tokenizer import BYTE_OF_LETTER

    return sorted(BYTE_OF_LETTER, key=BYTE_OF_LETTER.__getitem__)


BPE: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*byte_pieces(), "he", "<s>", "</s>"],
    "tokenizer.ggml.token_type": [1] * 257 + [3, 3], "tokenizer.ggml.merges": ["h e"],
    "tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.eos_token_id": 258,
    "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": TEMPLATE,
}  # fmt: skip
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256, "tokenizer.ggml.scores": np.zeros(259, np.float32),
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip


def seed_models(folder: Path) -> list[Path]:
    """Write small valid models that together cover all cases of the loaders."""
    sizes: dict[str, Any] = {"n_vocab": 259, "n_ff": 64}
    relu = BPE | {"llama.hidden_activation": "relu"}
    q8 = lambda name: GGMLType.Q8_0 if "ffn" in name else GGMLType.F16  # noqa: E731
    return [
        write_llama(folder / "llama.gguf", keys=BPE, head_dim=16, **sizes),
        write_llama(folder / "exact.gguf", keys=relu, head_dim=16, type_of=q8, **sizes),
        write_llama(folder / "qwen3.gguf", architecture="qwen3", keys=SENTENCEPIECE, head_dim=16, **sizes),
        write_llama(folder / "qwen2.gguf", architecture="qwen2", keys=BPE, head_dim=16, tied=True, **sizes),
        write_relu(folder / "mlp.gguf", keys=BPE, **sizes),
        write_relu(folder / "opt.gguf", "opt", dialect="gguf", keys=BPE, **sizes),
        write_relu(folder / "falcon.gguf", "falcon", two_norms=True, keys=BPE, **sizes),
    ]


def of_some_architecture(folder: Path, rng: np.random.Generator) -> Path:
    """Return a folder with a tiny random checkpoint and its conversion, model.gguf; made when first drawn."""
    import tiny_models  # needs torch and transformers, which other fuzzers do not need
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()

    names = tiny_models.first_of_each_architecture()
    name = names[int(rng.integers(len(names)))]
    made = folder / name
    if not made.exists():
        made.mkdir()
        recipe = (tiny_models.RECIPES | tiny_models.EXPERTS)[name]
        tiny_models.to_gguf(recipe, tiny_models.build(recipe), made)
    return made


def mutate(source: Path, target: Path, rng: np.random.Generator) -> str:  # noqa: C901 - a case for each fault
    """Write the model with one or two changes, and return their description."""

    def pick(options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    with open_gguf(source) as gguf:
        architecture = gguf.architecture
        keys: dict[str, tuple[Any, ValueType | None]] = {
            key: (value, ValueType(gguf.metadata_types[key][-1]))
            for key, value in gguf.metadata.items()
            if key != "general.architecture"
        }
        tensors = {t.name: (t.type, t.shape, gguf.data(t.name).copy()) for t in gguf.tensors.values()}
        dialect = gguf.dialect
    said = []
    for _ in range(rng.integers(1, 3)):
        match rng.integers(10):
            case 0 | 1 | 2 | 3:
                known = [*keys, *(f"{architecture}.{key}" for key in MORE_KEYS), *WHOLE_KEYS]
                key, value = pick(known), pick(VALUES)
                keys[key] = (value, None)
                said.append(f"{key} = {'nested' if value is NESTED else repr(value)[:60]}")
            case 4:
                key = pick(list(keys))
                del keys[key]
                said.append(f"no {key}")
            case 5:  # some elements of a list
                key = pick(
                    [k for k, (v, _) in keys.items() if isinstance(v, list | np.ndarray) and len(v)] or [""]
                )
                if not key:
                    continue
                value, kind = keys[key]
                value = list(value)
                for _ in range(rng.integers(1, 4)):
                    at = int(rng.integers(len(value)))
                    value[at] = (
                        pick(STRINGS) if isinstance(value[0], str) else pick([0, -1, 3, 6, 99, 2**31 - 1])
                    )
                keys[key] = (value[: None if rng.integers(2) else at], kind)
                said.append(f"{key} changed at {at}")
            case 6 | 7:
                name = pick(list(tensors))
                kind, shape, _ = tensors[name]
                if rng.integers(2):
                    kind = pick(sorted(TYPES))
                shape = pick(
                    [shape, shape, shape[::-1], shape[:1], (*shape, 1), (shape[0], 1), (256, *shape[1:])]
                )
                shape = tuple(
                    -(-n // TYPES[kind].block_size) * TYPES[kind].block_size if not i else n
                    for i, n in enumerate(shape)
                )
                n_bytes = row_bytes(kind, shape[0]) * math.prod(shape[1:])
                tensors[name] = (kind, shape, rng.integers(0, 256, n_bytes, np.uint8))
                said.append(f"{name}: {kind.name} {list(shape)}")
            case 8:
                name = pick(list(tensors))
                del tensors[name]
                said.append(f"no {name}")
            case 9:
                old, new = pick(list(tensors)), pick(list(tensors))
                name = pick(
                    [
                        new.replace("blk.0", "blk.1"), old.replace(".weight", ".bias"), "x",
                        "rope_freqs.weight", "blk.0.fc1.weight", "blk.0.attn_qkv.weight",
                        "blk.0.ffn_down_t.codes", "blk.0.always.bias",
                    ],
                )  # fmt: skip
                if name not in tensors:
                    tensors[name] = tensors[old] if rng.integers(2) else tensors.pop(old)
                    said.append(f"{old} as {name}")
    writer = GGUFWriter(target, architecture, dialect=dialect)
    for key, (value, kind) in keys.items():
        if value is NESTED:
            element = struct.pack("<IQ", ValueType.STRING, 1) + struct.pack("<Q", 1) + b"a"
            writer._values[key] = struct.pack("<IIQ", ValueType.ARRAY, ValueType.ARRAY, 2) + element * 2
        elif isinstance(value, list) and not value:
            writer.add(key, value, kind or ValueType.INT32)
        elif isinstance(value, float) and abs(value) > 1e38:
            writer.add(key, value, ValueType.FLOAT64)
        else:
            with contextlib.suppress(InvalidRequestError):  # a list of numbers and a text
                writer.add(key, value, kind)
    for name, (kind, shape, data) in tensors.items():
        writer.add_tensor(name, data, kind, shape)
    writer.write()
    return "; ".join(said)


# ---- checkpoints -----------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 257,
    "eos_token_id": 258, "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
ROPES: list[dict[str, Any]] = [
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    {"rope_type": "linear", "factor": 4.0},
]  # fmt: skip
MORE_CONFIG = ["sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "hidden_act_param"]
MORE_CONFIG += [
    "original_max_position_embeddings", "partial_rotary_factor", "quantization_config", "torch_dtype",
]  # fmt: skip
JSON_VALUES: list[Any] = [
    *(v for v in VALUES if isinstance(v, int | float | str | list)), None, {}, {"a": 1}, [[1], [2]], 10**30,
]  # fmt: skip


PACKED: dict[str, Any] = CONFIG | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "intermediate_size": 64,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "attention_bias": True,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip
"""In an MoE model whose experts are in MXFP4."""


def checkpoint_shapes(packed: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors: F32, or blocks and scales of MXFP4."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (259, 32), "lm_head.weight": (259, 32), "model.norm.weight": (32,),
    }  # fmt: skip
    for i in range(2):
        attention = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32}
        layer = {f"self_attn.{name}.weight": (n, 32) for name, n in attention.items()}
        layer |= {"input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,)}
        if packed:
            layer |= {f"self_attn.{name}.bias": (n,) for name, n in attention.items()}
            layer |= {"self_attn.sinks": (4,), "mlp.router.weight": (4, 32), "mlp.router.bias": (4,)}
            for name, n_out, n_in in (("gate_up_proj", 128, 32), ("down_proj", 32, 64)):
                stem = f"mlp.experts.{name}"
                layer |= {f"{stem}_blocks": (4, n_out, n_in // 32, 16), f"{stem}_bias": (4, n_out)}
                layer |= {f"{stem}_scales": (4, n_out, n_in // 32)}
        else:
            layer |= {"mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32)}
            layer |= {"mlp.down_proj.weight": (32, 48)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def write_checkpoint(folder: Path, packed: bool) -> None:
    """Write a valid checkpoint: config.json, tokenizer.json, tokenizer_config.json, model.safetensors."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(3)
    vocabulary = {piece: i for i, piece in enumerate(BPE["tokenizer.ggml.tokens"][:257])}
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["h e"]},
        "added_tokens": [
            {"id": 257 + i, "content": text, "special": True} for i, text in enumerate(("<s>", "</s>"))
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    }
    header: dict[str, Any] = {}
    data = b""
    for name, shape in checkpoint_shapes(packed).items():
        if name.endswith(("_blocks", "_scales")):
            low, high = (0, 256) if name.endswith("_blocks") else (121, 126)
            kind, values = "U8", rng.integers(low, high, shape, np.uint8).tobytes()
        else:
            kind, values = "F32", rng.standard_normal(shape).astype(np.float32).tobytes()
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": offsets}
        data += values
    text = json.dumps(header).encode()
    (folder / "config.json").write_text(json.dumps(PACKED if packed else CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def change_within(value: Any, rng: np.random.Generator) -> str:
    """Change one entry somewhere below an object of JSON, and return a description."""
    while isinstance(value, dict | list) and value:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key: Any = keys[int(rng.integers(len(keys)))]
        if not isinstance(value[key], dict | list) or not value[key] or not rng.integers(4):
            value[key] = JSON_VALUES[int(rng.integers(len(JSON_VALUES)))]
            return f"{key} = {repr(value[key])[:60]}"
        value = value[key]
    return "nothing"


def mutate_checkpoint(folder: Path, rng: np.random.Generator) -> str:
    """Change a valid checkpoint in one or two places, and return a description."""

    def pick(options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    said = []
    for _ in range(rng.integers(1, 3)):
        match rng.integers(4):
            case 0 | 1:
                config = json.loads((folder / "config.json").read_text())
                if rng.integers(2):
                    config["rope_parameters"] = dict(pick(ROPES))
                    rope = config["rope_parameters"]
                    said.append(f"{rope['rope_type']}: {change_within(rope, rng)}")
                else:
                    key, value = pick([*config, *MORE_CONFIG]), pick(JSON_VALUES)
                    config[key] = value
                    said.append(f"{key} = {repr(value)[:60]}")
                (folder / "config.json").write_text(json.dumps(config))
            case 2:
                path = folder / pick(["tokenizer.json", "tokenizer_config.json"])
                value = json.loads(path.read_text())
                said.append(f"{path.name}: {change_within(value, rng)}")
                path.write_text(json.dumps(value))
            case 3:
                path = folder / "model.safetensors"
                raw = path.read_bytes()
                (length,) = struct.unpack("<Q", raw[:8])
                header = json.loads(raw[8 : 8 + length])
                if rng.integers(2):
                    said.append(f"safetensors: {change_within(header, rng)}")
                else:
                    old = pick(list(header))
                    new = pick(
                        [old + "x", "model.layers.9.mlp.up_proj.weight", old.replace("weight", "bias"), ""]
                    )
                    header[new] = header.pop(old)
                    said.append(f"{old} as {new}")
                text = json.dumps(header).encode()
                path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return "; ".join(said)


# ---- the subcommands
# -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of a subcommand: its exit status, its output and the problem found in it, or ""."""

    status: int
    text: str
    problem: str


def subcommand(*arguments: object) -> Outcome:
    """Run a subcommand in this process."""
    from typer.testing import CliRunner

    from hotset.cli.main import app

    started = time.monotonic()
    done = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="hotset")
    text = done.output
    problem = ""
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        problem = repr(done.exception)
    elif any(sign in text for sign in ("itself failed", "Exception in thread", "Exception ignored")):
        problem = text[-3000:]
    elif done.exit_code not in (0, 1, 2):
        problem = f"exit status {done.exit_code}: {text[-300:]}"
    elif time.monotonic() - started > SLOW_S:
        problem = "slow"
    return Outcome(done.exit_code, text, problem)


def exercise_model(path: Path, rng: np.random.Generator) -> str:
    """Show, run and quantise the file. Return the problem, or ""."""
    more = [[], [], ["--sparsity", "dense"], ["--predictor", "svd:4"], ["--predictor", "mlp:q8_0"]]
    how = more[int(rng.integers(len(more)))]
    ran = subcommand("run", path, "he", "-n", 2, "--temp", 0, "-c", 64, "-t", 1, "--device", "cpu", *how)
    if ran.problem:
        return f"run {' '.join(how)}: {ran.problem}"
    for arguments in (
        ("show", path, "--metadata", "--tensors"),
        ("show", path, "--json"),
        ("quantize", path, path.with_name("out.gguf"), "--type", "q8_0", "--allow-requantize", "-t", 1),
    ):
        outcome = subcommand(*arguments)
        if outcome.problem:
            return f"{arguments[0]}: {outcome.problem}"
    return ""


def exercise_checkpoint(folder: Path, _: np.random.Generator) -> str:
    """Convert the checkpoint and load the resulting file. Return the problem, or ""."""
    out = folder.with_name("converted.gguf")
    out.unlink(missing_ok=True)
    done = subcommand("convert", folder, out, "--type", "q8_0")
    if done.problem:
        return f"convert: {done.problem}"
    if done.status in (1, 2):
        return "convert failed and left a file" if out.exists() else ""
    ran = subcommand("run", out, "he", "-n", 1, "--temp", 0, "-c", 16, "-t", 1, "--device", "cpu")
    no_tokenizer = "no tokenizer" in ran.text
    return f"convert wrote what does not load: {ran.text}" if ran.status and not no_tokenizer else ran.problem


def attack(
    seed: int, more: Callable[[int], bool], on_problem: Callable[[int, Path, str], None]
) -> tuple[int, int]:
    """Run cases while more(number of the case). Return the numbers of all cases and of failed cases.

    on_problem: called with the number of a failed case, its folder, and a text with the change and the
    problem.
    """
    rng = np.random.default_rng(seed)
    n_cases = n_failed = 0
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        os.environ["HOTSET_HOME"] = f"{scratch}/home"
        folder = Path(scratch)
        (folder / "seeds").mkdir()
        seeds = seed_models(folder / "seeds")
        while more(n_cases):
            case = folder / "case"
            case.mkdir()
            drawn = of_some_architecture(folder / "seeds", rng) if rng.integers(2) else None
            if rng.integers(3):
                warnings.simplefilter("ignore", RuntimeWarning)
                source = drawn / "model.gguf" if drawn else seeds[int(rng.integers(len(seeds)))]
                change = mutate(source, case / "model.gguf", rng)
                problem = exercise_model(case / "model.gguf", rng)
            else:
                if drawn:
                    source = Path(shutil.copytree(drawn, case / "hf", ignore=lambda *_: ["model.gguf"]))
                else:
                    source = case / "hf"
                    write_checkpoint(source, packed=not rng.integers(3))
                change = mutate_checkpoint(source, rng)
                # A warning of NumPy shows an unchecked number of config.json.
                warnings.simplefilter("error", RuntimeWarning)
                problem = exercise_checkpoint(source, rng)
            if problem:
                n_failed += 1
                on_problem(n_cases, case, f"{(drawn or source).name}: {change}\n{problem}")
            shutil.rmtree(case)
            n_cases += 1
    return n_cases, n_failed


def work_through(
    attack: Callable[[int, Callable[[int], bool], Callable[[int, Path, str], None]], tuple[int, int]],
    name: str,
    description: str | None,
) -> int:
    """Run the command line of a fuzzer whose cases are folders, and return its exit status."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for cases that fail (default: a new temporary one)")
    args = parser.parse_args()
    os.environ["HOTSET_DEBUG"] = "1"  # print tracebacks
    end = time.monotonic() + args.seconds

    def keep(number: int, case: Path, what: str) -> None:
        args.keep = args.keep or Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
        kept = args.keep / f"{args.seed}-{number}"
        shutil.copytree(case, kept, dirs_exist_ok=True)
        print(f"{kept}: {what}\n", file=sys.stderr)

    n_cases, n_failed = attack(args.seed, lambda _: time.monotonic() < end, keep)
    print(f"{n_cases} cases, {n_failed} failed")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(work_through(attack, "models", __doc__))
