"""llama.cpp's converter and engine against hotset's, on tiny random MoE models.

usage: python bench/converters.py --source llama.cpp --llama BUILD/bin [NAME ...]

Of each recipe of tests/support/tiny_models.py (all MoE models without NAME) a checkpoint is converted to F32
by both converters (--source: llama.cpp's repository), and the logits of both files are compared in hotset,
weights and cache in F32. Then llama-server (--llama) says on its own file what follows a prompt of token ids,
and each of the tokens that hotset chooses greedily: its choices, and the logarithms of all tokens'
probabilities, are compared. Needs torch and transformers, as the tests do.

llama.cpp's converter knows published tokenizers by a hash of what they make of a text, and refuses the tests'
own: here the file says that they split text as GPT-2's does. Some models are changed a little, so that
llama.cpp takes them (ADJUSTED), and what it is known to compute otherwise is said beside the figures
(EXPLAINED).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import peers
import tiny_models
from tokenizers import Tokenizer

from hotset.backends.base import Batch
from hotset.backends.cpu.backend import CpuBackend
from hotset.convert.hf import convert_hf
from hotset.formats.gguf import open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

N_PROMPT, N_NEW, PAGES = 40, 16, 2
TOLERANCE = 1e-4  # of the largest logit; and of a logarithm of a probability
CONVERT = """
import runpy, sys
root = sys.argv.pop(1)
sys.path[:0] = [root, root + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv[0] = root + "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
ADJUSTED: dict[str, dict[str, Any]] = {
    # Its converter writes 1e-5 whatever config.json says, and its engine wants as many heads of keys as of
    # queries.
    "olmoe": {"rms_norm_eps": 1e-5, "num_key_value_heads": 6},
    "olmoe-normalised": {"rms_norm_eps": 1e-5, "num_key_value_heads": 6},
    # Its engine has one epsilon for all norms, as published models have; by the number of layers it knows
    # those without q_lora_rank.
    "deepseek2-lite": {"rms_norm_eps": 1e-6, "num_hidden_layers": 27},
    # Nor does it know biases there, nor an mscale that is not mscale_all_dim.
    "deepseek2-groups": {
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        **tiny_models.rope("yarn", mscale=1.0, mscale_all_dim=1.0, beta_fast=8.0),
    },
    "deepseek2-v3": {"rms_norm_eps": 1e-6},
    "deepseek2-kimi": {"rms_norm_eps": 1e-6, "q_lora_rank": 28},
    # Its engine rounds where YaRN's ramp begins and ends, which the model does not.
    "gpt-oss": _PLAIN_ROPE,
    "gpt-oss-mxfp4": _PLAIN_ROPE,
    "smallthinker-windows": {"sliding_window_size": 4096},  # whatever the file says
    "glm4moe": {"num_nextn_predict_layers": 0},  # it asks for their tensors
    "glm4moe-groups": {"num_nextn_predict_layers": 0},
}
WRITTEN = {"deepseek2-v3": {"scoring_func": "sigmoid"}, "deepseek2-kimi": {"scoring_func": "sigmoid"}}
EXPLAINED = {
    "lfm2moe": "its converter writes no scale of the experts' weights",
    "mixtral-window": "its converter writes no window for Mixtral, which no published one has",
    "qwen3moe-raw-weights": "its engine normalises the weights of qwen3moe whatever the checkpoint says",
    "olmoe-normalised": "its engine never normalises those of olmoe",
    "gpt-oss-pattern": "its engine rounds the ends of YaRN's ramp, and gives each second layer a window",
    "gpt-oss-mxfp4": "both engines quantise what MXFP4 is multiplied with, each in its way",
    "deepseek2-groups": "its engine chooses groups by their two best experts",
}


def make(name: str, folder: Path) -> None:
    """The checkpoint of a recipe."""
    packed = name == "gpt-oss-mxfp4"
    recipe = tiny_models.EXPERTS["gpt-oss" if packed else name]
    recipe = replace(recipe, written_as=recipe.written_as | WRITTEN.get(name, {}))
    model = tiny_models.build(recipe, **ADJUSTED.get(name, {}))
    (tiny_models.save_packed if packed else tiny_models.save)(recipe, model, folder)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|observation|>"]
    )  # that GLM's must have
    tokenizer.save(str(path))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {
        "eos_token": "<|end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    path.write_text(json.dumps(settings))


class Engine:
    """hotset's engine for the CPU with a cache in F32."""

    def __init__(self, path: Path) -> None:
        self.gguf = open_gguf(path)
        graph = describe(config_from_gguf(self.gguf).for_context(64 * PAGES), self.gguf.tensors)
        self._backend = CpuBackend(
            self.gguf, graph, n_pages=PAGES, n_states=2, max_batch=64, kv_type="f32", n_threads=2
        )
        self._n_steps = 0  # of the text

    def logits(self, ids: list[int], first: int = 0) -> np.ndarray:
        """Of tokens at the positions from `first` on, [n_tokens, n_vocab]."""
        n = len(ids)
        self._n_steps = self._n_steps + 1 if first else 0
        positions = np.arange(first, first + n, dtype=np.int32)
        table = np.arange(PAGES, dtype=np.int32)[None]
        tokens, every = np.array(ids, np.int32), np.arange(n, dtype=np.int32)
        batch = Batch(tokens, positions, np.zeros(n, np.int32), table, every)
        return self._backend.step(batch.with_states_of_rows(self._n_steps)).logits.copy()

    def greedy(self, ids: list[int]) -> tuple[list[int], np.ndarray]:
        """N_NEW tokens, and the logarithms of all tokens' probabilities before each."""
        rows, found = [self.logits(ids)[-1]], []
        for i in range(N_NEW):
            found.append(int(rows[-1].argmax()))
            rows.append(self.logits([found[-1]], len(ids) + i)[0])
        scores = np.array(rows[:N_NEW], np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        return found, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))

    def close(self) -> None:
        self._backend.close()
        self.gguf.close()


