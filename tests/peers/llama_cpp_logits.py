"""Logits of llama.cpp by llama-cpp-python's bindings: `llama_cpp_logits.py MODEL TOKENS.npy LOGITS.npy`.

This is a separate program, since llama.cpp ends its process on some invalid files. Weights keep the types of
the file; keys and values are F32, without flash attention. The prompt is one batch, except for its last
tokens, which are decoded one by one.
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp.llama_cpp as llama
import numpy as np

N_DECODED = 8


def logits(model_path: str, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of each token, [n_tokens, n_vocab]."""
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(model_path.encode(), llama.llama_model_default_params())
    if not model:
        raise SystemExit("llama.cpp does not load the file")
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = llama.GGML_TYPE_F32
    params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp makes no context")
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    n_prompt = len(tokens) - N_DECODED
    steps = [(0, n_prompt), *((i, i + 1) for i in range(n_prompt, len(tokens)))]
    return np.concatenate([_step(context, tokens, *step, n_vocab) for step in steps])


def _step(context: int, tokens: np.ndarray, start: int, stop: int, n_vocab: int) -> np.ndarray:
    batch = llama.llama_batch_init(stop - start, 0, 1)
    batch.n_tokens = stop - start
    for i, position in enumerate(range(start, stop)):
        batch.token[i], batch.pos[i] = int(tokens[position]), position
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, True
    if llama.llama_decode(context, batch):
        raise SystemExit("llama.cpp does not decode the batch")
    pointer = ctypes.cast(llama.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
    found = np.ctypeslib.as_array(pointer, (stop - start, n_vocab)).copy()
    llama.llama_batch_free(batch)
    return found


if __name__ == "__main__":
    model_path, tokens_path, logits_path = sys.argv[1:]
    np.save(logits_path, logits(model_path, np.load(tokens_path)))
