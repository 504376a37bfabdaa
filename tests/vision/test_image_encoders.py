"""Image encoders compared with transformers: the same pixels, and the same embeddings within a tolerance.

Tiny models have random parameters, and images of several aspect ratios. The reference and the CPU backend run
each family.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import cpu_backend

from hotset.backends.base import Batch
from hotset.backends.decoded import decoded_vector
from hotset.backends.reference import ReferenceBackend
from hotset.engine.images import ImageTokens, SequenceImages
from hotset.errors import FormatError, InvalidRequestError, StepCancelledError, UnsupportedModelError
from hotset.formats.gguf import GGUFWriter, copy_metadata, open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.vision.config import NEWLINE
from hotset.vision import ImageEncoder, Picture
from hotset.vision.encoder import batch_of
from hotset.vision.layouts import in_rows, scaled_sizes
from hotset.vision.patches import images_of, steps_of

tiny_vision = pytest.importorskip("tiny_vision")
from tiny_vision import (  # noqa: E402
    N_EMBD,
    RECIPES,
    SIZES,
    by_rows,
    image_of,
    shared_encoder,
    shared_features,
    shared_text_model,
)

TOLERANCE = 1e-4  # of the largest value
LEAST_TOKENS = {"idefics3": 4, "internvl": 4, "internvl-6b": 4, "gemma3": 16, "llava": 16, "llava-next": 17}
PICTURES = [Picture.of(image_of(size)) for size in SIZES]


@pytest.fixture(params=RECIPES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(path: Path, **how: Any) -> ImageEncoder:
    return ImageEncoder.open(path, n_embd=N_EMBD, **how)


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_pixels_equal_the_processors(name: str, run_folder: Path) -> None:
    expected = shared_features(name, run_folder)
    with opened(shared_encoder(name, run_folder)) as encoder:
        config = encoder.config
        for i, picture in enumerate(PICTURES):
            sizes = scaled_sizes(config, *picture.pixels.shape[:2], "auto", None)
            rows = []
            images = images_of(config, picture.pixels, sizes)
            for image, step in zip(images, steps_of(config, picture.pixels, sizes), strict=True):
                patches = step.rows[: len(step.rows) - step.n_class, : config.n_pixels]
                if step.order is not None:
                    patches = patches.reshape(len(step.order), -1)[step.order].reshape(patches.shape)
                grid = image.shape[0] // config.patch, image.shape[1] // config.patch
                rows.append(by_rows(patches, grid, config.merge))
            assert np.array_equal(np.concatenate(rows), expected[f"pixels {i}"]), SIZES[i]


def test_embeddings_match_transformers(name: str, run_folder: Path) -> None:
    expected = shared_features(name, run_folder)
    with opened(shared_encoder(name, run_folder)) as encoder:
        for i, picture in enumerate(PICTURES):
            found = encoder.encode(picture)
            assert difference(found, expected[f"features {i}"]) < TOLERANCE, SIZES[i]
            assert encoder.layout(picture).n_tokens == len(found)


def test_reference_matches_transformers(name: str, run_folder: Path) -> None:
    expected = shared_features(name, run_folder)
    with opened(shared_encoder(name, run_folder)) as encoder:
        config, weights = encoder.config, encoder.weights
        sizes = scaled_sizes(config, *SIZES[3], "auto", None)
        steps = list(steps_of(config, PICTURES[3].pixels, sizes))
        n = max(len(step.rows) for step in steps)
        how = {"n_blocks": -(-n // 64), "max_batch": n, "kv_type": "f32"}
        with closing(ReferenceBackend(weights, encoder.graph, **how)) as backend:
            found = [
                backend.step(batch_of(step, config.merge**2), step.rows).logits[
                    slice(None) if step.order is None else step.order
                ]
                for step in steps
            ]
        rows = np.concatenate(found)
        if sizes.kept is not None:
            rows = in_rows(config, sizes, rows, decoded_vector(weights, NEWLINE))
        assert difference(rows, expected["features 3"]) < TOLERANCE


def test_every_operation_is_right(name: str, run_folder: Path) -> None:
    """Compare each value of the native step with the reference's result for the same inputs."""
    with opened(shared_encoder(name, run_folder)) as encoder:
        config, weights, graph = encoder.config, encoder.weights, encoder.graph
        (step, *_) = steps_of(config, PICTURES[1].pixels, scaled_sizes(config, *SIZES[1], "auto", None))
        names = tuple(op.out.name for op in graph.primitives)
        n = len(step.rows)
        how = {"n_blocks": -(-n // 64), "max_batch": n, "kv_type": "f32"}
        batch = batch_of(step, config.merge**2)
        with closing(ReferenceBackend(weights, graph, **how)) as reference:
            expected = reference.step(type(batch)(**{**vars(batch), "taps": names}), step.rows).taps
        with closing(cpu_backend(weights, graph, **how)) as backend:
            backend.run(type(batch)(**{**vars(batch), "taps": names}), step.rows)
            for value in names:
                assert difference(backend.tapped[value], expected[value]) < TOLERANCE, value


def test_threads_and_instructions_change_no_bit(
    name: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found = shared_encoder(name, run_folder), []
    for threads, isa in ((1, ""), (3, ""), (2, "scalar")):
        monkeypatch.setenv("HOTSET_ISA", isa)
        with opened(path, threads=threads) as encoder:
            found.append([encoder.encode(picture) for picture in (*PICTURES, PICTURES[0])])
    for others in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], others, strict=True))
    assert np.array_equal(found[0][0], found[0][-1])  # the same image again, after others


