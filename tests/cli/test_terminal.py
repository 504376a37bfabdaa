"""Output on a terminal: text of files, servers and models cannot control it, and words are not split."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import quick_are, quick_if
from cli_runs import CHAT, COMMAND, PROMPT, PROSE, Terminal, columns_of, hotset, inside, needs_pty, talking
from rich.cells import cell_len

from hotset.cli.console import print_error, say, warn
from hotset.cli.terminal import AnswerWriter
from hotset.escaping import clause, escaped, escaped_json
from hotset.formats.gguf import GGUFWriter, copy_metadata, open_gguf

ATTACK = "a\x1b[31mb\x9b2Jc\x07\x7f\r\nd\u202ee\u2066f\u2028g\u200eh[red]i[/]:bomb:"
ESCAPED = r"a\x1b[31mb\x9b2Jc\x07\x7f\r\nd\u202ee\u2066f\u2028g\u200eh[red]i[/]:bomb:"
CONTROL = re.compile("(?!\n)[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")


# -- names and messages -------------------------------------------------------------------------


def test_invisible_characters_are_escaped() -> None:
    assert escaped(ATTACK) == ESCAPED
    assert escaped("naïve 日本語 \U0001f642 C:\\n") == "naïve 日本語 \U0001f642 C:\\n"
    assert escaped(b"\xff.gguf".decode("utf-8", "surrogateescape")) == r"\udcff.gguf"
    for code in range(sys.maxunicode + 1):
        text = escaped(chr(code))
        kind = unicodedata.category(chr(code))
        # Format characters of numbers, hieroglyphs, shorthand, musical notation, and joiners.
        of_scripts = (0x600, 0x6DD, 0x70F, 0x890, 0x8E2, 0x110BD, 0x13430, 0x1BCA0, 0x1D173, 0x200C)
        if kind in ("Cc", "Cs", "Zl", "Zp"):
            assert text.startswith("\\"), hex(code)
        elif kind == "Cf":
            assert text.startswith("\\") or any(0 <= code - first <= 16 for first in of_scripts), hex(code)
        elif code >> 12 != 0xE0 and code != 0x180E and not 0x2060 <= code <= 0x206F:
            assert text == chr(code), hex(code)


def test_a_long_text_is_shortened_in_the_middle() -> None:
    text = escaped("what " + "x" * 10**6 + "; do this", 300)
    assert len(text) < 340
    assert text.startswith("what xxx")
    assert text.endswith("xxx; do this")
    assert "[999901 characters]" in text
    text = escaped("what happens " + "and " * 10**6 + "so do this", 300)
    assert len(text) < 340
    assert text.startswith("what happens and")
    assert text.endswith("and so do this")
    assert escaped("x" * 300, 300) == "x" * 300


def test_a_servers_message_becomes_part_of_a_sentence() -> None:
    assert clause(OSError("not\x1b[2J\n  today...")) == r"not\x1b[2J today"
    assert clause("\n.") == ""
    assert "[806 characters]" in clause("because " + "of it " * 165 + "it is so")
    assert len(clause("because " * 10**5)) < 250


def test_json_has_the_same_values_without_control_characters() -> None:
    value = {"a": ATTACK, ATTACK: "\udcff\u00e9"}
    text = escaped_json(json.dumps(value, ensure_ascii=False))
    assert not CONTROL.search(text)
    assert json.loads(text) == value
    assert "é" in text


def rewritten(source: Path, target: Path, keys: dict[str, Any], tensor: str | None = None) -> Path:
    """Write a model with other keys (bytes: a value as stored in the file), and an optional tensor."""
    with open_gguf(source) as gguf:
        writer = GGUFWriter(target, "llama")
        for key, value in keys.items():
            if isinstance(value, bytes):
                writer._values[key] = value
            else:
                writer.add(key, value)
        copy_metadata(gguf, writer)
        for info in gguf.tensors.values():
            writer.add_tensor(info.name, gguf.data(info.name), info.type, info.shape)
        if tensor is not None:
            writer.add_tensor(tensor, np.zeros(32, np.float32), 0)  # type: ignore[arg-type]
        writer.write()
    return target


@pytest.fixture
def hostile(model: Path, tmp_path: Path) -> Path:
    """Return a model with an attack in its file name, keys, values and tensor names."""
    name = ATTACK.replace("/", "") + ".gguf"
    keys = {"general.name": ATTACK, "general.license": "l" * 9999, f"x.{ATTACK}": "\x1b]0;owned\x07" * 400}
    return rewritten(model, tmp_path / name, keys, ATTACK[:40])


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "MODEL", "--metadata", "--tensors"],
        ["show", "MODEL", "--json", "--tensors"],
        ["run", "MODEL", "hi", "--device", "reference"],  # refused because of the unknown tensor
        ["quantize", "MODEL", "--dry-run", "--type", "q8_0", "--allow-requantize"],
        ["rm", ATTACK],
        ["pull", ATTACK],
        ["show", "missing" + ATTACK],
        [ATTACK],
        ["show", f"--{ATTACK}"],
        [f"--{ATTACK}"],
        ["perplexity", "MODEL", "-f", "MODEL"],
        ["run", "MODEL", "hi", "--logit-bias", ATTACK],
        ["list"],
        ["list", "--json"],
    ],
    ids=lambda arguments: escaped("-".join(arguments), 40),
)
def test_text_of_files_and_names_is_printed_without_control_characters(
    hostile: Path, home: Path, arguments: list[str]
) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / hostile.name).write_bytes(hostile.read_bytes())
    words = [hostile if argument == "MODEL" else argument for argument in arguments]
    done = inside(*words, returns=None)
    assert not CONTROL.search(done.stdout)
    assert not CONTROL.search(done.stderr)
    assert "hotset itself failed" not in done.stderr
    assert len(done.stdout + done.stderr) < 40_000
    told = re.sub(r"[\s│]", "", done.stdout + done.stderr)
    assert "[31m" in told  # it is printed, but has no effect
    assert "\U0001f4a3" not in told


def test_a_table_prints_markup_as_text(hostile: Path) -> None:
    done = inside("show", hostile, "--metadata")
    assert ESCAPED in done.stdout
    assert "[9733 characters]" in done.stdout or "characters] ..." in done.stdout
    assert json.loads(inside("show", hostile, "--json").stdout)["name"] == ATTACK


@needs_pty
def test_a_files_text_does_not_control_a_real_terminal(hostile: Path, tmp_path: Path) -> None:
    """Let typer and rich color and draw; the file's own escape sequences are text."""
    for arguments in (["show", hostile, "--metadata", "--tensors"], ["run", hostile, "hi"], ["rm", ATTACK]):
        screen = Terminal(*arguments, env={"TERM": "xterm", "COLUMNS": "200"})
        screen.exit_code()
        assert "[31mb" not in screen.screen.replace("\\x1b[31mb", "")
        for raw in ("\x07", "\x9b", "\u202e", "\u2066", "\x1b]", "\x7f"):
            assert raw not in screen.screen


