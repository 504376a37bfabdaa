"""The README's tables: that they equal the committed results, and the arithmetic of bench/headline.py."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import headline
import headline_report as report
import numpy as np
import peers
import pytest
from paths import ROOT
from peers import Comparison, Job, ProgramFailed

from hotset.formats.gguf import GGUFWriter
from hotset.formats.quants import GGMLType

# Shortened outputs of the programs.
LLAMA_BENCH = """load_backend: loaded CPU backend
[
  {
    "build_commit": "0c1e570", "n_prompt": 256, "n_gen": 0, "n_depth": 0, "samples_ts": [ 410.1, 412.7 ]
  },
  {
    "build_commit": "0c1e570", "n_prompt": 0, "n_gen": 64, "n_depth": 0, "samples_ts": [ 50.5 ]
  }
]
"""
IK_LLAMA_BENCH = """[
  {
    "build_commit": "8337e4cd", "n_prompt": 4096, "n_gen": 32, "samples_ts": [ 31.5 ], "test": "tg32@pp4096"
  }
]
"""


@dataclass(frozen=True)
class Scripted:
    """A program that decodes at these speeds, one per call, and fails when there are no more."""

    name: str
    speeds: list[float]
    entry: dict[str, Any] = field(default_factory=dict)

    def bench(self, job: Job) -> dict[str, dict[str, Any]]:
        if not self.speeds:
            raise ProgramFailed(f"{self.name} does not know this model")
        return {"tg": {"samples_ts": [self.speeds.pop(0)]} | self.entry}


def row(group: str, found: Comparison, *, model: str = "M", synthetic: bool = False, **more: Any) -> Any:
    facts = {"group": group, "model": model, "test": group, "synthetic": synthetic, "found": asdict(found)}
    return facts | {"task": f"{group} {model}", "peers": ["llama.cpp", "ik_llama.cpp"]} | more


def results(*rows: Any) -> dict[str, Any]:
    return {
        "date": "2026-11-30T10:00:00Z",
        "commit": "abc1234",
        "machine": {"processor": "A processor", "cores": 2, "memory": 16e9},
        "threads": 2,
        "runs": 2,
        "versions": {"hotset": "0.1", "llama.cpp": "0c1e570"},
        "rows": list(rows),
    }


DENSE = Comparison({"hotset": [20.0, 30.0], "llama.cpp": [10.0, 12.0]}, [6e9, 6e9], {"hotset": 1e8})
SPARSE = Comparison(
    {"hotset dense": [10.0], "hotset exact": [15.0], "PowerInfer": [5.0]},
    [1e9],
    {"hotset dense": 8e7, "hotset exact": 2e7},
    failed={"llama.cpp": "crashed"},
)
PLANTED = row("7b", SPARSE, synthetic=True, peers=list(report.PEERS))


# -- the committed results -----------------------------------------------------------------------


def committed() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((ROOT / report.JSON).read_text("utf-8"))
    return data


def test_documents_show_the_committed_results() -> None:
    for path, text in report.documents(committed(), ROOT).items():
        assert (ROOT / path).read_text("utf-8") == text, (
            f"{path}: run bench/headline.py --rows none --write-docs"
        )


def test_committed_results_name_machine_commit_date_and_versions() -> None:
    data = committed()
    assert data["machine"].keys() >= {"processor", "cores", "memory", "system"}
    assert data["commit"] not in ("", "unknown")
    assert data["date"][:2] == "20"
    assert data["versions"]["hotset"]
    for each in data["rows"]:
        speeds = each["found"]["speeds"]
        assert {len(values) for values in speeds.values()} == {data["runs"]}
        assert set(speeds) - set(report.modes(each)) <= data["versions"].keys()


# -- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0], (3, 3)), ([1, 2, 3], (1, 3)), ([5, 1, 2, 4, 3], (1, 5)), (list(range(8)), (1, 6))],
)
def test_interval_contains_the_median_with_the_confidence(values: list[float], expected: Any) -> None:
    assert peers.interval(values) == expected


def test_interval_covers_nine_of_ten_medians() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        low, high = peers.interval(rng.exponential(size=9).tolist())
        hits += low <= np.log(2) <= high
    assert 0.9 <= hits / 2000 < 0.98


def test_ratios_are_of_rounds_and_shares_of_the_read_rate() -> None:
    assert DENSE.ratios("llama.cpp") == [2, 2.5]
    assert DENSE.share() == pytest.approx(25 * 1e8 / 6e9)
    assert DENSE.share("llama.cpp") == pytest.approx(11 * 1e8 / 6e9)
    assert SPARSE.share("hotset exact") == pytest.approx(0.3)
    assert Comparison({"hotset": [1.0]}).share() is None


def test_programs_run_in_turn_and_a_failed_peer_only_once(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(bytes(1 << 16))
    ours = Scripted("hotset", [4.0, 6.0], {"bytes_per_token": 100})
    good, bad = Scripted("good", [2.0, 2.0], {"build_commit": "abc"}), Scripted("bad", [])
    turns = [(program, file) for program in (ours, good, bad)]
    found = peers.compare(turns, Job(file, n_gen=1), 2, again=False)
    assert found.speeds == {"hotset": [4, 6], "good": [2, 2]}
    assert found.n_bytes == {"hotset": 100}  # of decode; prefill has no such limit
    assert found.builds["good"] == "abc"
    assert found.failed == {"bad": "bad does not know this model"}
    with pytest.raises(ProgramFailed, match="hotset does not know"):
        peers.compare(turns, Job(file, n_gen=1), 1, again=False)


# -- outputs of the programs ---------------------------------------------------------------------


def test_outputs_of_llama_bench_are_read() -> None:
    found = peers.llama_bench_entries(LLAMA_BENCH)
    assert {kind: entry["samples_ts"] for kind, entry in found.items()} == {
        "pp": [410.1, 412.7],
        "tg": [50.5],
    }
    assert peers.llama_bench_entries(IK_LLAMA_BENCH)["tg"]["samples_ts"] == [31.5]


@pytest.mark.parametrize(
    ("has_depth", "words"), [(True, "-p 0 -n 32 -d 4096"), (False, "-p 0 -n 0 -gp 4096,32")]
)
def test_depth_is_an_option_or_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_depth: bool, words: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "llama-bench").touch()
    called: list[str] = []

    def run(argv: list[str], env: Any) -> tuple[str, str]:
        called.append(" ".join(argv))
        return IK_LLAMA_BENCH, ""

    monkeypatch.setattr(peers, "run", run)
    program = peers.llama_bench(tmp_path, has_depth=has_depth)
    program.bench(Job(Path("m.gguf"), n_gen=32, n_depth=4096))
    assert f"-m m.gguf {words} -t 2" in called[0]
    with pytest.raises(ProgramFailed, match="have no llama-server"):
        peers.find_program(tmp_path, "llama-server")


# -- models and results --------------------------------------------------------------------------


def test_models_are_found_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headline, "on_this_machine", list)
    for name, layers in (("a.gguf", 28), ("b.gguf", 5)):
        writer = GGUFWriter(tmp_path / name, "qwen2")
        writer.add("qwen2.block_count", layers)
        writer.add("qwen2.embedding_length", 1536)
        writer.add("general.basename", "Qwen2.5-Coder")
        writer.add("general.size_label", "1.5B")
        writer.add("general.file_type", 15)
        writer.add_tensor("t", np.ones(32, np.float32), GGMLType.F32)
        writer.write()
    found = headline.subjects(tmp_path, [])
    assert found == [headline.Subject("Qwen2.5-Coder 1.5B Q4_K", tmp_path / "a.gguf")]
    assert len(headline.subjects(tmp_path, [tmp_path / "b.gguf"])) == 1


def test_an_interrupted_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "machine", lambda: {"hotset": "abc1234", "load": 0, "processor": "P"})
    args = argparse.Namespace(out=tmp_path, resume=False, threads=2, runs=2, rows=["decode"])
    run: list[str] = []

    def task(test: str, result: Callable[[], Comparison]) -> headline.Task:
        def measure() -> dict[str, Comparison]:
            run.append(test)
            return {"": result()}

        return headline.Task("decode", "M", test, measure)

    def interrupt() -> Comparison:
        raise KeyboardInterrupt

    def measure(second: Callable[[], Comparison]) -> None:
        tasks = [task("one", lambda: DENSE), task("two", second)]
        plan: Any = SimpleNamespace(args=args, subjects=[], tasks=lambda: iter(tasks))
        headline.measure(plan, headline.begin(args))

    with pytest.raises(KeyboardInterrupt):
        measure(interrupt)
    with pytest.raises(SystemExit, match="--resume"):
        headline.begin(args)
    args.resume = True
    measure(lambda: DENSE)
    assert run == ["one", "two", "two"]
    rows = json.loads((tmp_path / "headline.json").read_text())["rows"]
    assert [each["test"] for each in rows] == ["one", "two"]
    assert report.comparison(rows[0]) == DENSE
    args.runs = 3
    with pytest.raises(SystemExit, match="runs 2, not 3"):
        headline.begin(args)


# -- tables and chart ----------------------------------------------------------------------------


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_tables_show_ratios_intervals_and_missing_programs() -> None:
    failed = Comparison({"hotset": [100.0]}, failed={"llama.cpp": "crashed"})
    other = row("server", failed, model="N", synthetic=True)
    texts = report.blocks(results(row("decode", DENSE), other, PLANTED, row("sparse", SPARSE)))
    assert cells(texts["models"])[2] == [
        "M", "decode", "25.0 (20.0 to 30.0)", "2.25× (2.00 to 2.50)", "not measured", "42%, 18%",
    ]  # fmt: skip
    assert cells(texts["synthetic"])[2] == ["N, synthetic", "server", "100", "failed", "not measured"]
    assert cells(texts["planted"])[2:] == [
        ["M, synthetic", "dense", "10.0", "", "failed", "not measured", "2.00×", "80%"],
        ["", "exact", "15.0", "1.50×", "failed", "not measured", "3.00×", "30%"],
    ]
    assert cells(texts["summary"])[0] == ["model", "decode", "server"]
    assert cells(texts["summary"])[2:] == [["M", "2.25×, –", ""], ["N, synthetic", "", "failed, –"]]
    assert len(cells(texts["sparse-summary"])) == 6
    assert texts["server"] == report.NOT_YET
    assert "hotset at abc1234, 2026-11-30; llama.cpp 0c1e570" in texts["facts"]


def test_chart_draws_a_bar_per_ratio_and_marks_synthetic_rows() -> None:
    chart = ElementTree.fromstring(report.chart(results(PLANTED, row("decode", DENSE))))
    name = "{http://www.w3.org/2000/svg}"
    bars = [each for each in chart.iter(f"{name}rect") if each.find(f"{name}title") is not None]
    widths = [float(each.attrib["width"]) for each in bars]
    assert widths[1] / widths[0] == pytest.approx(2.0 / 2.25, rel=0.01)
    assert len(widths) == 3
    texts = ["".join(each.itertext()) for each in chart.iter(f"{name}text")]
    assert "M: decode" in texts
    assert "M, synthetic: 7b exact" in texts
    assert ElementTree.fromstring(report.chart(results())) is not None


def test_a_document_without_its_block_is_an_error() -> None:
    with pytest.raises(SystemExit, match="one block '<!-- headline facts -->', not 0"):
        report.filled("# A page", {"facts": "x"}, ["facts"])


def test_rows_must_be_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["headline.py", "--rows", "decode,dance"])
    with pytest.raises(SystemExit):
        headline.main()
    assert "not dance" in capsys.readouterr().err
