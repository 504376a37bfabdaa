"""The command line with models whose neurons can be skipped."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import N_FF, N_LAYER, write_sparse
from cli_runs import REFERENCE, TEXT, answer, inside, needs_core, write_model
from fake_backend import FakeBackend

from hotset.report.bars import bar, percent

FIXED = ("-n", 6, "--temp", 0, "--ignore-eos")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return write_sparse(tmp_path / "published.gguf")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_sparse(tmp_path / "plain.gguf", dialect="gguf")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def result(*arguments: object) -> Any:
    """Return the JSON that a subcommand prints."""
    done = inside(*arguments)
    return json.loads(done.stdout)


# -- run -----------------------------------------------------------------------------------------


def test_run_reports_its_mode_with_the_reason_and_the_bytes_read(published: Path, plain: Path) -> None:
    done = inside("run", plain, "Hello", *FIXED, *REFERENCE)
    assert re.search(r"^sparsity exact: its activation is ReLU", done.stderr, re.M)
    assert re.search(r"^neuron-major down matrices: built in .*plain\.down\.hotset\.gguf$", done.stderr, re.M)
    assert re.search(r"\| \d+% of FFN neurons fired, [\d.]+ of [\d.]+ KiB read per token \|", done.stderr)
    assert "opened" in inside("run", plain, "Hello", *FIXED, *REFERENCE).stderr
    done = inside("run", published, "Hello", *FIXED, *REFERENCE)
    assert done.stderr.startswith("sparsity predicted: the file carries predictors (fc1, fc2)\n[prompt ")
    done = inside("run", plain, "Hello", *FIXED, *REFERENCE, "--sparsity", "dense")
    assert done.stderr.startswith("sparsity dense: all neurons, as requested\n")
    assert re.search(r"\| \d+% of FFN neurons fired, [\d.]+ KiB read per token \|", done.stderr)


def test_nothing_about_sparsity_is_printed_for_a_dense_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "dense.gguf")
    done = inside("run", model, "Hello", *FIXED, *REFERENCE, "--stats")
    assert "sparsity" not in done.stderr
    assert re.search(r"\| [\d.]+ KiB read per token \|", done.stderr)
    assert "No statistics" in done.stderr
    facts = answer(model, "Hello", *FIXED, "--stats")
    assert (facts["sparsity"]["mode"], facts["active_share"], facts["stats"]) == ("dense", None, None)


def test_exact_equals_dense_and_predicted_reads_less(published: Path) -> None:
    by_mode = {
        mode: answer(published, "Hello", *FIXED, "--sparsity", mode)
        for mode in ("dense", "exact", "predicted")
    }
    assert by_mode["dense"]["tokens"] == by_mode["exact"]["tokens"]
    assert by_mode["dense"]["active_share"] == by_mode["exact"]["active_share"]
    assert by_mode["predicted"]["active_share"] < by_mode["exact"]["active_share"] < 1
    assert by_mode["exact"]["bytes_per_token"] < by_mode["dense"]["bytes_per_token"]
    for mode, facts in by_mode.items():
        assert facts["sparsity"]["mode"] == mode
        assert facts["sparsity"]["predictor"] == ("mlp" if mode == "predicted" else None)
        assert facts["sparsity"]["reason"].startswith(mode)
        assert "stats" not in facts
    asked = answer(published, "Hello", *FIXED, "--predictor", "svd:16")
    assert asked["sparsity"]["predictor"].startswith("svd:16")
    assert any("svd:16" in note for note in asked["sparsity"]["notes"])


def test_stats_are_a_table_with_a_bar_for_each_layer(published: Path, plain: Path) -> None:
    done = inside("run", published, "Hello", *FIXED, *REFERENCE, "--stats")
    header = next(line for line in done.stderr.splitlines() if line.split()[:2] == ["layer", "active"])
    assert header.split()[4:] == ["chosen", "recall", "precise", "bytes", "ms", "ms", "ms"]
    for i in range(N_LAYER):
        assert re.search(rf"^ +{i} +\d+% +█+[▏▎▍▌▋▊▉]? +\d+% +\d+% +\d+% +[\d.]+ KiB ", done.stderr, re.M)
    assert re.search(r"^ +all +\d+% +\d+% ", done.stderr, re.M)
    assert re.search(
        r"\[5 tokens \| per token: [\d.]+ K parameters active, [\d.]+ K FLOPs, predictor", done.stderr
    )
    assert "█" not in done.stdout
    done = inside("run", plain, "Hello", *FIXED, *REFERENCE, "--stats")
    assert re.search(r"^ +layer +active +to \d+% +bytes +ms +ms *$", done.stderr, re.M)
    assert "recall" not in done.stderr
    assert "chosen" not in done.stderr


def test_stats_as_json(published: Path) -> None:
    facts = answer(published, "Hello", *FIXED, "--stats")
    stats = facts["stats"]
    assert stats["active_share"] == facts["active_share"]
    assert (stats["n_tokens"], stats["n_steps"]) == (5, 5)
    assert [layer["layer"] for layer in stats["layers"]] == list(range(N_LAYER))
    for layer in stats["layers"]:
        assert 0 < layer["active_share"] <= layer["selected_share"] <= 1
        assert 0 < layer["recall"] <= 1
        assert 0 < layer["precision"] <= 1
        assert layer["bytes"] > 0
        assert layer["ffn_s"] > 0
    assert set(stats["seconds"]) == {"predictor", "ffn", "attention", "other"}
    assert stats["bytes_touched_per_token"] < facts["bytes_per_token"]  # plus the KV cache


def test_the_chat_has_statistics(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import hotset
    from hotset.cli.chat import Chat

    with hotset.load(plain, device="reference") as model:
        chat = Chat(model, None, False, {"max_tokens": 4, "temperature": 0})
        chat.handle("Hello")
        chat.handle("/stats")
    shown = capsys.readouterr().err
    assert re.search(r"^ +all +\d+% +[\d.]+ KiB ", shown, re.M)
    assert shown.count("of FFN neurons") == 2


def test_run_accepts_a_profile(published: Path, text: Path) -> None:
    counted = result("profile", published, "-f", text, "-c", 64, *REFERENCE, "--json")
    done = inside("run", published, "Hello", *FIXED, *REFERENCE, "--profile", counted["path"])
    assert re.search(r"\d+ of 192 neurons fire for at least 95% of the profile's t", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "fragment"),
    [
        (["run", "PLAIN", "hi", "--sparsity", "half"], 2, "threshold, not 'half'"),
        (["run", "PLAIN", "hi", "--predictor", "oracle"], 2, "predictor 'oracle' is unknown"),
        (["run", "PLAIN", "hi", "--predictor", "sign"], 2, "the predictor sign was removed; use svd"),
        (["run", "PLAIN", "hi", "--predictor", "mlp"], 2, "choose svd, or train"),
        (
            ["run", "PLAIN", "hi", "--sparsity", "exact", "--predictor", "svd"],
            2,
            "--predictor requires --sparsity predicted",
        ),
        (["run", "DENSE", "hi", "--sparsity", "exact"], 2, "--activation relu"),
        (["run", "PLAIN", "hi", "--profile", "TEXT"], 2, "name a predictor too"),
        (["run", "PUBLISHED", "hi", "--profile", "TEXT"], 1, "TEXT"),
        (["run", "PUBLISHED", "hi", "--profile", "missing"], 2, "there is no file missing"),
        (["bench", "DENSE", "--sparsity", "predicted"], 2, "has no zeros"),
        (["perplexity", "DENSE", "-f", "TEXT", "--sparsity", "exact"], 2, "has no zeros"),
        (["profile", "DENSE", "-f", "TEXT"], 2, "has no zeros"),
        (["profile", "PLAIN"], 2, "plain.profile.hotset.gguf"),
        (["profile", "PLAIN", "-f", "BINARY"], 2, "not UTF-8"),
        (["profile", "PLAIN", "-f", "EMPTY"], 2, "give some to profile"),
        (["profile", "PLAIN", "--merge", "TEXT"], 1, "TEXT"),
        (["profile", "PLAIN", "--import", "FOLDER"], 1, "has no activation_<layer>.pt"),
        (["reorder", "PLAIN", "out.gguf"], 2, "hotset sparse profile"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_mistake_gives_one_message(
    tmp_path: Path, published: Path, plain: Path, text: Path, arguments: list[str], code: int, fragment: str
) -> None:
    places = {"PLAIN": plain, "PUBLISHED": published, "TEXT": text, "FOLDER": tmp_path / "FOLDER"}
    places |= {name: tmp_path / name for name in ("BINARY", "EMPTY", "DENSE")}
    places["FOLDER"].mkdir()
    places["BINARY"].write_bytes(b"\xff\xfe")
    places["EMPTY"].write_bytes(b"")
    if "DENSE" in arguments:
        write_model(places["DENSE"])
    given = [str(places.get(argument, argument)) for argument in arguments]
    if arguments[0] not in ("bench", "reorder"):
        given += REFERENCE
    done = inside(*given, returns=code)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert places.get(fragment, Path(fragment)).name in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: ")


# -- measuring -----------------------------------------------------------------------------------


def test_bench_collects_statistics_in_untimed_steps() -> None:
    from hotset.cli.bench import Conditions, Test, measure

    def counted(test: Test, **options: Any) -> tuple[list[tuple[int, list[int]]], FakeBackend]:
        backend = FakeBackend(n_blocks=8, max_batch=50)
        stats = measure(backend, test, Conditions(2, 2048, **options), lambda: 1e9).stats
        return [(step.n_tokens, step.active.tolist()) for step in stats], backend

    # The warm-up computes depth and prompt in steps 1 to 3, then one token per step. Later, the first KV
    # block of the depth is reused, and the rest of the depth is computed with the prompt.
    both, backend = counted(Test(60, 3, 70), collect_stats=True)
    assert both == [(1, [10, step]) for step in (4, 5, 6)]
    assert backend.n_stats_asked == 6
    assert backend.batches == [50, 50, 30, 1, 1, 1] + 2 * [50, 16, 1, 1, 1]
    many, backend = counted(Test(0, 100, 0), collect_stats=True)
    assert (len(many), backend.n_stats_asked) == (32, 33)
    prompts, _ = counted(Test(60, 0, 70), collect_stats=True)
    assert [n for n, _ in prompts] == [30]
    nothing, backend = counted(Test(60, 3, 70))
    assert (nothing, backend.n_stats_asked) == ([], 0)
    assert backend.batches == [50, 50, 30, 1, 1] + 2 * [50, 16, 1, 1, 1]


@needs_core
def test_bench_json_has_the_mode_and_the_bytes_read(published: Path) -> None:
    arguments = ("bench", published, "-p", 16, "-n", 4, "-t", 1, "-r", 2, "-o")
    rows = {mode: result(*arguments, "json", "--sparsity", mode) for mode in ("dense", "exact", "predicted")}
    for mode, (prompt, decoding) in rows.items():
        for row in (prompt, decoding):
            assert row["sparsity"] == mode
            assert row["predictor"] == ("mlp" if mode == "predicted" else None)
            assert 0 < row["active_share"] < 1
        assert decoding["bandwidth_share"] == pytest.approx(
            decoding["avg_ts"] * decoding["bytes_per_token"] / decoding["read_bandwidth"], rel=1e-4
        )
    decoding_bytes = {mode: decoding["bytes_per_token"] for mode, (_, decoding) in rows.items()}
    assert decoding_bytes["exact"] < decoding_bytes["dense"]
    assert rows["exact"][1]["active_share"] == rows["dense"][1]["active_share"]
    assert rows["predicted"][1]["active_share"] < rows["exact"][1]["active_share"]
    table = inside(*arguments, "md").stdout
    assert re.search(r"\| of read \| +sparsity \| active \|", table)
    assert re.search(r"\| +tg4 \| +[\d.]+ ± [\d.]+ \| +\d+% \| +mlp \| +\d+% \|", table)
    lines = list(csv.DictReader(io.StringIO(inside(*arguments, "csv", "--predictor", "svd").stdout)))
    assert [line["predictor"] for line in lines] == ["svd:32:q4_0", "svd:32:q4_0"]


@needs_core
def test_bench_of_a_dense_model_does_not_print_sparsity(tmp_path: Path) -> None:
    model = write_model(tmp_path / "dense.gguf")
    arguments = ("bench", model, "-p", 0, "-n", 4, "-t", 1, "-r", 1)
    (row,) = result(*arguments, "-o", "json")
    assert (row["sparsity"], row["predictor"], row["active_share"]) == ("dense", None, None)
    assert "sparsity" not in inside(*arguments).stdout
    (row,) = result(*arguments, "-o", "json", "--activation", "relu")
    assert (row["sparsity"], row["active_share"] < 1) == ("exact", True)


def test_perplexity_has_the_mode_and_the_active_share(plain: Path, text: Path) -> None:
    arguments = ("perplexity", plain, "-f", text, "-c", 64, "--chunks", 2, *REFERENCE)
    modes = {
        mode: result(*arguments, "--sparsity", mode, "--json") for mode in ("dense", "exact", "predicted")
    }
    for mode, facts in modes.items():
        assert facts["sparsity"] == mode
        assert 0 < facts["active_share"] < 1
    assert modes["exact"]["ppl"] == pytest.approx(modes["dense"]["ppl"], rel=1e-6)
    assert modes["predicted"]["ppl"] != modes["dense"]["ppl"]
    assert modes["predicted"]["predictor"].startswith("svd")
    done = inside(*arguments)
    assert done.stderr.startswith("sparsity exact:")
    assert re.search(r"62 tokens scored \| exact: \d+% of FFN neurons active\]", done.stderr)


# -- profiles ------------------------------------------------------------------------------------


def test_profile_counts_active_neurons(plain: Path, text: Path, tmp_path: Path) -> None:
    import hotset

    counted = result("profile", plain, "-f", text, "-c", 64, "-n", 200, *REFERENCE, "--json")
    assert counted["n_tokens"] == 192  # three sequences of 64
    assert counted["path"] == str(plain.with_name("plain.profile.hotset.gguf"))
    with hotset.load(plain, device="reference") as model:
        ids = model.tokenizer.encode(TEXT)[:192]
        names = [f"blk.{i}.ffn_act" for i in range(N_LAYER)]
        taps = [model.taps(ids[i : i + 64], names) for i in range(0, 192, 64)]
    fires = [np.concatenate([part[name] != 0 for part in taps]) for name in names]
    for layer, fire in zip(counted["layers"], fires, strict=True):
        assert layer["n_ff"] == N_FF
        assert layer["active_share"] == pytest.approx(fire.mean())
        assert layer["n_never"] == (fire.sum(axis=0) == 0).sum()
    assert counted["active_share"] == pytest.approx(np.mean(fires))
    # Without a text, the stored profile is printed.
    assert result("profile", plain, "--json") == counted
    shown = inside("profile", plain)
    assert re.search(r"layer +neurons +active +make 80% +always +never", shown.stdout)
    for i in range(N_LAYER):
        assert re.search(
            rf"^ +{i} +{N_FF} +\d+% +█+[▏▎▍▌▋▊▉]? +\d+% +█+[▏▎▍▌▋▊▉]? +\d+ +\d+ *$", shown.stdout, re.M
        )
    assert re.search(r"\[192 tokens of 1 text \| \d+% of the neurons fire", shown.stderr)


def test_profiles_are_merged_and_not_overwritten(plain: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("another text, of other words " * 9)
    common = ("-c", 64, *REFERENCE, "--json")
    first = result("profile", plain, "-f", text, *common)
    assert "--merge" in inside("profile", plain, "-f", tmp_path / "more.txt", *common, returns=2).stderr
    second = result("profile", plain, "-f", tmp_path / "more.txt", "-o", tmp_path / "b", *common)
    both = result(
        "profile", plain, "--merge", first["path"], "--merge", tmp_path / "b", "-o", tmp_path / "c", "--json"
    )
    assert both["n_tokens"] == first["n_tokens"] + second["n_tokens"]
    assert both["data"] == first["data"] + second["data"]
    grown = result("profile", plain, "-f", tmp_path / "more.txt", "--merge", first["path"], *common)
    assert (grown["path"], grown["n_tokens"]) == (first["path"], both["n_tokens"])
    twice = inside(
        "profile", plain, "--merge", first["path"], "--merge", tmp_path / "b", "-o", tmp_path / "d", returns=2
    )
    assert "already contains this text" in twice.stderr
    assert not (tmp_path / "d").exists()


def test_profiles_are_exported_and_imported(plain: Path, text: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    counted = result(
        "profile", plain, "-f", text, "-c", 64, *REFERENCE, "--export", tmp_path / "activation", "--json"
    )
    files = sorted((tmp_path / "activation").iterdir())
    assert [file.name for file in files] == ["activation_0.pt", "activation_1.pt"]
    counts = [torch.load(file, weights_only=True) for file in files]
    assert all(count.shape == (N_FF,) for count in counts)
    total = sum(int(count.sum()) for count in counts)
    assert total == pytest.approx(counted["active_share"] * counted["n_tokens"] * N_FF * N_LAYER)
    imported = result(
        "profile", plain, "--import", tmp_path / "activation", "-o", tmp_path / "imported", "--json"
    )
    assert imported["n_tokens"] == max(int(count.max()) for count in counts)
    assert [layer["n_never"] for layer in imported["layers"]] == [
        layer["n_never"] for layer in counted["layers"]
    ]


def test_reorder_writes_an_equivalent_file(published: Path, text: Path, tmp_path: Path) -> None:
    result("profile", published, "-f", text, "-c", 64, *REFERENCE, "--json")
    out = tmp_path / "elsewhere" / "hot.gguf"
    out.parent.mkdir()
    written = result("reorder", published, out, "--json")
    assert written["size"] == out.stat().st_size
    assert len(written["n_always"]) == N_LAYER
    arguments = ("Hello", *FIXED, "--stats", "--sparsity")
    before, after = (answer(path, *arguments, "exact") for path in (published, out))
    assert after["tokens"] == before["tokens"]
    layers = answer(out, *arguments, "predicted")["stats"]["layers"]
    for layer, n_always in zip(layers, written["n_always"], strict=True):
        assert layer["selected_share"] >= n_always / N_FF  # the first neurons are always computed
    facts = result("show", out, "--json")["sparsity"]
    assert facts["n_always"] == (written["n_always"] if any(written["n_always"]) else None)
    done = inside(
        "reorder", published, tmp_path / "again.gguf", "--profile",
        published.with_name("published.profile.hotset.gguf"), returns=None
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"The first \d+( to \d+)? neurons of each layer are computed always", done.stderr)


# -- show ----------------------------------------------------------------------------------------


def test_show_explains_a_sparse_file(published: Path, text: Path) -> None:
    facts = result("show", published, "--json")
    sparsity, predictor = facts["sparsity"], facts["sparsity"]["predictor"]
    assert facts["format"].startswith("powerinfer")
    assert (sparsity["mode"], facts["activation"], facts["gated"]) == ("predicted", "relu", True)
    n_bytes = 4 * (64 + N_FF) * (32 + 64)
    assert predictor == {
        "kind": "mlp", "ranks": [32, 64], "types": ["F32"], "bytes": n_bytes,
        "share": pytest.approx(n_bytes / facts["size"]), "threshold": pytest.approx(0.1), "reads": "ffn_inp",
    }  # fmt: skip
    assert (sparsity["activation_counts"], sparsity["gpu_index"], sparsity["built"]) == (None, None, [])
    assert (
        inside(
            "profile",
            published,
            "-f",
            text,
            *REFERENCE,
            "-c",
            64,
            "--export",
            published.parent / "activation",
        ).returncode
        == 0
    )
    published.with_name(f"{published.name}.generated.gpuidx").touch()
    shown = inside("show", published).stdout
    assert re.search(r"by default +predicted: the file carries predictors", shown)
    assert re.search(
        r"predictor +mlp of rank 32 to 64, F32, 60\.0 KiB: \d+% of the file; threshold 0\.1, reads", shown
    )
    assert re.search(r"activation counts +\S+/activation\s", shown)
    assert re.search(r"GPU index +\S+published\.gguf\.generated\.gpuidx\s", shown)
    assert re.search(r"built by hotset +\S+published\.profile\.hotset\.gguf \(", shown)


def test_show_of_plain_files(plain: Path, tmp_path: Path) -> None:
    facts = result("show", plain, "--json")["sparsity"]
    assert (facts["mode"], facts["predictor"]) == ("exact", None)
    opt = result("show", write_sparse(tmp_path / "opt.gguf", architecture="opt"), "--json")
    assert (opt["gated"], opt["rope"]) == (False, None)
    shown = inside("show", tmp_path / "opt.gguf").stdout
    assert re.search(r"activation +relu, no gate", shown)
    assert re.search(r"positions +learned", shown)
    dense = write_model(tmp_path / "dense.gguf")
    assert result("show", dense, "--json")["sparsity"] == {
        "mode": "dense", "reason": "dense: silu has no zeros", "predictor": None, "thresholds": None,
    }  # fmt: skip
    assert result("show", dense, "--activation", "relu", "--json")["sparsity"]["mode"] == "exact"


def test_show_explains_a_damaged_key(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "odd.gguf", more={"hotset.n_always": "many"})
    facts = result("show", path, "--json")
    assert not facts["runs"]
    assert "hotset.n_always" in facts["reason"]


# -- bars ----------------------------------------------------------------------------------------


def test_bars() -> None:
    assert bar(1, 4) == "████"
    assert bar(0.5, 4) == "██"
    assert bar(0.625, 4) == "██▌"
    assert bar(1e-9, 4) == "▏"
    assert bar(0.1, 4, full=0.2) == "██"
    assert (bar(0, 4), bar(float("nan"), 4), bar(0.5, 4, full=0)) == ("", "", "")
    assert bar(7, 4) == "████"
    assert [percent(share) for share in (0.0, 0.004, 0.0994, 0.0996, 0.114, 1.0)] == [
        "0%", "0.4%", "9.9%", "10%", "11%", "100%",
    ]  # fmt: skip
    assert [percent(None), percent(float("nan"))] == ["-", "-"]