def test_messages_keep_the_case_of_quoted_names(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    done = inside("show", "empty.gguf", returns=1)
    assert done.stderr.startswith("error: empty.gguf")
    for option, name in (("--top-p", "--top-p"), ("--min-p", "--min-p"), ("--temp", "--temp")):
        done = inside("run", model, "hi", option, "-7", "--device", "reference", returns=2)
        assert done.stderr.startswith(f"error: {name} must")
        assert len(done.stderr.splitlines()) == 1


def array(type: int, payloads: list[bytes]) -> bytes:
    return struct.pack("<IQ", type, len(payloads)) + b"".join(payloads)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


TEXTS, NUMBERS = array(8, [text("a"), text("b")]), array(4, [struct.pack("<I", n) for n in range(20)])
NESTED = struct.pack("<I", 9) + array(9, [TEXTS, NUMBERS, array(9, [TEXTS, TEXTS])])
MANY = struct.pack("<I", 9) + array(9, [NUMBERS] * 20)


@pytest.mark.parametrize("value", [NESTED, MANY, 5, "text", [1.5, 2.5], ["a"] * 20, True, float("nan")])
@pytest.mark.parametrize(
    "key",
    ["x.y", "general.name", "general.license", "tokenizer.ggml.model", "tokenizer.ggml.pre",
     "tokenizer.ggml.tokens", "tokenizer.chat_template", "llama.rope.freq_base", "llama.rope.scaling.type"],
)  # fmt: skip
def test_show_accepts_any_value_for_any_key(model: Path, tmp_path: Path, key: str, value: Any) -> None:
    path = rewritten(model, tmp_path / "odd.gguf", {key: value})
    done = inside("show", path, "--metadata", "--json")
    facts = json.loads(done.stdout)
    if value is NESTED:
        assert facts["metadata"][key] == [["a", "b"], "[0, 1, 2, 3, ... 20 in all]", [["a", "b"]] * 2]
    if value is MANY:
        assert facts["metadata"][key].endswith("20 in all], ... 20 in all]")
    inside("show", path, "--metadata")


# -- answers -------------------------------------------------------------------------------------


class Screen(io.StringIO):
    """A terminal whose width can change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
        super().__init__()
        self.columns = columns
        monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((self.columns, 24)))

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


def on_screen(screen: Screen, text: str, *, step: int = 3) -> list[str]:
    """Return the lines of the screen after an answer that arrives in pieces."""
    with AnswerWriter(screen) as out:
        for i in range(0, len(text), step):
            out.write(text[i : i + step])
    return screen.getvalue().split("\n")


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize("columns", range(9, 60))
def test_words_are_not_split(monkeypatch: pytest.MonkeyPatch, columns: int, step: int) -> None:
    lines = on_screen(Screen(monkeypatch, columns), PROSE, step=step)
    assert all(len(line) <= columns for line in lines)
    assert " ".join(lines).split() == PROSE.split()
    for line, following in itertools.pairwise(lines):
        if line and following:  # a line ends because the next word does not fit
            assert len(line.rstrip()) + 1 + len(following.split()[0]) > columns


def test_wide_characters_count_twice_and_break_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "天気がとても良いので、散歩に行きましょう。そして abc を食べます。" * 3
    for columns in range(10, 40):
        lines = on_screen(Screen(monkeypatch, columns), text, step=1)
        assert all(columns - 4 < cell_len(line) <= columns for line in lines[:-1]), (columns, lines)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        assert all("abc" in line or not set("abc") & set(line) for line in lines)


def test_marks_and_joined_emoji_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    family, word = "\U0001f468\u200d\U0001f469\u200d\U0001f467", "e\u0301" * 5
    for columns in range(8, 30):
        lines = on_screen(Screen(monkeypatch, columns), f"{word} {family} {word} {family}", step=1)
        assert sum(line.count(family) for line in lines) == 2
        assert sum(line.count(word) for line in lines) == 2


def test_code_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "    x = 'a long line of code that goes over the edge of a terminal'\n"
    for block in (
        f"```python\n{code}\n  if x:\n{code}```\n", f"~~~ text\n{code}```\n~~~\n", f"````\n```\n{code}````\n",
        code, "\tx = 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10\n",
    ):  # fmt: skip
        for step in (1, 5, 500):
            screen = Screen(monkeypatch, 30)
            lines = on_screen(screen, f"Before it.\n\n{block}\n{PROSE}", step=step)
            assert block.expandtabs() in screen.getvalue()
            behind = screen.getvalue().partition(block.expandtabs())[2]
            assert max(map(len, behind.split("\n"))) <= 30  # text is wrapped again
            assert lines[0] == "Before it."
    lines = on_screen(Screen(monkeypatch, 30), "```inline``` " + PROSE)
    assert max(map(len, lines)) <= 30  # not a fence


def test_lists_keep_their_indentation(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = on_screen(Screen(monkeypatch, 30), f"- one\n    - {PROSE}")
    assert lines[:2] == ["- one", "    - The quick brown fox,"]
    assert max(map(len, lines)) <= 30


def test_a_word_longer_than_a_line_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that it is printed immediately and without a line break, so that it can be copied."""
    screen = Screen(monkeypatch, 20)
    out = AnswerWriter(screen)
    out.write("see ")
    for _ in range(95):
        out.write("x")
    assert len(screen.getvalue()) >= 80
    out.write(" one two three ")
    out.write("y" * 41 + " 天気天気天気天気天気天気")
    out.finish()
    # 95 columns are 4 lines and 15 columns, and 41 are 2 lines and 1 column.
    assert screen.getvalue() == f"see\n{'x' * 95} one\ntwo three\n{'y' * 41} 天気天気天気天気天\n気天気"


def test_if_the_width_is_unknown_words_are_printed_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch, 0)
    out = AnswerWriter(screen)
    for character in PROSE:
        out.write(character)
        assert PROSE.startswith(screen.getvalue())
    out.write("x" * 50)
    assert len(screen.getvalue()) >= len(PROSE) + 49
    out.finish()
    assert screen.getvalue() == PROSE + "x" * 50


