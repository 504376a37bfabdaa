"""Reports: numbers compared with NumPy on the whole run, and the page parsed as a browser does."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import write_model as write_dense
from byte_models import write_sparse
from cli_runs import inside
from html_page import check_self_contained

import hotset
from hotset.report import plots
from hotset.report.activity import GRID, LAGS, Observer, curves_of
from hotset.report.bars import percent
from hotset.report.page import PageHeading, html_page, image
from hotset.report.plots import COLOURS, PUBLISHED, plots_of
from hotset.sparsity.profile import HOT_MASS, Profile

TEXT = "the quick brown fox jumps over the lazy dog; " * 12
N_LAYER, N_FF = 2, 96
REFERENCE = ("--device", "reference")


def profile_of(*counts: Any, n_tokens: int = 100) -> Profile:
    return Profile(tuple(np.array(count, np.uint64) for count in counts), n_tokens, "m", ("d",))


def observed(*layers: np.ndarray, splits: tuple[int, ...] = (), **how: Any) -> Observer:
    """Observe one sequence in steps that end at `splits`. layers: firing neurons, bool [n_tokens, n_ff]."""
    observer = Observer([fires.shape[1] for fires in layers], **how)
    observer.start()
    for start, end in zip((0, *splits), (*splits, len(layers[0])), strict=True):
        observer.add(
            {f"blk.{i}.ffn_act": fires[start:end].astype(np.float32) for i, fires in enumerate(layers)}
        )
    return observer


# ---- numbers ----


def test_the_curve_of_a_power_law():
    counts = np.array([8, 0, 4, 2, 2, 0, 0, 0])  # hottest first: 8 4 2 2, of 16
    (layer,) = curves_of(profile_of(counts))
    assert layer.cumulative[0] == 0
    assert layer.cumulative[-1] == 1
    for share, mass in ((1 / 8, 0.5), (2 / 8, 0.75), (3 / 8, 0.875), (4 / 8, 1.0)):
        assert np.interp(share, GRID, layer.cumulative) == pytest.approx(mass, abs=0.01)
    assert layer.cumulative[25] == pytest.approx(0.75)
    assert layer.frequency[0] == 0.08
    assert layer.frequency[-1] == 0
    assert (np.diff(layer.frequency) <= 0).all()
    assert layer.summary.hot_share == 3 / 8


def test_neurons_that_are_alike_give_the_diagonal_and_none_gives_no_curve():
    alike, never = curves_of(profile_of(np.full(40, 7), np.zeros(40)))
    assert np.allclose(alike.cumulative, GRID)
    assert np.isnan(never.cumulative).all()
    assert (never.frequency == 0).all()


@pytest.mark.parametrize("splits", [(), (1, 50), (130, 131)])
def test_overlap_equals_the_active_sets(splits: tuple[int, ...]):
    rng = np.random.default_rng(0)
    fires = rng.random((200, 60)) < rng.uniform(0.01, 0.9, 60)
    fires[1::2] = fires[::2]  # every second token repeats the one before
    run = observed(fires, splits=splits).result()
    layer = run.layers[0]
    for lag, overlap in zip(LAGS, layer.overlap, strict=True):
        both = [(fires[t] & fires[t - lag]).sum() for t in range(lag, 200)]
        assert overlap == pytest.approx(sum(both) / fires[lag:].sum())
    assert layer.overlap[0] > layer.overlap[1] + 0.05
    f = fires.mean(axis=0)
    assert layer.overlap_independent == pytest.approx((f * f).sum() / f.sum())
    assert layer.active == pytest.approx(np.percentile(fires.mean(axis=1), (10, 50, 90)))


def test_independent_tokens_overlap_as_the_line_says():
    rng = np.random.default_rng(0)
    run = observed(rng.random((4000, 50)) < rng.uniform(0.01, 0.9, 50)).result()
    assert run.layers[0].overlap == pytest.approx([run.layers[0].overlap_independent] * len(LAGS), abs=0.01)
    assert run.layers[0].coactivation == pytest.approx(run.coactivation_independent, rel=0.1)


def test_sequences_do_not_overlap_each_other():
    observer = Observer([4])
    for fires in ([1, 1, 0, 0], [0, 0, 1, 1]):
        observer.start()
        observer.add({"blk.0.ffn_act": np.array([fires, fires], np.float32)})
    run = observer.result()
    assert (run.n_sequences, run.n_tokens) == (2, 4)
    assert run.layers[0].overlap[0] == 1
    assert np.isnan(run.layers[0].overlap[1:]).all()


def test_correlation_is_phi_and_brings_groups_together():
    rng = np.random.default_rng(0)
    groups = rng.random((500, 2)) < 0.4
    fires = groups[:, [0, 1, 0, 1, 0, 1]] ^ (rng.random((500, 6)) < 0.05)
    fires = np.concatenate([fires, np.zeros((500, 1), bool), np.ones((500, 1), bool)], axis=1)
    layer = observed(fires, splits=(100,)).result().layers[0]
    assert sorted(layer.sampled) == list(range(6))  # neurons that never or always fire have no correlation
    expected = np.corrcoef(fires[:, layer.sampled].T)
    assert np.allclose(layer.correlation, expected)
    assert len(set(layer.sampled[:3] % 2)) == 1
    assert len(set(layer.sampled[3:] % 2)) == 1
    assert layer.coactivation == pytest.approx(np.abs(expected[np.triu_indices(6, 1)]).mean())


def test_sampled_neurons_vary():
    fires = np.zeros((40, 1000), bool)
    fires[:, :500] = True
    fires[::2, 500:600] = True
    layer = observed(fires, pilot=[fires.mean(axis=0)]).result().layers[0]
    assert len(layer.sampled) == 64
    assert ((layer.sampled >= 500) & (layer.sampled < 600)).all()
    silent = observed(np.zeros((5, 8), bool)).result().layers[0]
    assert silent.sampled.shape == (0,)
    assert np.isnan(silent.coactivation)


# ---- the page ----


def random_layers(n_layer: int, n_ff: int = 64, n_tokens: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.random((n_tokens, n_ff)) < rng.uniform(0, 0.5, n_ff) ** 2 for _ in range(n_layer)]


def test_the_page_needs_nothing_but_itself():
    n_layer = 80
    layers = random_layers(n_layer)
    run = observed(*layers).result()
    profile = profile_of(*(fires.sum(axis=0) for fires in layers), n_tokens=40)
    curves = curves_of(profile)
    plots = plots_of(curves, run)
    assert [plot.name for plot in plots] == ["power-law", "sparsity", "overlap", "coactivation"]
    facts = PageHeading("a <model> & more", ["a note"], [("9%", "of the neurons")])
    text = html_page(facts, plots)
    page = check_self_contained(text)
    assert "a &lt;model&gt; &amp; more: which neurons fire</title>" in text
    assert page.of("html") == [{"lang": "en"}]
    drawings = page.of("svg")
    assert len(drawings) == len(page.of("figure")) == len(page.of("figcaption")) == 4
    ids = {a["id"]: tag for tag, a in page.tags if "id" in a}
    for drawing in drawings:
        assert drawing["role"] == "img"
        title, description = drawing["aria-labelledby"].split()
        assert (ids[title], ids[description]) == ("title", "desc")
    for plot in plots:
        assert plot.alt in unescape(text)
    # Each plot has a table with a row for each layer and the columns that the plot names.
    assert len(page.tables) == 4
    for table, plot in zip(page.tables, plots, strict=True):
        assert len(table) == 1 + n_layer
        assert {len(row) for row in table} == {len(plot.table[0])}
        assert [row[0] for row in table[1:]] == [str(i) for i in range(n_layer)]
    active = [one.summary.active_share for one in curves]
    assert [row[1] for row in page.tables[1][1:]] == [percent(share) for share in active]
    # Light and dark: every colour of a figure becomes a variable, and both sets define every variable.
    assert "prefers-color-scheme: dark" in text
    style = text[text.index("<style>") : text.index("</style>")]
    body = text[text.index("<body>") :]
    for name, colour in COLOURS.items():
        assert colour not in body
        assert style.count(f"--{name}:") == 2
        assert f"var(--{name})" in text
    assert len(text) < 1_000_000


def test_legends_name_the_model_and_its_peers():
    counts = np.array([8, 0, 4, 2, 2, 0, 0, 0])
    curves = curves_of(profile_of(counts, counts))
    left, right = plots_of(curves, None)[0].draw().axes
    legend = left.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert f"this model {percent(3 / 8)}" in labels
    for name, share in PUBLISHED.items():
        assert f"{name} {percent(share)}" in labels
    marks = {line.get_label(): line.get_xydata().tolist() for line in left.get_lines()}
    assert marks[f"this model {percent(3 / 8)}"] == [[37.5, 100 * HOT_MASS]]
    assert {text.get_text() for text in right.texts} == set(PUBLISHED)


def test_profile_makes_a_report_even_with_idle_layers():
    curves = curves_of(profile_of(np.zeros(30), np.arange(30), np.zeros(30)))
    plots = plots_of(curves, None)
    text = html_page(PageHeading("m", [], []), plots)
    assert text == html_page(PageHeading("m", [], []), plots)  # the same numbers, the same bytes
    assert [plot.name for plot in plots] == ["power-law", "sparsity"]
    check_self_contained(text)
    silent = [np.zeros((3, 8), bool)]
    plots = plots_of(curves_of(profile_of(np.zeros(8))), observed(*silent).result())
    page = check_self_contained(html_page(PageHeading("m", [], []), plots))
    assert page.tables[2][1][1] == "-"


def test_images_have_the_format_of_their_names():
    layers = random_layers(3)
    profile = profile_of(*(fires.sum(axis=0) for fires in layers), n_tokens=40)
    plots = plots_of(curves_of(profile), observed(*layers).result())
    assert image(plots[0], "png").startswith(b"\x89PNG\r\n")
    for plot in plots:
        root = ElementTree.fromstring(image(plot, "svg"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        texts = "".join("".join(element.itertext()) for element in root.iter())
        assert "layer" in texts  # labels are text


def test_the_words_of_a_plot_have_its_numbers():
    always = np.zeros((20, 8), bool)
    always[:, :3] = True
    plot = plots_of(curves_of(profile_of(always.sum(axis=0), n_tokens=20)), observed(always).result())[2]
    assert (
        "in the median layer, 100% of a token's firing neurons also fired for the previous token" in plot.alt
    )
    assert "; 100% would if tokens were independent" in plot.alt
    by_turns = np.zeros((20, 8), bool)
    by_turns[::2, :4] = by_turns[1::2, 4:] = True
    plot = plots_of(curves_of(profile_of(by_turns.sum(axis=0), n_tokens=20)), observed(by_turns).result())[2]
    assert "in the median layer, 0% of" in plot.alt
    assert "; 50% would if" in plot.alt


def test_a_band_lies_where_the_layers_do():
    axis = plots.new_figure(2.0).subplots()
    x, values = np.array([1.0, 2.0, 4.0]), np.array([[10, 20, 30], [14, 28, 42], [12, 24, 36], [11, 22, 33]])
    plots.band(axis, x, np.concatenate([values, np.full((1, 3), np.nan)]))
    outer, middle = (set(map(tuple, area.get_paths()[0].vertices)) for area in axis.collections)
    assert outer == set(zip(x, values.min(axis=0), strict=True)) | set(
        zip(x, values.max(axis=0), strict=True)
    )
    assert middle == {
        (at, edge) for at, column in zip(x, values.T, strict=True) for edge in np.percentile(column, (25, 75))
    }
    (line,) = axis.get_lines()
    assert line.get_xydata().tolist() == list(map(list, zip(x, np.median(values, axis=0), strict=True)))


# ---- the command line ----


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_sparse(tmp_path / "plain.gguf", dialect="gguf")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def firing(path: Path, n_tokens: int, n_ctx: int) -> list[list[np.ndarray]]:
    """Return the firing neurons by layer and sequence, each bool [n_ctx, n_ff]."""
    with hotset.load(path, sparsity="exact", device="reference") as model:
        ids = model.tokenizer.encode(TEXT)[:n_tokens]
        names = [f"blk.{i}.ffn_act" for i in range(N_LAYER)]
        taps = [model.taps(ids[i : i + n_ctx], names) for i in range(0, n_tokens, n_ctx)]
    return [[part[name] != 0 for part in taps] for name in names]


def test_json_of_a_text_equals_numpy(plain: Path, text: Path):
    done = inside("report", plain, "-f", text, "-c", 64, "-n", 130, *REFERENCE, "--json")
    result = json.loads(done.stdout)
    assert (result["n_tokens"], result["counted"], result["files"]) == (128, str(text), [])
    assert (result["run"]["n_tokens"], result["run"]["n_sequences"]) == (128, 2)
    for i, sequences in enumerate(firing(plain, 128, 64)):
        fires = np.concatenate(sequences)
        layer, run = result["layers"][i], result["run"]["layers"][i]
        assert layer["active_share"] == pytest.approx(fires.mean())
        counts = np.sort(fires.sum(axis=0))[::-1]
        sums = np.concatenate([[0], np.cumsum(counts) / counts.sum()])
        expected = np.interp(result["grid"], np.linspace(0, 1, N_FF + 1), sums)
        assert layer["cumulative"] == pytest.approx(expected)
        assert run["active"] == pytest.approx(np.percentile(fires.mean(axis=1), (10, 50, 90)))
        for lag, overlap in zip(result["run"]["lags"], run["overlap"], strict=True):
            if lag >= 64:
                assert overlap is None
                continue
            both = sum((one[lag:] & one[:-lag]).sum() for one in sequences)
            assert overlap == pytest.approx(both / sum(one[lag:].sum() for one in sequences))
        expected = np.corrcoef(fires[:, run["sampled"]].T)
        assert np.allclose(run["correlation"], expected, atol=1e-4)
    assert result["active_share"] == pytest.approx(np.mean([x["active_share"] for x in result["layers"]]))


@pytest.mark.slow
def test_report_of_a_profile_and_a_text(
    plain: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    done = inside("report", plain, returns=2)
    assert "--profile: there is no file" in done.stderr.lower()
    assert "hotset sparse profile" in done.stderr
    inside("profile", plain, "-f", text, "-n", 400, *REFERENCE)
    done = inside("report", plain)
    assert "Wrote plain.report.html" in done.stderr
    assert "Without a text (-f)" in done.stderr
    page = check_self_contained(Path("plain.report.html").read_text("utf-8"))
    assert len(page.of("svg")) == 2
    both = ("report", plain, "-f", text, "-n", 128, *REFERENCE, "--images", "png", "--images", "svg")
    assert "there is no folder missing" in inside(*both, "-o", "missing/r.html", returns=2).stderr
    inside(*both, "-o", "r.html")
    page = check_self_contained(Path("r.html").read_text("utf-8"))
    assert len(page.of("svg")) == 4
    names = {"power-law", "sparsity", "overlap", "coactivation"}
    assert {path.name for path in tmp_path.glob("r*.*")} == {"r.html"} | {
        f"r-{name}.{kind}" for name in names for kind in ("png", "svg")
    }
    # The curve comes from the profile, the overlap from the text.
    result = json.loads(inside("report", plain, "-f", text, "-n", 128, *REFERENCE, "--json").stdout)
    assert result["n_tokens"] > result["run"]["n_tokens"] == 128
    assert result["counted"].endswith("plain.profile.hotset.gguf")
    counted = json.loads(inside("profile", plain, "--json").stdout)
    for layer, expected in zip(result["layers"], counted["layers"], strict=True):
        assert {key: layer[key] for key in expected} == expected


def test_undrawable_data_gives_one_message(plain: Path, text: Path, tmp_path: Path):
    dense = write_dense(tmp_path / "dense.gguf")
    other = write_sparse(tmp_path / "other.gguf", dialect="gguf", seed=4)
    inside("profile", other, "-f", text, "-n", 64, *REFERENCE)
    (tmp_path / "empty.txt").write_text(" \n")
    mistakes = [
        (("report", dense, "-f", text), 2, "no zeros: every neuron fires for every token"),
        (("report", plain, "--profile", tmp_path / "other.profile.hotset.gguf"), 2,
         "profile belongs to another"),
        (("report", plain, "--profile", tmp_path / "none.gguf", "-f", text), 2, "there is no file"),
        (("report", plain, "--profile", plain), 1, "is not an activation profile"),
        (("report", plain, "-f", tmp_path / "empty.txt"), 2, "is empty"),
        (("report", plain, "-f", text, "-o", "model.gguf"), 2, "must end with .html"),
        (("report", plain, "-f", text, "--images", "jpg"), 2, "must be one of png, svg, not 'jpg'"),
    ]  # fmt: skip
    for arguments, code, fragment in mistakes:
        done = inside(*arguments, returns=code)
        assert fragment.lower() in done.stderr.lower()
        assert done.stdout == ""
        assert len(done.stderr.strip().splitlines()) == 1


def test_without_matplotlib_the_numbers_remain(
    plain: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    arguments = ("report", plain, "-f", text, "-n", 64, *REFERENCE)
    done = inside(*arguments, returns=1)
    assert "need matplotlib" in done.stderr
    assert "pip install '.[plot]'" in done.stderr
    assert "as JSON" in done.stderr
    assert not list(tmp_path.glob("*.html"))
    result = json.loads(inside(*arguments, "--json").stdout)
    assert len(result["layers"]) == N_LAYER


def test_matplotlib_is_loaded_only_to_draw():
    code = (
        "import sys, hotset.cli.report, hotset.report.plots, hotset.report.page, hotset.cli.perplexity\n"
        "sys.exit(any(name in sys.modules for name in ('matplotlib', 'jinja2', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