@pytest.mark.parametrize("size", SIZES[:3])
def test_logits_match_transformers(name: str, size: tuple[int, int], run_folder: Path) -> None:
    """Compare the logits of a prompt with an image, of a model whose file the converter wrote."""
    torch, model, picture = tiny_vision.torch, RECIPES[name].model(), Picture.of(image_of(size))
    with opened(shared_encoder(name, run_folder)) as encoder:
        layout, rows, groups = encoder.layout(picture), encoder.encode(picture), not encoder.causal
        n_layers = encoder.n_layers
    n = len(rows)
    tokens = [1, 2, *[tiny_vision.IMAGE_TOKEN] * n, 3, 4]
    kinds = torch.tensor([[int(token == tiny_vision.IMAGE_TOKEN) for token in tokens]])
    known = inspect.signature(model.forward).parameters
    how = {key: kinds for key in ("token_type_ids", "mm_token_type_ids") if key in known}
    with torch.no_grad():
        given = RECIPES[name].processed(image_of(size))
        expected = model(input_ids=torch.tensor([tokens]), **given, **how).logits[0].numpy()
    with open_gguf(shared_text_model(name, run_folder)) as gguf:
        config = config_from_gguf(gguf).for_images(groups=groups, n_layers=n_layers)
        rows /= np.float32(config.embedding_scale)
        run = ImageTokens(2, rows, layout.positions, layout.n_positions, groups)
        images = SequenceImages(tokens, [run], 512)
        at = np.arange(len(tokens), dtype=np.int32)
        batch = Batch(
            np.maximum(tokens, 0).astype(np.int32), at, 0 * at, np.arange(8, dtype=np.int32)[None], at,
            image_rows=images.rows(0, len(tokens), 0)[0],
            rotary=images.rotary(0, len(tokens)) if images.has_rotary else None,
            groups=images.groups(0, len(tokens)) if groups else None,
        )  # fmt: skip
        graph = describe(config, gguf.tensors)
        for make in (ReferenceBackend, cpu_backend):
            with closing(make(gguf, graph, n_blocks=8, max_batch=512, kv_type="f32")) as backend:
                assert difference(backend.step(batch).logits, expected) < TOLERANCE


@pytest.mark.parametrize(("type", "bound"), [("f16", 5e-3), ("bf16", 3e-2), ("q8_0", 8e-2), ("q4_0", 0.6)])
def test_quantised_encoders_work(name: str, type: str, bound: float, run_folder: Path) -> None:
    """Small random models amplify errors. Unrelated embeddings would differ by about 1.4."""
    expected = shared_features(name, run_folder)["features 0"]
    with opened(shared_encoder(name, run_folder, type)) as encoder:
        found = encoder.encode(PICTURES[0])
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < bound


# ---- files


def changed(path: Path, out: Path, change: Any) -> Path:
    """Write a copy of a file; change(name) returns the new name of a tensor, or None to leave it out."""
    with open_gguf(path) as gguf:
        writer = GGUFWriter(out, None)
        copy_metadata(gguf, writer)
        for old, info in gguf.tensors.items():
            if (new := change(old)) is not None:
                writer.add_tensor(new, gguf.data(old).copy(), info.type, info.shape)
        writer.write()
    return out


def test_old_converters_swapped_the_ffn(run_folder: Path, tmp_path: Path) -> None:
    path, swap = shared_encoder("idefics3", run_folder), {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}

    def swapped(name: str) -> str:
        return ".".join(swap.get(part, part) for part in name.split("."))

    with opened(path) as encoder, opened(changed(path, tmp_path / "old.gguf", swapped)) as old:
        assert np.array_equal(encoder.encode(PICTURES[3]), old.encode(PICTURES[3]))


def test_another_models_encoder_is_refused(run_folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="makes embeddings of 24 numbers, but the model needs 32"):
        ImageEncoder.open(shared_encoder("gemma3", run_folder), n_embd=32)


