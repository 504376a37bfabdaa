"""Rows of images, rotary positions of several axes and groups of tokens, compared with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from transformers_oracle import BACKENDS, N_CTX, RECIPES, relative_error

from hotset.backends.base import BLOCK_SIZE, Backend, Batch, ImageRows
from hotset.backends.torch.graph import TorchGraph
from hotset.engine.images import ImageTokens, SequenceImages
from hotset.errors import InvalidRequestError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph

N, FIRST, ROWS, COLUMNS = 90, 37, 4, 6
END = FIRST + ROWS * COLUMNS
# Name → whether images have rotary positions, whether their tokens see one another, and to how many layers'
# results a part of their rows is added.
MODELS = {
    "llama": (False, False, 0),
    "gemma3": (False, True, 0),
    "qwen2vl": (True, False, 0),
    "qwen3vl": (True, False, 2),
    "qwen3vlmoe": (True, False, 1),
}


@dataclass
class Prompt:
    """A prompt with one image in a model file. logits: of transformers, [N, n_vocab]."""

    gguf: GGUFFile
    graph: Graph
    tokens: list[int]
    images: SequenceImages
    logits: np.ndarray


def positions_of(axes: bool) -> np.ndarray | None:
    at = np.arange(ROWS * COLUMNS)
    return np.stack([0 * at, at // COLUMNS, at % COLUMNS], axis=1) if axes else None


def expected(
    name: str, tokens: np.ndarray, rows: np.ndarray, axes: bool, grouped: bool, n_layers: int
) -> np.ndarray:
    """Return transformers' logits, from embeddings, positions and masks."""
    model = tiny_models.build(RECIPES[name]).eval()
    at = torch.arange(N)
    how: dict[str, Any] = {}
    if axes:
        given = at.repeat(3, 1)
        given[:, FIRST:END] = FIRST + torch.from_numpy(positions_of(True).T)  # type: ignore[union-attr]
        given[:, END:] = FIRST + max(ROWS, COLUMNS) + torch.arange(N - END)
        how["position_ids"] = given[:, None]
    if grouped:
        ago, inside = at[:, None] - at, (at >= FIRST) & (at < END)
        together, window = inside[:, None] & inside, model.config.sliding_window
        full, near = (ago >= 0) | together, ((ago >= 0) & (ago < window)) | together
        how["attention_mask"] = {
            kind: torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
            for kind, seen in (("full_attention", full), ("sliding_attention", near))
        }
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.from_numpy(tokens)[None]).clone()
        first, *more = np.split(rows, 1 + n_layers, axis=1)
        embedded[0, FIRST:END] = torch.from_numpy(first)
        if more:
            how["visual_pos_masks"] = ((at >= FIRST) & (at < END))[None]
            how["deepstack_visual_embeds"] = [torch.from_numpy(part) for part in more]
            hidden = model.model.language_model(inputs_embeds=embedded, **how).last_hidden_state
            return model.lm_head(hidden)[0].numpy()
        return model(inputs_embeds=embedded, **how).logits[0].numpy()


@pytest.fixture(params=MODELS, scope="module")
def prompt(request: pytest.FixtureRequest, run_folder: Path) -> Iterator[Prompt]:
    axes, grouped, n_layers = MODELS[request.param]
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, tiny_models.VOCABULARY, N)
    with open_gguf(tiny_models.shared_gguf(request.param, run_folder)) as gguf:
        config = config_from_gguf(gguf).for_images(groups=grouped, n_layers=n_layers)
        assert config.has_image_positions == axes
        width = config.n_embd * (1 + n_layers)
        rows = 0.5 * rng.standard_normal((ROWS * COLUMNS, width)).astype(np.float32)
        logits = expected(request.param, tokens, rows, axes, grouped, n_layers)
        run = ImageTokens(
            FIRST, rows / np.float32(config.embedding_scale), positions_of(axes), max(ROWS, COLUMNS), grouped
        )
        given = tokens.tolist()
        images = SequenceImages(given, [run], 512)
        graph = describe(config.for_context(N_CTX), gguf.tensors)
        yield Prompt(gguf, graph, [max(token, 0) for token in given], images, logits)