def test_messages_on_a_terminal_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch, 30)
    monkeypatch.setattr(sys, "stderr", screen)
    say(f"Run it with: hotset run {'m' * 40} and wait", dim=True)
    print_error("12345678901234 67890 2345678901 34567890")
    warn("12345678901234 67890 2345678901 34567890")
    assert re.sub("\x1b\\[[0-9;]*m", "", screen.getvalue()) == (
        f"Run it with: hotset run\n{'m' * 40} and wait\n"
        "error: 12345678901234 67890\n2345678901 34567890.\n"
        "warning: 12345678901234 67890\n2345678901 34567890\n"
    )
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stderr", piped)
    say("word " * 20)
    assert piped.getvalue() == "word " * 20 + "\n"


def test_the_width_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch, 40)
    out = AnswerWriter(screen)
    out.write(PROSE[:50])
    screen.columns = 20
    before = len(screen.getvalue().split("\n"))
    out.write(PROSE[50:])
    out.finish()
    lines = screen.getvalue().split("\n")
    assert max(map(len, lines[:before])) > 20
    assert max(map(len, lines[before:])) <= 20
    assert " ".join(lines).split() == PROSE.split()


def test_a_models_text_does_not_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch, 200)
    on_screen(screen, ATTACK + "\tb\n\u200f\u200dc\r\n", step=1)
    written = screen.getvalue()
    assert r"a\x1b[31mb\x9b2Jc\x07\x7f" in written
    assert r"\u202ee\u2066f\u2028g" in written
    assert not re.search("(?!\n)[\x00-\x1f\x7f-\x9f\u2028\u202e\u2066]", written)
    assert "\u200f\u200dc\n" in written  # marks that scripts need are kept
    raw = io.StringIO()
    with AnswerWriter(raw) as out:
        out.write(ATTACK)
    assert raw.getvalue() == ATTACK  # a pipe or a file gets the text unchanged