def test_missing_and_unknown_tensors_are_named(run_folder: Path, tmp_path: Path) -> None:
    path = shared_encoder("qwen2.5vl", run_folder)
    lacks = changed(path, tmp_path / "a.gguf", lambda name: None if name == "mm.2.bias" else name)
    opened(lacks).close()  # a bias may be missing
    lacks = changed(path, tmp_path / "b.gguf", lambda name: None if name == "mm.2.weight" else name)
    with pytest.raises(UnsupportedModelError, match=r"lacks the tensor mm\.2\.weight"):
        opened(lacks)
    more = changed(path, tmp_path / "c.gguf", lambda name: "v.odd.weight" if name == "mm.2.bias" else name)
    with pytest.raises(UnsupportedModelError, match=r"no clip model uses, such as odd\.weight"):
        opened(more)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("projector_type", "ldp", "an encoder of the type 'ldp', which is not supported"),
        ("vision.image_size", 33, "no multiple of 16 pixels of a token"),
        ("vision.attention.head_count", 7, "is 7, for a width of 48"),
        ("vision.image_mean", [0.5], "must hold a number for each of three channels"),
        ("vision.image_std", [0.0, 1.0, 1.0], "outside 0.001 to 10"),
        ("vision.block_count", 5000, "outside 1 to 1024"),
        ("vision.image_size", 8192, "outside 16 to 4096"),
        ("vision.image_grid_pinpoints", [32, 33], "must hold heights and widths, multiples of 32"),
        ("vision.image_grid_pinpoints", [32, 64, 32], "must hold heights and widths"),
        ("vision.image_grid_pinpoints", ["32", "64"], "must be an integer"),
        ("vision.image_grid_pinpoints", [32, 8192], "outside 1 to 4096"),
        ("vision.image_grid_pinpoints", 32, "must hold heights and widths"),
        ("vision.feature_layer", [1], "must hold the last layer, 2"),
        ("vision.feature_layer", 2, "must hold the last layer, 2"),
        ("vision.preproc_image_size", 4096, "divides an image into 16384 tiles, more than 1024"),
    ],
)
def test_odd_keys_are_named(key: str, value: object, error: str, run_folder: Path, tmp_path: Path) -> None:
    name = "llava-next" if key in ("vision.image_grid_pinpoints", "vision.feature_layer") else "idefics3"
    with pytest.raises((UnsupportedModelError, FormatError), match=error):
        opened(with_keys(shared_encoder(name, run_folder), tmp_path / "odd.gguf", {key: value}))


def test_images_that_would_fill_the_memory_are_refused(run_folder: Path, tmp_path: Path) -> None:
    path = with_keys(
        shared_encoder("internvl", run_folder), tmp_path / "large.gguf", {"vision.image_size": 4096}
    )
    with pytest.raises(FormatError, match="gives an image more than 33554432 pixels"):
        opened(path)


def with_keys(path: Path, out: Path, keys: Mapping[str, object]) -> Path:
    """Copy the file of an encoder with other values of keys, without `clip.`."""
    with open_gguf(path) as gguf:
        writer = GGUFWriter(out, None)
        for name, old in gguf.metadata.items():
            writer.add(name, keys.get(name.removeprefix("clip."), old))
        for name, info in gguf.tensors.items():
            writer.add_tensor(name, gguf.data(name).copy(), info.type, info.shape)
        writer.write()
    return out


# ---- sizes and places


def test_tiles_have_the_processors_text(run_folder: Path) -> None:
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    processor = Idefics3Processor.__new__(Idefics3Processor)
    processor.fake_image_token, processor.global_image_tag = "<fake_token_around_image>", "<global-img>"
    processor.image_token, processor.image_seq_len = "<image>", 4
    with opened(shared_encoder("idefics3", run_folder)) as encoder:
        images = RECIPES["idefics3"].processor()
        for size, picture in zip(SIZES, PICTURES, strict=True):
            found = images([[image_of(size)]], return_tensors="pt", return_row_col_info=True)
            expected = processor.replace_image_token(found, 0)
            pieces = encoder.layout(picture).pieces
            assert "".join("<image>" * p if isinstance(p, int) else p for p in pieces) == expected


def test_a_limit_of_tokens_makes_images_smaller(name: str, run_folder: Path) -> None:
    with opened(shared_encoder(name, run_folder)) as encoder:
        for picture in PICTURES:
            most = encoder.layout(picture).n_tokens
            least = LEAST_TOKENS.get(name, 12)
            for limit in range(least, most + 1, 3):
                layout = encoder.layout(picture, max_tokens=limit)
                assert layout.n_tokens <= limit
                assert sum(piece for piece in layout.pieces if isinstance(piece, int)) == layout.n_tokens
            n = encoder.layout(picture, max_tokens=least).n_tokens
            assert encoder.encode(picture, max_tokens=least).shape == (n, N_EMBD * (1 + encoder.n_layers))
    if name in LEAST_TOKENS:
        with opened(shared_encoder(name, run_folder)) as encoder, pytest.raises(InvalidRequestError) as error:
            encoder.layout(PICTURES[0], max_tokens=least - 1)
        assert f"has at least {least} tokens in this model, more than the limit of {least - 1}" in str(error)


