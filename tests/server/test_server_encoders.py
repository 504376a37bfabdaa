"""An embedding model in the server: vectors, and one message for requests that it does not support."""

from __future__ import annotations

import tempfile
from pathlib import Path

import httpx
import numpy as np
import pytest
from api_schemas import SCHEMAS, ApiSchema
from made_once import made_once
from tiny_tokenizers import trained_word_piece

import hotset
from hotset.convert.hf import convert_hf

tiny_models = pytest.importorskip("tiny_models")

MESSAGE = (
    "this is an embedding model, which neither generates nor scores text; use hotset embed or /v1/embeddings"
)
TEXTS = ["The quick brown fox", "jumps over the lazy dog", "The quick brown fox"]


@pytest.fixture
def path(run_folder: Path) -> Path:
    """Return a BERT with its own kind of tokenizer and without a chat template."""

    def make(target: Path) -> None:
        recipe = tiny_models.ENCODERS["bert"]
        with tempfile.TemporaryDirectory(dir=run_folder) as name:
            folder = Path(name)
            tiny_models.save(recipe, tiny_models.build(recipe), folder)
            (folder / "tokenizer.json").write_text(trained_word_piece().to_str())
            (folder / "tokenizer_config.json").write_text("{}")
            convert_hf(folder, target, "f32")

    return made_once(run_folder / "bert-word-piece.gguf", make)


async def test_vectors_equal_the_librarys(path: Path, client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/embeddings", json={"input": TEXTS})
    rows = [row["embedding"] for row in reply.json()["data"]]
    assert rows[0] == rows[2] != rows[1]
    with hotset.load(path, device="cpu", n_threads=1) as model:
        np.testing.assert_array_equal(np.array(rows, np.float32), model.embed(TEXTS))
    long = await client.post("/v1/embeddings", json={"input": "fox " * 400})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("schema", SCHEMAS, ids=repr)
async def test_requests_to_generate_are_refused(client: httpx.AsyncClient, schema: ApiSchema) -> None:
    for stream in (False, True):
        reply = await client.post(schema.url, json=schema.body(stream=stream))
        assert (reply.status_code, schema.error(reply)) == (400, MESSAGE)