@needs_pty
def test_a_chat_wraps_at_the_width_of_a_real_terminal(model: Path, tmp_path: Path) -> None:
    answer = "one\x1b[2Jtwo " + PROSE.replace("\n", " ") + " " + PROSE.replace("\n", " ")
    chat = Terminal(
        "run", model, *CHAT, "-n", len(answer) // 3 + 1, "--ignore-eos", env=talking(tmp_path, answer)
    )
    for columns in (40, 23):
        chat.wait_for(PROMPT)
        columns_of(chat, columns)
        chat.type("hi\n")
        told = chat.wait_for(r"(?s)hi\r\n(.*)\r\n\S*\[prompt")[1]
        lines = told.split("\r\n")
        assert max(map(len, lines)) <= columns
        assert " ".join(lines).split() == answer.replace("\x1b", "\\x1b").split()
    chat.leave()


@needs_pty
def test_an_interrupted_answer_prints_its_last_partial_word(model: Path, tmp_path: Path) -> None:
    env = talking(tmp_path, "Hello " + "x" * 5000)
    chat = Terminal("run", model, *CHAT, "--ignore-eos", "-c", 9999, env=env)  # which takes seconds to fill
    chat.wait_for(PROMPT)
    columns_of(chat, 70)
    chat.type("hi\n")
    chat.reply("Hello", "\x03")
    chat.wait_for(r"interrupted\]")
    chat.leave()