def test_low_detail_is_one_tile(run_folder: Path) -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    with opened(shared_encoder("idefics3", run_folder)) as encoder:
        sizes = scaled_sizes(encoder.config, *SIZES[0], "low", None)
        (image,) = images_of(encoder.config, PICTURES[0].pixels, sizes)
        assert encoder.layout(PICTURES[0], "low").n_tokens == 4
    whole = Idefics3ImageProcessorPil(
        size={"longest_edge": 96}, max_image_size={"longest_edge": 32}, do_image_splitting=False,
        do_normalize=False, do_rescale=False,
    )  # fmt: skip
    expected = whole([[PICTURES[0].pixels]], return_tensors="np")["pixel_values"][0, 0]
    assert np.array_equal(image.transpose(2, 0, 1), expected)


def test_rows_end_with_tokens(run_folder: Path) -> None:
    """Compare with PixtralProcessor.replace_image_token: a token after each row, another after the last."""
    with opened(shared_encoder("pixtral", run_folder)) as encoder:
        for picture in PICTURES:
            height, width = scaled_sizes(encoder.config, *picture.pixels.shape[:2], "auto", None).scalings[0]
            row = "[IMG]" * (width // 8)
            expected = "[IMG_BREAK]".join([row] * (height // 8)) + "[IMG_END]"
            pieces = encoder.layout(picture).pieces
            assert "".join("[IMG]" * p if isinstance(p, int) else p for p in pieces) == expected


@pytest.mark.parametrize("name", ["qwen2vl", "qwen2.5vl", "qwen3vl"])
def test_positions_equal_transformers(name: str, run_folder: Path) -> None:
    torch = tiny_vision.torch
    model = RECIPES[name].model().model
    ids = model.config.vision_start_token_id, model.config.image_token_id
    with opened(shared_encoder(name, run_folder)) as encoder:
        layout = encoder.layout(PICTURES[0])
    rows, columns = layout.positions[-1, 1:] + 1
    text = [1, 2, ids[0], *[ids[1]] * layout.n_tokens, 3, 4]
    grid = torch.tensor([[1, 2 * rows, 2 * columns]])
    kinds = torch.tensor([[int(id == ids[1]) for id in text]])
    expected, _ = model.get_rope_index(torch.tensor([text]), mm_token_type_ids=kinds, image_grid_thw=grid)
    expected = expected[:, 0].T.numpy()
    assert np.array_equal(layout.positions + 3, expected[3:-2])
    assert (expected[-2] == 3 + layout.n_positions).all()


def test_gemma_4_is_causal_in_models_of_two_widths(run_folder: Path) -> None:
    """Check the widths of E2B and E4B, as in llama.cpp: no key of either file says it."""
    with opened(shared_encoder("gemma4", run_folder)) as encoder:
        assert not encoder.causal
        assert all(replace(encoder.config, n_out=n).causal for n in (1536, 2560))


def test_narrow_images_are_refused(run_folder: Path) -> None:
    narrow = Picture.of(np.zeros((1, 201, 3), np.uint8))
    for name in ("qwen2vl", "llava"):
        too_narrow = pytest.raises(InvalidRequestError, match="201 x 1 pixels is too narrow")
        with opened(shared_encoder(name, run_folder)) as encoder, too_narrow:
            encoder.layout(narrow)
    with opened(shared_encoder("idefics3", run_folder)) as encoder:
        assert encoder.encode(narrow).shape == (encoder.layout(narrow).n_tokens, N_EMBD)


def test_encoding_ends_between_tiles(run_folder: Path) -> None:
    with opened(shared_encoder("internvl", run_folder)) as encoder:
        whole, asked = encoder.encode(PICTURES[0]), iter([False, True])
        with pytest.raises(StepCancelledError):
            encoder.encode(PICTURES[0], stops=lambda: next(asked))
        assert np.array_equal(encoder.encode(PICTURES[0]), whole)


def test_unknown_detail_is_named(run_folder: Path) -> None:
    with opened(shared_encoder("gemma3", run_folder)) as encoder:
        with pytest.raises(InvalidRequestError, match="one of auto, low, high, not 'medium'"):
            encoder.layout(PICTURES[0], "medium")
        encoder.close()
        with pytest.raises(InvalidRequestError, match="has been closed"):
            encoder.encode(PICTURES[0])