def batch_of(prompt: Prompt, start: int, n: int) -> Batch:
    at, images = np.arange(start, start + n, dtype=np.int32), prompt.images
    rows = images.rows(start, n, 0)
    return Batch(
        np.array(prompt.tokens[start : start + n], np.int32), at, np.zeros(n, np.int32),
        np.arange(N_CTX // BLOCK_SIZE, dtype=np.int32)[None, ::-1].copy(), np.arange(n, dtype=np.int32),
        image_rows=rows[0] if rows else None,
        rotary=images.rotary(start, n) if images.has_rotary else None,
        groups=images.groups(start, n) if images.has_groups(0) else None,
    )  # fmt: skip


def logits_of(prompt: Prompt, backend: Backend, chunks: list[int]) -> np.ndarray:
    found, start = [], 0
    for n in [*chunks, N - sum(chunks)]:
        found.append(backend.step(batch_of(prompt, start, n)).logits.copy())
        start += n
    backend.close()
    return np.concatenate(found)


def backend_of(prompt: Prompt, name: str) -> Backend:
    return BACKENDS[name](
        prompt.gguf, prompt.graph, n_blocks=N_CTX // BLOCK_SIZE, max_batch=256, kv_type="f32"
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_logits_equal_transformers(prompt: Prompt, name: str):
    found = logits_of(prompt, backend_of(prompt, name), [])
    assert relative_error(found, prompt.logits) < 1e-4


@pytest.mark.parametrize("name", BACKENDS)
def test_chunks_keep_the_bits(prompt: Prompt, name: str):
    """Check chunks that end inside the image, unless its tokens see one another."""
    whole = logits_of(prompt, backend_of(prompt, name), [])
    cut, uncut = [FIRST + 5, 9, END - FIRST - 10], [20, FIRST - 20, END - FIRST, 1, 1]
    ends = uncut if prompt.images.has_groups(0) else cut
    if name == "cpu":
        np.testing.assert_array_equal(logits_of(prompt, backend_of(prompt, name), ends), whole)
    else:
        assert relative_error(logits_of(prompt, backend_of(prompt, name), ends), whole) < 1e-5


def test_a_text_has_the_same_bits_in_the_graph_for_images(prompt: Prompt):
    plain = describe(config_from_gguf(prompt.gguf).for_context(N_CTX), prompt.gguf.tensors)
    text = replace(batch_of(prompt, 0, N), image_rows=None, rotary=None, groups=None)
    with_images, without = (
        backend_of(replace(prompt, graph=graph), "cpu").step(text).logits.copy()
        for graph in (prompt.graph, plain)
    )
    np.testing.assert_array_equal(with_images, without)


@pytest.mark.parametrize(
    "prompt", [name for name, traits in MODELS.items() if not any(traits)], indirect=True
)
def test_torch_computes_rows_of_images(prompt: Prompt):
    """Check the interpreter of training, which has neither rotary positions of images nor groups."""
    assert relative_error(torch_logits(prompt), prompt.logits) < 1e-4


@pytest.mark.parametrize(
    "prompt", [name for name, (_, _, n_layers) in MODELS.items() if n_layers], indirect=True
)
def test_torch_adds_rows_of_images_to_the_results_of_layers(prompt: Prompt):
    """Compare the interpreter of training with the reference, with positions as in text."""
    batch = replace(batch_of(prompt, 0, N), rotary=None)
    backend = backend_of(prompt, "reference")
    wanted, plain = (backend.step(one).logits for one in (batch, replace(batch, image_rows=None)))
    backend.close()
    found = torch_logits(prompt)
    assert relative_error(found, wanted) < 1e-4
    assert relative_error(found, plain) > 1e-2


def torch_logits(prompt: Prompt) -> np.ndarray:
    """Return the logits of the interpreter of training: float32 [N, n_vocab]."""
    graph = TorchGraph(prompt.gguf, prompt.graph)
    tokens, x = torch.tensor(prompt.tokens)[None], None
    [rows] = prompt.images.rows(0, N, 0)
    for part in graph.parts:
        step = graph.run(part, tokens, x, images=rows)
        x = step[part.result]
    assert x is not None
    return x.detach().numpy()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("places", "n", "wider"),
    [([0, 0], 2, 0), ([5, 3], 2, 0), ([-1], 1, 0), ([N], 1, 0), ([1], 2, 0), ([1], 1, 1)],
)
def test_rows_that_do_not_fit_are_refused(prompt: Prompt, name: str, places: list[int], n: int, wider: int):
    backend, batch = backend_of(prompt, name), batch_of(prompt, 0, N)
    rows = np.zeros((n, prompt.images.runs[0].rows.shape[1] + wider), np.float32)
    with pytest.raises(InvalidRequestError):
        backend.step(replace(batch, image_rows=ImageRows(np.array(places, np.int32), rows)))
    backend.close()
