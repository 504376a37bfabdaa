"""The Python API on models whose neurons can be skipped: modes, predictors, statistics, sidecars."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import N_FF, N_LAYER, write_sparse
from byte_models import write_model as write_dense

import hotset
from hotset.formats.overlay import Overlay
from hotset.sparsity import profile as profiles
from hotset.sparsity import sidecar


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        pytest.importorskip("hotset._core", reason="the native module is not built")
    return str(request.param)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return write_sparse(tmp_path / "published.gguf")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_sparse(tmp_path / "plain.gguf", dialect="gguf")


@pytest.fixture
def predicted(published: Path, backend: Any) -> Iterator[hotset.Model]:
    with hotset.load(published, device=backend, kv_type="f16") as model:
        yield model


TOKENS = np.random.default_rng(3).integers(0, 96, 60).tolist()
ANSWER: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}


# ---- modes ----


def test_the_default_keeps_the_meaning_of_the_file(published: Path, plain: Path, tmp_path: Path):
    dense = write_dense(tmp_path / "dense.gguf")
    expected = {published: ("predicted", "mlp"), plain: ("exact", None), dense: ("dense", None)}
    for path, (mode, predictor) in expected.items():
        with hotset.load(path, device="reference") as model:
            assert (model.sparsity.mode, model.sparsity.predictor) == (mode, predictor)
            assert model.sparsity.reason.startswith(mode)
    with hotset.load(dense, device="reference", activation="relu") as model:
        assert model.sparsity.mode == "exact"


def test_every_predictor_can_be_requested(published: Path, backend: Any):
    for predictor in ("mlp", "mlp:q8_0", "svd:16"):
        with hotset.load(published, device=backend, predictor=predictor) as model:
            assert model.sparsity.mode == "predicted"
            assert str(model.sparsity.spec).startswith(predictor)
            stats = model.generate(TOKENS, **ANSWER).stats
            assert stats is not None
            assert 0 < stats.selected_share < 1
            assert stats.active_share <= stats.selected_share


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": "half"}, "sparsity must be one of dense, exact, predicted, threshold, not 'half'"),
        ({"predictor": "oracle"}, "the predictor 'oracle' is unknown"),
        ({"predictor": "mlp"}, "must be in the file"),
        ({"sparsity": "exact", "predictor": "svd"}, "`predictor` requires sparsity='predicted'"),
        ({"sparsity": "predicted", "activation": "silu"}, "has no zeros"),
        ({"profile": "any"}, "runs exact; name a predictor too"),
    ],
    ids=str,
)
def test_unsupported_uses_of_a_model_give_one_message(plain: Path, options: dict[str, Any], message: str):
    with pytest.raises(hotset.InvalidRequestError, match=message):
        hotset.load(plain, device="reference", **options)


def test_a_context_longer_than_the_learned_positions_is_refused(tmp_path: Path):
    path = write_sparse(tmp_path / "opt.gguf", architecture="opt", n_ctx=128)
    with pytest.raises(hotset.ContextLengthError, match="longer than the 128 positions"):
        hotset.load(path, device="reference", n_ctx=129)
    with hotset.load(path, device="reference") as model:
        assert model.n_ctx == 128


# ---- files stored next to the model ----


def test_sidecars_are_built_once_and_closed_with_the_model(plain: Path):
    down = plain.with_name("plain.down.hotset.gguf")
    with hotset.load(plain, device="reference") as model:
        assert any("built in" in note and str(down) in note for note in model.notes)
        assert model.weights.data("blk.0.ffn_down_t.weight").nbytes == 64 * N_FF * 4
    written = down.stat().st_mtime_ns
    with pytest.raises(hotset.InvalidRequestError, match="has been closed"):
        model.weights.data("blk.0.ffn_down_t.weight")
    with hotset.load(plain, device="reference") as model:
        assert any("opened" in note for note in model.notes)
    assert down.stat().st_mtime_ns == written


def test_failing_load_closes_opened_files(plain: Path, monkeypatch: pytest.MonkeyPatch):
    closed = []

    def close(overlay: Overlay) -> None:
        closed.append(overlay)

    monkeypatch.setattr(Overlay, "close", close)
    with pytest.raises(hotset.OutOfMemoryError):
        hotset.load(plain, device="reference", n_ctx=10**13)
    assert len(closed) == 1


def test_a_profile_serves_the_file_that_it_was_taken_of(published: Path, tmp_path: Path):
    with hotset.load(published, device="reference", sparsity="exact") as model:
        model_id = sidecar.fingerprint(model.gguf)
        profile = profiles.collect(model.tap_steps, model.config, np.array(TOKENS, np.int32), model=model_id)
        counts = [
            np.count_nonzero(model.taps(TOKENS, [f"blk.{i}.ffn_act"])[f"blk.{i}.ffn_act"], 0) for i in (0, 1)
        ]
    for i in (0, 1):
        np.testing.assert_array_equal(profile.counts[i], counts[i])
    profile.save(tmp_path / "a.profile")
    with hotset.load(published, device="reference", profile=tmp_path / "a.profile") as model:
        assert any("profile" in note for note in model.notes)
    other = write_sparse(tmp_path / "other.gguf", seed=2)
    with pytest.raises(hotset.InvalidRequestError, match="another model file"):
        hotset.load(other, device="reference", profile=tmp_path / "a.profile")
    with pytest.raises(hotset.FormatError, match="not an activation profile"):
        hotset.load(published, device="reference", profile=other)
    with pytest.raises(hotset.InvalidRequestError, match="there is no profile"):
        hotset.load(published, device="reference", profile=tmp_path / "missing")


# ---- statistics ----


def test_dense_models_have_no_statistics(tmp_path: Path):
    with hotset.load(write_dense(tmp_path / "dense.gguf"), device="reference") as model:
        assert model.generate("hello", **ANSWER).stats is None
        assert [chunk.stats for chunk in model.stream("hello", **ANSWER)] == [None] * 9


def test_statistics_of_an_answer_equal_its_taps(plain: Path, backend: Any):
    with hotset.load(plain, device=backend) as model:
        answer = model.generate(TOKENS, **ANSWER)
        stats = answer.stats
        taps = model.taps([*TOKENS, *answer.tokens[:-1]], [f"blk.{i}.ffn_act" for i in range(N_LAYER)])
    assert stats is not None
    assert (stats.n_tokens, stats.n_steps) == (8, 8)
    fires = [(taps[f"blk.{i}.ffn_act"][-8:] != 0).mean() for i in range(N_LAYER)]
    np.testing.assert_allclose([layer.active_share for layer in stats.layers], fires)
    assert stats.active_share == pytest.approx(np.mean(fires))
    assert stats.selected_share == 1
    assert stats.bytes_touched_per_token < stats.bytes_total_per_token
    row = 64 * 4
    skipped = sum(2 * row * N_FF * (1 - share) for share in fires)  # up rows and down rows, not gate rows
    assert stats.bytes_total_per_token - stats.bytes_touched_per_token == pytest.approx(skipped)
    assert stats.flops == pytest.approx(2 * stats.active_parameters)
    assert all(stats.seconds[kind] > 0 for kind in ("ffn", "attention", "other"))


def test_chunks_have_the_statistics_of_their_token(predicted: hotset.Model):
    chunks = list(predicted.stream(TOKENS, **ANSWER))
    each = [chunk.stats for chunk in chunks]
    assert [stats.n_tokens for stats in each if stats] == [60, *[1] * 8]
    whole = chunks[-1].answer_stats
    assert whole is not None
    assert whole.active_share == pytest.approx(np.mean([stats.active_share for stats in each[1:] if stats]))
    assert whole.n_tokens == 8
    again = predicted.generate(TOKENS, **ANSWER, reuse_prefix=False).stats
    assert again is not None
    assert again.active_share == whole.active_share
    assert again.selected_share == whole.selected_share
    first = chunks[0].answer_stats  # so far only the prompt counts
    assert first is not None
    assert first.n_tokens == 60


def test_predictor_is_measured_against_firing_neurons(predicted: hotset.Model):
    quality = predicted.measure_predictor(TOKENS)
    assert [layer.layer for layer in quality] == list(range(N_LAYER))
    names = [
        f"blk.{i}.{name}" for i in range(N_LAYER) for name in ("ffn_pred", "ffn_norm", "ffn_gate", "ffn_up")
    ]
    with hotset.load(predicted.gguf.path, device="reference", n_ctx=64) as oracle:
        taps = oracle.taps(TOKENS, names)
    for layer in quality:
        scores, gate, up = (taps[f"blk.{layer.layer}.{name}"] for name in ("ffn_pred", "ffn_gate", "ffn_up"))
        fires, selected = (gate > 0) & (up != 0), scores >= np.float32(0.1)
        assert layer.active_share == pytest.approx(fires.mean(), abs=2e-3)
        assert layer.selected_share == pytest.approx(selected.mean(), abs=2e-3)
        assert layer.recall == pytest.approx((fires & selected).sum() / fires.sum(), abs=5e-3)
        assert layer.precision == pytest.approx((fires & selected).sum() / selected.sum(), abs=5e-3)
    running = predicted.stream(TOKENS, **ANSWER)
    first = next(running)
    assert predicted.measure_predictor(TOKENS) == quality  # during a running answer, which does not change
    tokens = first.tokens + [token for chunk in running for token in chunk.tokens]
    assert tokens == predicted.generate(TOKENS, **ANSWER).tokens


def test_measuring_needs_a_predictor(plain: Path):
    with (
        hotset.load(plain, device="reference") as model,
        pytest.raises(
            hotset.InvalidRequestError, match="the sparsity mode exact has no predictor to measure"
        ),
    ):
        model.measure_predictor(TOKENS)


def test_perplexity_counts_the_active_share(plain: Path, backend: Any):
    text = "".join(map(chr, np.random.default_rng(1).integers(33, 127, 300)))
    with hotset.load(plain, device=backend) as model:
        result = model.perplexity(text, n_ctx=64, chunks=2)
        ids = model.tokenizer.encode(text)
        shares = [
            [np.mean(value != 0) for value in model.taps(ids[i : i + 63], names).values()]
            for i in (0, 64)
            for names in [[f"blk.{i}.ffn_act" for i in range(N_LAYER)]]
        ]
        assert result.active_share == pytest.approx(np.mean(shares), abs=1e-4)
    with hotset.load(plain, device=backend, activation="silu") as model:
        assert model.perplexity(text, n_ctx=64, chunks=2).active_share is None


def test_a_model_in_a_folder_that_cannot_be_written_runs(plain: Path, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("os.access", lambda path, mode: "home" in str(path))
    with hotset.load(plain, device="reference") as model:
        assert str(tmp_path / "home") in " ".join(model.notes)
