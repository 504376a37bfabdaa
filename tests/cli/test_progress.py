"""Long operations report from the beginning how much is done and how long the rest takes."""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from cli_runs import hotset, inside, needs_core, reach, split_command
from fake_hub import FakeHub
from scratch import QUICK_SPARSIFYING, QUICK_TRAINING, write_scratch

from hotset.cli import progress
from hotset.cli.progress import ProgressBar


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "clock", clock)
    return clock


def told(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    steps: list[tuple[float, int]],
    *,
    total: int = 100,
    terminal: bool = False,
    unit: str = "tokens",
) -> str:
    """Return the output of steps; each step is a time and the amount that is done then."""
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressBar() as bar:
        for clock.now, done in steps:
            bar.advance("work", done, total, unit)
    return stream.getvalue()


def test_lines_report_progress_at_tenths_and_at_times(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    steps = [
        (0.0, 0),
        (0.5, 1),
        (2.0, 2),
        (3.0, 3),
        (3.1, 10),
        (9.0, 11),
        (39.0, 12),
        (39.5, 99),
        (40.0, 100),
    ]
    assert told(monkeypatch, clock, steps).splitlines() == [
        "work: 0 of 100 tokens",
        "work: 2 of 100 tokens, 1:38 left",  # as soon as the rate is known, except in the first second
        "work: 10 of 100 tokens, 0:28 left",
        "work: 12 of 100 tokens, 4:46 left",
        "work: 100 of 100 tokens in 0:40",
    ]


def test_work_of_an_earlier_run_does_not_count_for_the_rate(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    lines = told(monkeypatch, clock, [(0.0, 50), (10.0, 60), (20.0, 100)]).splitlines()
    assert lines[1] == "work: 60 of 100 tokens, 0:40 left"


def test_a_label_may_start_again(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    lines = told(
        monkeypatch, clock, [(0.0, 0), (10.0, 100), (100.0, 0), (110.0, 50), (120.0, 100)]
    ).splitlines()
    assert lines[2:4] == ["work: 0 of 100 tokens", "work: 50 of 100 tokens, 0:10 left"]


def test_bytes_have_units_and_hours_are_printed(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    lines = told(monkeypatch, clock, [(0.0, 0), (10.0, 10**6)], total=2 * 10**9, unit="bytes").splitlines()
    assert lines[1] == "work: 976.6 KiB of 1.9 GiB, 5:33:10 left"
    assert told(monkeypatch, clock, [(0.0, 0), (40.0, 0)], total=0) == "work: ...\nwork: ...\n"


def test_a_terminal_has_a_bar_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    screen = told(monkeypatch, clock, [(0.0, 0), (10.0, 25)], terminal=True)
    assert "\x1b[" in screen
    assert "25 of 100 tokens, 0:30 left" in screen


def test_a_terminal_without_cursor_control_gets_lines(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Stream(True))
    for name in ("dumb", "unknown"):
        monkeypatch.setenv("TERM", name)
        with ProgressBar() as bar:
            bar.advance("work", 0, 4, "layers")
    assert re.sub(r"\x1b\[\d*m", "", stream.getvalue()) == "work: 0 of 4 layers\n" * 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scratch(tmp_path_factory.mktemp("scratch"))


# The subcommand, and the labels for which a remaining time must be printed.
LONG: list[tuple[str, list[str]]] = [
    ("calibrate model.gguf -f text.txt -c 32 --tokens 64 --measured 128 --sparsity 0.3 -o t.json",
     ["thresholds on offer", "losses", "kind 1 of 4", "measuring"]),
    (f"train-predictor relu.gguf -f text.txt {QUICK_TRAINING} --dir predictors",
     ["pairs (train)", "training 2 layers", "perplexity"]),
    (f"sparsify smollm2-135m out.gguf --text short.txt {QUICK_SPARSIFYING}",
     ["generating text", "choosing layers", "calibrating layers", "training", "out.gguf"]),
    ("profile relu.gguf -f text.txt -c 32 -n 256 -o p.hotset.gguf", ["profile"]),
    ("trace relu.gguf -f text.txt -c 32 -n 256 -o t.hotset.gguf", ["trace"]),
    ("report relu.gguf -f text.txt -c 32 -n 256 --json", ["report"]),
    ("convert checkpoint new.gguf", ["new.gguf"]),
    ("quantize model.gguf small.gguf --type q8_0", ["small.gguf"]),
    ("reorder relu.gguf bundled.gguf --bundle", ["bundled.gguf"]),
    ("imatrix model.gguf -f text.txt -c 32 -o i.gguf", ["imatrix"]),
    (f"embed model.gguf {'text ' * 65}-o vectors.npy", ["texts"]),
    ("perplexity model.gguf -f text.txt -c 64 --chunks 2", ["perplexity"]),
    ("eval model.gguf hellaswag.jsonl", ["hellaswag"]),
    ("bench model.gguf -p 4 -n 2 -r 2", ["pp4", "tg2"]),
    ("run relu.gguf Why? --predictor svd --temp 0 -n 2", ["generating text", "predictor svd:32:q4_0"]),
    ("batch requests.jsonl -o answers.jsonl -m smollm2-135m", ["requests"]),
]  # fmt: skip


@needs_core
@pytest.mark.parametrize(("command", "labels"), LONG, ids=[command.split()[0] for command, _ in LONG])
def test_long_subcommands_report_the_remaining_time(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, labels: list[str]
) -> None:
    if command.split()[0] in ("calibrate", "train-predictor", "sparsify"):
        pytest.importorskip("torch")
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "short.txt").write_text("the thing in the thin thing is this; " * 12)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(progress, "clock", itertools.count(0, 10).__next__)
    done = inside(*command.split())
    check(done.stderr, labels)


def check(lines: str, labels: list[str]) -> None:
    for label in labels:
        name = re.escape(label)
        begins = re.search(rf"^{name}: (0 of \S.*|0 B of \S.*)$", lines, re.MULTILINE)
        assert begins, f"{label}: {lines}"
        left = re.search(rf"^{name}: .* of .*, [\d:]+ left\b", lines, re.MULTILINE)
        assert left, f"{label}: {lines}"
        assert begins.start() < left.start()


def test_a_pull_reports_the_remaining_time(tmp_path: Path) -> None:
    """Use a new process, because the hub's address is read when its library is imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools\n"
        "from hotset.cli import progress\n"
        "from hotset.storage import download, hub\n"
        "progress.clock = itertools.count(0, 10).__next__\n"
        "download._CHUNK, hub._SMALL = 1000, 0\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with FakeHub() as hub:
        hub.repositories["owner/repo"] = {"tiny.Q8_0.gguf": b"GGUF" * 10_000}
        env = {"HOTSET_HOME": str(tmp_path), "PYTHONPATH": path} | reach(hub.url)
        done = hotset("pull", "hf:owner/repo", env=env, returns=None)
    assert done.returncode == 0, done.stderr
    check(done.stderr, ["tiny.Q8_0.gguf"])


def test_every_long_subcommand_is_tested() -> None:
    from hotset.cli.main import SUBCOMMANDS

    quick = {"serve", "mcp", "ps", "stop", "list", "show", "rm", "cp", "plan", "doctor", "create", "launch"}
    quick |= {"rerank"}  # like embed, but it needs a reranker
    tested = {split_command(command.split())[0] for command, _ in LONG}
    assert tested | {"pull"} == SUBCOMMANDS.keys() - quick