def test_a_pipe_gets_the_bytes_of_the_answer(model: Path, tmp_path: Path) -> None:
    answer = ATTACK + "word " * 60
    arguments = ["run", model, "hi", "--device", "reference", "--ignore-eos", "-n", len(answer) // 3 + 1]
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL, capture_output=True, env=os.environ | talking(tmp_path, answer), check=True,
    )  # fmt: skip
    assert done.stdout == answer.encode() + b"\n"
    assert not CONTROL.search(done.stderr.decode())


# -- closed and full streams, and impossible names ------------------------------------------------

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


def shell(
    line: str, *arguments: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `hotset` with arguments and redirections in a shell."""
    return subprocess.run(
        ["sh", "-c", f'"$@" {line}', "sh", *COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | (env or {}),
    )  # fmt: skip


ANSWER = ("--device", "reference", "-n", "5", "--ignore-eos", "--temp", "0")
WRITERS: list[list[str]] = [
    ["run", "MODEL", "hi", *ANSWER], ["run", "MODEL", "hi", *ANSWER, "--json"], ["show", "MODEL"], ["list"],
    ["show", "MODEL", "--json"], ["doctor"], ["--help"], ["run", "--help"], ["--version"],
    ["bench", "-m", "MODEL", "-p", "4", "-n", "2", "-r", "1"],
]  # fmt: skip


@needs_full
@pytest.mark.parametrize(
    ("redirection", "arguments", "unbuffered"),
    quick_if(
        lambda _, arguments, unbuffered: (
            (arguments == ["list"] and not unbuffered) or (arguments[-1] == "--json" and unbuffered != "")
        ),
        [">/dev/full", ">&-"], WRITERS, ["", "1"],
    ),
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else value,
)  # fmt: skip
def test_an_output_that_cannot_be_written_gives_one_message(
    model: Path, home: Path, redirection: str, arguments: list[str], unbuffered: str
) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "m.gguf").symlink_to(model)
    given = [str(model) if argument == "MODEL" else argument for argument in arguments]
    done = shell(redirection, *given, env={"PYTHONUNBUFFERED": unbuffered})
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    reason = "No space left" if redirection == ">/dev/full" else "Bad file desc"
    assert done.returncode == 1, done.stderr
    assert len(errors) == 1
    assert re.match(
        f"error: the standard output cannot be written .{reason}.*; give it another place", errors[0]
    )
    assert not re.search("Traceback|Exception|itself failed", done.stderr)


@pytest.mark.parametrize(
    "arguments", quick_are(WRITERS[::4], WRITERS), ids=lambda arguments: "-".join(arguments[:2])
)
def test_a_reader_that_stops_is_not_an_error(model: Path, home: Path, arguments: list[str]) -> None:
    given = [str(model) if argument == "MODEL" else argument for argument in arguments]
    done = subprocess.Popen([*COMMAND, *given], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=-1)
    assert done.stdout
    assert done.stderr
    done.stdout.close()
    told = done.stderr.read().decode()
    assert done.wait(60) == 0, told
    assert not re.search("error|Traceback|Exception", told)


@needs_full
@pytest.mark.parametrize(
    "redirection", quick_are(("2>&-",), ["2>/dev/full", "2>&-", "2>/dev/full </dev/null"])
)
def test_messages_that_cannot_be_written_do_not_stop_the_command(model: Path, redirection: str) -> None:
    done = shell(redirection, "run", model, "hi", *ANSWER)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == hotset("run", model, "hi", *ANSWER).stdout
    assert shell(redirection, "show", "missing.gguf").returncode == 2


def test_a_closed_input_has_no_prompt(model: Path, home: Path) -> None:
    for redirection in ("<&-", "</dev/null"):
        done = shell(redirection, "run", model, "--device", "reference")
        assert done.returncode == 2
        assert "there is no prompt" in done.stderr
        assert shell(redirection, "run", model, "hi", *ANSWER).returncode == 0
    done = shell("<&- >&- 2>&-", "run", model, "hi", *ANSWER)
    assert done.returncode == 1
    done = shell(f'<"{model.parent}"', "run", model, "--device", "reference")
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr


def test_pythons_original_streams_are_the_current_ones() -> None:
    """Check this because the new streams own the old ones' memory: flushing the old ones would fail."""
    program = (
        "import sys; from hotset.cli.main import _streams; _streams(); print('a');"
        "print('b', file=sys.__stdout__); print('c', file=sys.__stderr__);"
        "assert (sys.__stdout__, sys.__stderr__) == (sys.stdout, sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\nb\n", "c\n")


LONG = "n" * 5000


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["show", LONG], "there is no model"),
        (["show", f"{LONG}.gguf"], "there is no file"),
        (["show", f"/{LONG}/x"], "there is no file"),
        (["run", LONG, "hi"], "there is no model"),
        (["rm", LONG], "no model|too long"),
        (["show", "~nouser/model.gguf"], "there is no file ~nouser/model.gguf"),
        (["quantize", "MODEL", LONG, "--type", "f16"], "File name too long"),
        (["quantize", "MODEL", f"{LONG}/x.gguf", "--type", "f16"], "File name too long"),
        (["profile", "MODEL", "-o", LONG], "too long"),
        (["train-predictor", "MODEL", "-f", "MODEL", "-o", LONG], "not UTF-8|too long"),
        (["convert", LONG, "out.gguf"], "too long|no folder|nnn"),
        (["sparsify", "MODEL", LONG], "text to train on|too long"),
        (["run", "MODEL", "hi", "--profile", LONG], "no file|too long"),
        (["report", "MODEL", "-o", f"{LONG}.html"], "too long|activation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(a[:8] for a in value),
)
def test_an_impossible_name_gives_one_message(
    model: Path, home: Path, tmp_path: Path, monkeypatch: Any, arguments: list[str], fragment: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = inside(*[model if argument == "MODEL" else argument for argument in arguments], returns=None)
    assert done.returncode in (1, 2)
    assert "itself failed" not in done.stderr
    assert re.search(fragment, " ".join(done.stderr.replace("│", " ").split()), re.IGNORECASE)


def test_impossible_home_folders_give_one_message(home: Path, monkeypatch: Any) -> None:
    inside("list", "--json")
    monkeypatch.setenv("HOTSET_HOME", "~nouser/hotset")
    assert "~nouser/hotset begins with a user who has no home" in inside("list", returns=2).stderr
    monkeypatch.setenv("HOTSET_HOME", "")
    monkeypatch.setattr(Path, "home", lambda: Path("~nouser").expanduser())
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert "set HOTSET_HOME to a folder for models" in inside("list", returns=1).stderr


def test_a_long_prompt_is_not_taken_for_a_path(model: Path, home: Path, monkeypatch: Any) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "smollm2-135m.gguf").symlink_to(model)
    inside("run", "a b " * 100, "-n", 2, "-s", 1, "--device", "reference")


@needs_pty
def test_the_chat_saves_or_reports_why_not(model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    data = model.read_bytes()
    chat = Terminal("run", model, *CHAT, "-n", 2, "--ignore-eos")
    for typed, told in [
        (f"/save {tmp_path}/pipe", "error: .*pipe is a pipe"),
        (f"/save {model}", "is one of the files that are read"),
        ("/save ~nouser/x", "begins with a user who has no home"),
        ("/save /dev/null", "/dev/null is a device"),
        (f"/save {tmp_path}/missing/x", "cannot be written"),
        ("/save " + "n" * 300, "too long"),
        (f"/save {tmp_path}/chat.json", "Saved 0 messages"),
    ]:
        chat.reply(PROMPT, typed + "\n")
        chat.wait_for(told)
    chat.leave("/exit\n")
    assert model.read_bytes() == data
