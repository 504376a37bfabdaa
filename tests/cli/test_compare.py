"""Comparison of models: results equal NumPy's on whole logits; and the syntax of --compare."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import write_model as write_dense
from byte_models import write_sparse
from cli_runs import inside
from fake_backend import FakeBackend

import hotset
from hotset.cli.compare import Side, sides_of
from hotset.engine.engine import Engine
from hotset.engine.perplexity import compare_chunks, kl_divergence
from hotset.errors import InvalidRequestError
from hotset.formats.gguf import open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.thresholds import LayerThresholds
from hotset.sparsity.thresholds import Calibrated, Thresholds

TEXT = "the quick brown fox jumps over the lazy dog; " * 12
N_CTX, CHUNKS = 64, 3
REFERENCE: dict[str, Any] = {"device": "reference"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("models") / "plain.gguf", dialect="gguf")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Compute log-softmax row by row in float64."""
    rows = [row - np.logaddexp.reduce(row) for row in logits.astype(np.float64)]
    return np.array(rows)


def scored(model: hotset.Model) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities of each scored position [n, n_vocab], and the following tokens."""
    tokens = model.tokenizer.encode(TEXT)
    rows, targets = [], []
    for i in range(CHUNKS):
        chunk = tokens[N_CTX * i : N_CTX * (i + 1)]
        rows.append(log_softmax(model.logits(chunk)[N_CTX // 2 : -1]))
        targets += chunk[N_CTX // 2 + 1 :]
    return np.concatenate(rows), np.array(targets)


def test_the_results_equal_those_from_whole_logits(plain: Path):
    with (
        hotset.load(plain, sparsity="exact", **REFERENCE) as first,
        hotset.load(plain, predictor="svd:32", **REFERENCE) as second,
    ):
        one, other = hotset.compare([first, second], TEXT, n_ctx=N_CTX, chunks=CHUNKS)
        (p, targets), (q, _) = scored(first), scored(second)
        assert one == first.perplexity(TEXT, n_ctx=N_CTX, chunks=CHUNKS)
        alone = second.perplexity(TEXT, n_ctx=N_CTX, chunks=CHUNKS)
    assert (other.ppl, other.error, other.active_share) == (alone.ppl, alone.error, alone.active_share)
    assert one.selected_share == 1
    assert other.selected_share is not None
    assert 0 < other.selected_share < 1
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    assert len(kl) == other.n_scored == CHUNKS * 31
    measured = other.divergence
    assert measured is not None

    def same(value: float) -> Any:
        # NumPy's matrix products may differ by 1e-6 of a logit if a step has other rows.
        return pytest.approx(value, rel=1e-5, abs=1e-7)

    assert measured.kl == same(kl.mean())
    assert measured.kl > 0.001  # the models differ, so that these comparisons are meaningful
    assert measured.kl_error == same(kl.std(ddof=1) / np.sqrt(len(kl)))
    assert measured.kl_p99 == same(np.percentile(kl, 99))
    assert measured.kl_median == same(np.median(kl))
    assert measured.kl_max == same(kl.max())
    share = (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    assert 0 < share < 1
    assert measured.same_top == pytest.approx(share)
    assert measured.same_top_error == pytest.approx(np.sqrt(share * (1 - share) / (len(kl) - 1)))
    rows = np.arange(len(targets))
    difference = p[rows, targets] - q[rows, targets]
    assert measured.ppl_ratio == pytest.approx(other.ppl / one.ppl, rel=1e-9)
    assert measured.ppl_ratio == same(np.exp(difference.mean()))
    error = measured.ppl_ratio * difference.std(ddof=1) / np.sqrt(len(kl))
    assert measured.ppl_ratio_error == same(error)
    assert one.divergence is None


def test_equal_models_have_no_difference(plain: Path):
    with (
        hotset.load(plain, sparsity="dense", **REFERENCE) as first,
        hotset.load(plain, sparsity="dense", **REFERENCE) as second,
    ):
        _, other = hotset.compare([first, second], TEXT, n_ctx=N_CTX, chunks=CHUNKS)
    assert other.divergence == hotset.Divergence(0, 0, 0, 0, 0, 1, 0, 1, 0)


def test_small_differences_of_large_logits_are_computed_accurately():
    """Raise one logit by d, for which KL = ln(1 + p(e^d - 1)) - pd."""
    rng = np.random.default_rng(0)
    first = (3 * rng.standard_normal((4, 1000)) + 500).astype(np.float32)
    rows, top = np.arange(4), first.argmax(axis=1)
    nudged = first.copy()
    nudged[rows, top] += np.float32(0.01)
    p = np.exp(log_softmax(first - np.float32(500))[rows, top])
    d = nudged[rows, top].astype(np.float64) - first[rows, top]
    expected = np.log1p(p * np.expm1(d)) - p * d
    assert (expected < 2e-5).all()
    assert np.allclose(kl_divergence(first, nudged), expected, rtol=1e-8)
    assert (kl_divergence(first, first) == 0).all()
    assert (kl_divergence(first, first + np.float32(8)) < 1e-7).all()  # a shift of all logits has no effect


def engine(max_batch: int, peak: float = 3.0, n_vocab: int = 97) -> Engine:
    return Engine(FakeBackend(n_vocab=n_vocab, max_batch=max_batch, peak=peak), n_ctx=128)


@pytest.mark.parametrize("bos_id", [None, 1])
def test_steps_of_different_sizes_give_the_same_results(bos_id: int | None):
    tokens = np.random.default_rng(1).integers(0, 97, 300).tolist()

    def last(*batches: int) -> hotset.PerplexityResult:
        engines = [engine(batches[0]), engine(batches[1], peak=2.5)]
        *_, (_, result) = compare_chunks(engines, tokens, n_ctx=65, bos_id=bos_id, n_neurons=[200, 200])
        assert all(one.scheduler.pool.n_available == one.scheduler.pool.n_blocks for one in engines)
        return result

    same = last(128, 128)
    assert same.divergence is not None
    assert same.divergence.kl > 0
    for batches in ((7, 128), (128, 20), (7, 20)):
        other = last(*batches)
        assert other.divergence is not None
        assert other.divergence.kl == pytest.approx(same.divergence.kl, rel=1e-12)
        assert (other.ppl, other.n_scored) == (same.ppl, same.n_scored)


def test_the_logits_of_a_whole_text_are_never_stored(monkeypatch: pytest.MonkeyPatch):
    """Check that at most the rows of one step are stored, and that they are compared in tiles."""
    import hotset.engine.perplexity as perplexity_module
    import hotset.engine.scheduler as scheduler_module

    monkeypatch.setattr(scheduler_module, "MAX_LOGITS_BYTES", 4 * 97 * 5)
    monkeypatch.setattr(perplexity_module, "TILE_BYTES", 8 * 97 * 2)
    widest: list[int] = []
    log_softmax = perplexity_module.log_softmax
    monkeypatch.setattr(
        perplexity_module, "log_softmax", lambda logits: widest.append(len(logits)) or log_softmax(logits),
    )  # fmt: skip
    engines = [engine(128), engine(128, peak=2.5), engine(128, peak=3)]
    list(compare_chunks(engines, list(range(97)) * 4, n_ctx=64, n_neurons=[1, 1, 1]))
    assert max(widest) == 2
    assert sum(widest) == 3 * 6 * 31  # once for each model


def test_a_failure_of_one_model_frees_both():
    engines = [engine(16), engine(16)]
    engines[1].backend.fail_at_step = 5
    with pytest.raises(RuntimeError, match="fails as requested"):
        list(compare_chunks(engines, list(range(97)) * 4, n_ctx=64, n_neurons=[1, 1]))
    pools = [one.scheduler.pool for one in engines]
    assert all(pool.n_available == pool.n_blocks for pool in pools)
    assert not any(one.has_work for one in engines)


def test_models_that_cannot_be_compared_give_a_message(plain: Path, tmp_path: Path):
    with pytest.raises(hotset.InvalidRequestError, match="vocabularies of 97 and 50 tokens"):
        list(compare_chunks([engine(16), engine(16, n_vocab=50)], [1] * 200, n_ctx=64, n_neurons=[1, 1]))
    with hotset.load(plain, **REFERENCE) as first:
        with pytest.raises(hotset.InvalidRequestError, match="with itself; load it a second time"):
            hotset.compare([first, first], TEXT, n_ctx=N_CTX)
        with pytest.raises(hotset.InvalidRequestError, match="the list of models is empty"):
            hotset.compare([], TEXT)
        with (
            hotset.load(write_dense(tmp_path / "other.gguf"), **REFERENCE) as other,
            pytest.raises(
                hotset.InvalidRequestError, match=r"plain\.gguf and other\.gguf have different voc"
            ),
        ):
            hotset.compare([first, other], TEXT, n_ctx=N_CTX)


def test_two_threads_can_compare_the_same_models(plain: Path):
    with hotset.load(plain, **REFERENCE) as first, hotset.load(plain, **REFERENCE) as second:
        found: list[Any] = []

        def measure(*models: hotset.Model) -> None:
            found.append(hotset.compare(models, TEXT, n_ctx=N_CTX, chunks=2)[0].ppl)

        threads = [
            threading.Thread(target=measure, args=pair, daemon=True)
            for pair in ((first, second), (second, first))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 2
        assert found[0] == found[1]


# ---- the command line ----


BASE = hotset.LoadSettings(activation="relu", n_threads=2)


@pytest.mark.parametrize(
    ("words", "model", "changed", "said"),
    [
        ("exact", "M", {"sparsity": "exact"}, ()),
        ("svd:256:q8_0", "M", {"predictor": "svd:256:q8_0"}, ()),
        ("predicted:svd:32", "M", {"sparsity": "predicted", "predictor": "svd:32"}, ()),
        ("predicted", "M", {"sparsity": "predicted"}, ()),
        ("cache-type=q8_0", "M", {"kv_type": "q8_0"}, ("cache-type=q8_0",)),
        ("cache-type=q8_0/q4_0", "M", {"kv_type": "q8_0/q4_0"}, ("cache-type=q8_0/q4_0",)),
        ("dense,device=reference", "M", {"sparsity": "dense", "device": "reference"},
         ("device=reference",)),
        ("other.gguf", "other.gguf", {"activation": None}, ()),
        ("hf:owner/name:f.gguf,exact", "hf:owner/name:f.gguf", {"sparsity": "exact", "activation": None}, ()),
        ("other.gguf,activation=relu", "other.gguf", {}, ("activation=relu",)),
        pytest.param(
            "device=cuda:1,dense", "M", {"device": "cuda:1", "sparsity": "dense"}, ("device=cuda:1",),
            marks=pytest.mark.backend("triton"),
        ),
        ("thresholds=f", "M", {"thresholds": "f"}, ("thresholds=f",)),
        ("other.gguf,threshold", "other.gguf", {"sparsity": "threshold", "activation": None}, ()),
    ],
)  # fmt: skip
def test_syntax_of_a_side(words: str, model: str, changed: dict[str, Any], said: tuple[str, ...]):
    (first, side) = sides_of("M", BASE, [words])
    assert first == Side("M", BASE)
    assert side == Side(model, replace(BASE, **changed), said)


def test_a_sides_mode_replaces_the_commands():
    asked = replace(BASE, sparsity="predicted", predictor="svd", profile="p")
    sides = sides_of("M", asked, ["dense", "svd", "other"])
    assert [side.model for side in sides] == ["M", "M", "other"]
    assert [side.settings.sparsity for side in sides] == ["dense", None, None]
    assert [side.settings.predictor for side in sides] == [None, "svd", None]
    assert [side.settings.profile for side in sides] == [None, Path("p"), None]


@pytest.mark.parametrize("asked", [{"sparsity": "dense"}, {"predictor": "svd"}, {"thresholds": "g"}])
def test_a_sides_thresholds_replace_the_commands_mode(asked: dict[str, Any]):
    settings = replace(BASE, **asked)
    cut = [(side.settings.sparsity, side.settings.predictor, side.settings.thresholds) for side in sides_of(
        "M", settings, ["thresholds=f", "threshold,thresholds=f", "svd:64,thresholds=f"]
    )]  # fmt: skip
    f = Path("f")
    assert cut == [(None, None, f), ("threshold", None, f), (None, "svd:64", f)]
    with pytest.raises(InvalidRequestError, match="`thresholds` requires sparsity='threshold', not 'dense'"):
        sides_of("M", settings, ["dense,thresholds=f"])


def test_the_commands_thresholds_apply_to_sides_with_that_mode(plain: Path, text: Path, tmp_path: Path):
    file = tmp_path / "t.json"
    with open_gguf(plain) as gguf:
        layers = tuple([LayerThresholds(down_in=0.3)] * config_from_gguf(gguf).n_layer)
        Thresholds(Calibrated.of(gguf), layers, "exact").save(file)
    arguments = ("perplexity", plain, "-f", text, "-c", N_CTX, "--chunks", 2, "--device", "reference")

    def modes(*more: Any) -> list[str]:
        done = inside(*arguments, *more, "--json")
        sides = json.loads(done.stdout)["sides"]
        assert (sides[1]["divergence"]["kl"] > 1e-6) == (sides[0]["sparsity"] != sides[1]["sparsity"])
        return [side["sparsity"] for side in sides]

    stated = ("--thresholds", file)
    assert modes("--sparsity", "exact", *stated, "--compare", "threshold") == ["exact", "threshold"]
    assert modes("--sparsity", "exact", "--compare", f"thresholds={file}") == ["exact", "threshold"]
    assert modes(*stated, "--compare", "threshold") == ["exact", "threshold"]
    assert modes(*stated, "--compare", "dense") == ["threshold", "dense"]
    assert modes(*stated, "--sparsity", "threshold", "--compare", "threshold") == ["threshold", "threshold"]
    done = inside(*arguments, "--sparsity", "exact", *stated, "--compare", "dense", returns=2)
    assert "--thresholds requires --sparsity threshold, not 'exact'" in done.stderr


@pytest.mark.backend("triton")
def test_a_side_on_the_cpu_ignores_the_commands_gpu_options():
    on_gpu = replace(BASE, device=["cuda:0"], n_gpu_layers=4)
    sides = sides_of("M", on_gpu, ["device=cpu", "exact", "other"])
    assert [side.settings.device for side in sides] == [("cpu",), ("cuda:0",), ("cuda:0",)]
    assert [side.settings.n_gpu_layers for side in sides] == [None, 4, 4]
    on_gpu = replace(BASE, device=["cuda:0"], gpu_index="i")
    sides = sides_of("M", on_gpu, ["device=cpu", "exact", "other"])
    assert [side.settings.gpu_index for side in sides] == [None, Path("i"), None]


def test_a_file_name_may_contain_commas_and_equals_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a,b=c.gguf", "x=y.gguf"):
        Path(name).touch()
        assert sides_of("M", BASE, [name])[1].model == name
    assert sides_of("M", BASE, ["x=y.gguf,exact"])[1].model == "x=y.gguf"


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ("exact,dense", "names a mode twice"),
        ("predicted:svd,svd:64", "names a predictor twice"),
        ("a.gguf,b.gguf", "names two models"),
        ("colour=red", "not a mode, predictor, model or setting; the settings are cache-type="),
        ("exact,", "not a mode, predictor, model or setting"),
        ("cache-type=f16,cache-type=q8_0", "cache-type twice"),
    ],
)
def test_unknown_words_are_refused(plain: Path, text: Path, words: str, fragment: str):
    done = inside("perplexity", plain, "-f", text, "--compare", words, returns=2)
    assert fragment in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


def test_perplexity_compare(plain: Path, text: Path, tmp_path: Path):
    arguments = ("perplexity", plain, "-f", text, "-c", N_CTX, "--chunks", 2, "--device", "reference")
    sides = ("--compare", "exact", "--compare", "svd:32", "--compare", "dense")
    done = inside(*arguments, *sides, "--json")
    result = json.loads(done.stdout)
    assert (result["chunks"], result["n_ctx"], result["scored"]) == (2, N_CTX, 62)
    exact, predicted, dense = result["sides"]
    assert [side["name"] for side in result["sides"]] == ["exact", "svd:32:q4_0", "dense"]
    assert [side["sparsity"] for side in result["sides"]] == ["exact", "predicted", "dense"]
    assert "divergence" not in exact
    assert predicted["divergence"]["kl"] > 0
    assert dense["divergence"]["kl"] < 1e-9
    with (
        hotset.load(plain, sparsity="exact", **REFERENCE) as first,
        hotset.load(plain, predictor="svd:32", **REFERENCE) as second,
    ):
        _, expected = hotset.compare([first, second], TEXT, n_ctx=N_CTX, chunks=2)
    assert expected.divergence is not None
    assert predicted["divergence"]["kl"] == pytest.approx(expected.divergence.kl)
    assert predicted["ppl"] == pytest.approx(expected.ppl)
    assert all(side["tokens_per_second"] > 0 for side in result["sides"])
    done = inside(*arguments, *sides)
    assert re.search(r"^ +PPL +÷ first +KL mean +KL 99% +same top +active +chosen +t/s *$", done.stdout, re.M)
    pattern = (
        r"^ svd:32:q4_0 +[\d.]+ ± [\d.]+ +[\d.]+ ± [\d.]+ +\S+ ± \S+ +\S+ +[\d.]+ ± [\d.]+% +\d+% +\d+% +\d+"
    )
    assert re.search(pattern, done.stdout, re.M), done.stdout
    assert "2 chunks of 64 tokens | 62 tokens scored | KL in nats" in done.stderr


def test_files_are_named_in_a_comparison_of_several(plain: Path, text: Path, tmp_path: Path):
    other = write_sparse(tmp_path / "other.gguf", dialect="gguf", seed=9)
    arguments = ("perplexity", plain, "-f", text, "-c", N_CTX, "--chunks", 2, "--device", "reference")
    done = inside(*arguments, "--compare", f"{other},dense", "--json")
    result = json.loads(done.stdout)
    assert [side["name"] for side in result["sides"]] == ["plain exact", "other dense"]
    assert [side["model"] for side in result["sides"]] == [str(plain), str(other)]
    assert result["sides"][1]["divergence"]["kl"] > 0.1
    dense = write_dense(tmp_path / "dense.gguf")
    done = inside(*arguments, "--compare", dense, returns=2)
    assert "different vocabularies" in done.stderr
    assert "Traceback" not in done.stderr
