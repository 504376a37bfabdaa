"""The same text everywhere: over HTTP and from the model, alone or with others, whole or as a stream."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from byte_models import write_sparse
from tiny_server import client_of, events_of, write_model

import hotset

GREEDY = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
# Longer than a KV block, so that it is reused; the texts after it have several lengths.
PREFIX = "".join(chr(97 + (7 * i) % 26) for i in range(100))
LOADS: dict[str, dict[str, Any]] = {
    "dense model": {}, "dense": {"sparsity": "dense"}, "exact": {"sparsity": "exact"},
    "predicted": {"sparsity": "predicted"}, "svd": {"predictor": "svd"},
}  # fmt: skip


def prompts_of(n: int, shared: bool) -> list[str]:
    return [(PREFIX if shared else "") + chr(65 + i) * (1 + i % 5) for i in range(n)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"dense": write_model(folder / "dense.gguf"), "sparse": write_sparse(folder / "sparse.gguf")}


@pytest.mark.parametrize("mode", LOADS)
async def test_greedy_text_equals_the_models_own(paths: dict[str, Path], mode: str):
    pytest.importorskip("hotset._core", reason="the native module is not built")
    path = paths["dense" if mode == "dense model" else "sparse"]
    load = LOADS[mode] | {"n_threads": 1, "n_ctx": 160, "n_seqs": 4}
    expected: dict[bool, list[str]] = {}
    with hotset.load(path, device="cpu", **load) as model:
        for shared in (False, True):
            prompts = prompts_of(16, shared)
            expected[shared] = [model.generate(one, reuse_prefix=False, **GREEDY).text for one in prompts]
    # Different prompts have different texts, so that exchanged answers are noticed.
    assert len({*expected[False], *expected[True]}) > 16

    async with client_of(path, load=load | {"max_sequences": 16}) as (client, _):

        async def asked(prompt: str, stream: bool) -> str:
            body = {"prompt": prompt, "stream": stream} | GREEDY
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            if not stream:
                return str(reply.json()["choices"][0]["text"])
            events, done = events_of(reply.text)
            assert done
            return "".join(event["choices"][0]["text"] for event in events)

        for shared in (False, True):
            for n in (1, 4, 16):
                for stream in (False, True):
                    prompts = prompts_of(n, shared)
                    texts = await asyncio.gather(*(asked(one, stream) for one in prompts))
                    assert list(texts) == expected[shared][:n], (shared, n, stream)
                mixed = await asyncio.gather(*(asked(one, i % 2 == 0) for i, one in enumerate(prompts)))
                assert list(mixed) == expected[shared][:n]