@contextlib.contextmanager
def llama_server(binaries: Path, model: Path) -> Iterator[str]:
    """The address of a llama-server that has loaded the model; RuntimeError with its last words."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        binaries / "llama-server",
        "-m",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-webui",
    ]
    command += ["-c", "256", "-t", "2", "-np", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-warmup"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(binaries)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(600):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(why(log.read().decode(errors="replace")))
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
                time.sleep(0.1)
            yield address
        finally:
            process.terminate()
            process.wait()


def why(log: str) -> str:
    """The line of a log that says what went wrong."""
    lines = [line for line in log.splitlines() if "error" in line.lower()]
    return (lines or log.splitlines() or ["it said nothing"])[0][-200:]


def next_token(address: str, ids: list[int], n_vocab: int) -> tuple[int, dict[int, float]]:
    """The greedy token, and the logarithms of the probabilities: none where it is a part of a character, of
    which the server does not report."""
    request = {"prompt": ids, "n_predict": 1, "temperature": 0, "n_probs": n_vocab, "return_tokens": True}
    body = json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/completion", body, headers)) as response:
        found = json.load(response)
    rows = found.get("completion_probabilities", ())
    return found["tokens"][0], {one["id"]: one["logprob"] for row in rows for one in row["top_logprobs"]}


def compare(name: str, source: Path, binaries: Path, folder: Path) -> dict[str, Any]:
    """One line of the table."""
    make(name, folder)
    ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
    convert_hf(folder, ours, "f32")
    command = [sys.executable, "-c", CONVERT, source, folder, "--outtype", "f32", "--outfile", theirs]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"name": name, "converter": why(done.stderr)}
    ids = np.random.default_rng(0).integers(0, 256, N_PROMPT).tolist()
    one, other = Engine(ours), Engine(theirs)
    found, expected = other.logits(ids), one.logits(ids)
    result: dict[str, Any] = {
        "name": name,
        "logits": float(np.abs(found - expected).max() / np.abs(expected).max()),
        "tensors": sum(
            n not in one.gguf.tensors or not np.array_equal(other.gguf.data(n), one.gguf.data(n))
            for n in other.gguf.tensors
        ),
    }
    tokens, scores = other.greedy(ids)
    n_vocab = scores.shape[1]
    one.close()
    other.close()
    try:
        with llama_server(binaries, theirs) as address:
            answers = [next_token(address, ids + tokens[:i], n_vocab) for i in range(N_NEW)]
    except (RuntimeError, OSError) as error:
        return result | {"server": str(error)}
    same = sum(token == found for token, (found, _) in zip(tokens, answers, strict=True))
    off = [abs(row[t] - scores[i][t]) for i, (_, row) in enumerate(answers) for t in row]
    return result | {"tokens": same, "of": N_NEW, "log_probability": max(off, default=None)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="recipes; all MoE models without one")
    parser.add_argument(
        "--source", type=Path, required=True, help="llama.cpp's repository, with its converter"
    )
    parser.add_argument("--llama", type=Path, required=True, help="bin folder of a build of it")
    args = parser.parse_args()
    known = [n for n in tiny_models.EXPERTS if not n.startswith("turbosparse")] + ["gpt-oss-mxfp4"]
    results = []
    for name in args.names or known:
        with tempfile.TemporaryDirectory() as folder:
            results.append(compare(name, args.source.resolve(), args.llama.resolve(), Path(folder)))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    rows = []
    for r in results:
        if "converter" in r:
            rows.append([r["name"], "not converted", "", "", "", r["converter"]])
            continue
        answers = f"{r['tokens']} of {r['of']}" if "tokens" in r else "not loaded"
        off = r.get("log_probability")
        score = "" if off is None else f"{off:.1e}"
        note = r.get("server") or EXPLAINED.get(r["name"], "")
        rows.append([r["name"], str(r["tensors"]), f"{r['logits']:.1e}", answers, score, note])
    columns = [
        "model",
        "tensors that differ",
        "logits differ by",
        "llama.cpp's tokens",
        "log p differs by",
        "",
    ]
    peers.print_table(columns, rows)
    peers.print_json("converters", results=results)
    bad = [r["name"] for r in results if r.get("logits", 1) > TOLERANCE and r["name"] not in EXPLAINED]
    sys.exit(f"not explained: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
