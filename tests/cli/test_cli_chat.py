"""The chat at a terminal: pasted blocks, the history, commands, and a full context."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from cli_runs import ANSWERED, CHAT, PROSE, Terminal, columns_of, needs_pty, talking

import hotset
from hotset.cli import editor
from hotset.cli.chat import Chat

PROMPT = r"(^|\n)> ?$"


class DrawingTerminal(Terminal):
    """A terminal on which the chat can draw. `screen` is its text without escape sequences."""

    prompt = PROMPT

    def __init__(self, *arguments: object, env: dict[str, str] | None = None) -> None:
        super().__init__(*arguments, env={"TERM": "xterm", **(env or {})})

    def shown(self, output: str) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x08", "", output)

    def ask(self, keys: str) -> None:
        """Type keys, and wait for the answer."""
        self.reply(PROMPT, keys)
        self.wait_for(ANSWERED)

    def asked(self, folder: Path) -> list[str]:
        """Return the messages that were sent to the model, by /save."""
        self.reply(PROMPT, f"/save {folder / 'chat.json'}\r")
        self.wait_for("Saved")
        saved = json.loads((folder / "chat.json").read_text())
        return [message["content"] for message in saved if message["role"] == "user"]


def pasted(text: str) -> str:
    """Return the characters that a terminal sends for pasted text in bracketed paste mode."""
    return f"\x1b[200~{text}\x1b[201~"


@pytest.fixture
def chat(model: Path, home: Path) -> DrawingTerminal:
    return DrawingTerminal("run", model, *CHAT, "-n", 2, "--ignore-eos")


# -- the editor ----------------------------------------------------------------------------------


@needs_pty
def test_a_pasted_block_is_one_message(chat: DrawingTerminal, tmp_path: Path) -> None:
    blocks = ["one\n  two\\\n\nthree", "/usr/bin\n/usr/lib", "// no command\nint x;", '"""Text."""\nx = 1']
    for text in blocks:
        chat.ask(pasted(text.replace("\n", "\r")) + "\r")  # terminals send this for line breaks
    chat.ask("it says " + pasted("a\nb") + " and ends\r")
    assert chat.asked(tmp_path) == [*blocks, "it says a\nb and ends"]
    chat.leave()


@needs_pty
def test_a_block_pasted_during_an_answer_is_one_message(model: Path, home: Path, tmp_path: Path) -> None:
    chat = DrawingTerminal("run", model, *CHAT, "--ignore-eos", "-n", 200)
    chat.reply(PROMPT, "hi\r")
    chat.reply(r"hi\r*\n[^\n\x1b]{3}", pasted("one\rtwo\rthree"))  # the answer has begun
    chat.wait_for(ANSWERED)
    chat.reply("three$", "\r")
    chat.wait_for(ANSWERED)
    assert chat.asked(tmp_path) == ["hi", "one\ntwo\nthree"]
    chat.leave()


@needs_pty
@pytest.mark.parametrize("kind", [Terminal, DrawingTerminal])
def test_quotes_and_backslashes_allow_several_lines(
    model: Path, home: Path, tmp_path: Path, kind: type[Terminal]
) -> None:
    chat = kind("run", model, *CHAT, "-n", 2, "--ignore-eos")
    for typed in ('"""\nx = 1\\\n\n/help\n"""\n', '"""a\nb"""\n', '"""/clear"""\n', "one\\\ntwo\\\nthree\n"):
        chat.reply(PROMPT, typed)
        chat.wait_for(ANSWERED)
    chat.reply(PROMPT, f"/save {tmp_path / 'chat.json'}\n")
    chat.wait_for("Saved 8 messages")
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert [m["content"] for m in saved[::2]] == ["x = 1\\\n\n/help", "a\nb", "/clear", "one\ntwo\nthree"]
    chat.leave()


@pytest.mark.parametrize(
    ("typed", "is_open", "block"),
    [
        ("a", False, None),
        ("a\\", True, None),
        ('"""', True, None),
        ('"""a', True, None),
        ('"""a"', True, None),
        ('"""a "" b\nc', True, None),
        ('"""\na\n"""', False, "a"),
        ('"""\n\n a\n\n"""  ', False, "\n a\n"),
        ('"""\n"""', False, ""),
        ('"""a"""', False, "a"),
        ('""""""', False, ""),
        ('"""a\\', True, None),
        ('"""Doc."""\nx = """y', False, None),  # a program whose first line is a docstring is not a block
        ('a """', False, None),
    ],
)
def test_beginning_and_end_of_a_block(typed: str, is_open: bool, block: str | None) -> None:
    assert (editor.is_open(typed), editor.block(typed)) == (is_open, block)


@needs_pty
def test_tab_completes_commands(chat: DrawingTerminal) -> None:
    chat.reply(PROMPT, "/he\t\r")
    chat.wait_for(r"/regen\s+answer the last question again")
    chat.reply(PROMPT, "/s\t")
    chat.reply(r"/system\s+/set\s+/stats\s+/save", "ta\t\r")
    chat.wait_for("Nothing has been answered yet")
    chat.leave()


@needs_pty
def test_ctrl_c_drops_typed_text_and_stops_an_answer(model: Path, home: Path, tmp_path: Path) -> None:
    chat = DrawingTerminal("run", model, *CHAT, "--ignore-eos", "-c", 9999)  # which takes seconds to fill
    chat.reply(PROMPT, "wrong")
    chat.reply("wrong$", "\x03")
    chat.wait_for("Ctrl-D or /exit leaves")
    chat.reply(PROMPT, "right\r")
    chat.reply(r"right\r*\n[^\n\x1b]{3}", "\x03")
    chat.wait_for(r"\[prompt \d+ tokens.* interrupted\]")
    assert chat.asked(tmp_path) == ["right"]
    chat.leave()


@needs_pty
def test_an_unknown_command_gets_a_suggestion(chat: DrawingTerminal) -> None:
    for typed, told in [
        ("/hlep", r"There is no command /hlep; did you mean /help\?"),
        ("/s", r"There is no command /s; did you mean (/\w+ or ){2}/\w+\?"),
        ("/frobnicate", r"There is no command /frobnicate; /help shows them\."),
        ("/", r"There is no command /; /help shows them\."),
        ("/sys", r"System message: \(none\)"),
        (pasted("/system Be kind.\nBe brief."), "a new conversation"),
        ("/system", r"System message: Be kind\.\\nBe brief\."),
    ]:
        chat.reply(PROMPT, typed + "\r")
        chat.wait_for(told)
    chat.leave("/quit\r")


@needs_pty
def test_a_narrow_terminal_breaks_lines_between_words(model: Path, home: Path, tmp_path: Path) -> None:
    answer = PROSE.replace("\n", " ")
    env = talking(tmp_path, answer)
    chat = DrawingTerminal("run", model, *CHAT, "-n", len(answer) // 3 + 1, "--ignore-eos", env=env)
    chat.wait_for(PROMPT)
    columns_of(chat, 24)
    chat.type("hi\r")
    told = chat.wait_for(r"(?s)hi\r*\n(.*truncated\s+at\s+34\s+tokens\])")[1].replace("\r", "")
    lines = told.split("\n")
    assert max(map(len, lines)) <= 24
    words = " ".join(lines).split()
    assert words[: len(answer.split())] == answer.split()
    assert re.fullmatch(r"\[prompt \d+ tokens, [\d.]+ t/s \| answer \d+ tokens, .* \| truncated at .*\]",
                        " ".join(words[len(answer.split()) :]))  # fmt: skip
    chat.leave()


# -- the history ---------------------------------------------------------------------------------

UP, CTRL_R = "\x1b[A", "\x12"


@needs_pty
def test_the_next_chat_has_the_history(model: Path, home: Path, tmp_path: Path) -> None:
    for _ in range(2):
        chat = DrawingTerminal("run", model, *CHAT, "-n", 2, "--ignore-eos")
        chat.ask("first\r")
        chat.ask(pasted("second\nof two lines") + "\r")
        chat.leave()
    assert stat.S_IMODE((home / "chat_history").stat().st_mode) == 0o600
    chat = DrawingTerminal("run", model, *CHAT, "-n", 2, "--ignore-eos")
    chat.ask(UP + "\r")
    chat.ask(CTRL_R + "fir\r\r")
    assert chat.asked(tmp_path) == ["second\nof two lines", "first"]
    chat.leave()


@needs_pty
def test_an_unusable_history_does_not_stop_the_chat(model: Path, home: Path, tmp_path: Path) -> None:
    (home / "chat_history").mkdir(parents=True)
    chat = DrawingTerminal("run", model, *CHAT, "-n", 2, "--ignore-eos")
    chat.reply(PROMPT, "one\r")
    chat.wait_for("Messages are not kept for later chats: .*chat_history is not a regular file but a folder")
    chat.wait_for(ANSWERED)
    chat.ask("two\r")
    chat.ask(UP + UP + "\r")  # this chat's own messages
    assert chat.asked(tmp_path) == ["one", "two", "one"]
    chat.leave()
    assert list(home.iterdir()) == [home / "chat_history"]


def kept(history: editor.ChatHistory | None = None) -> list[str]:
    return list((history or editor.ChatHistory()).load_history_strings())


def test_readable_entries_of_a_damaged_history_are_kept(home: Path) -> None:
    assert kept() == []
    home.mkdir()
    file = home / "chat_history"
    file.write_bytes(b'"one"\nno json\n\xff\xfe\n{"a": 1}\n' + b"[" * 9999 + b'\n\n"two\\nlines"\n"cut of')
    assert kept() == ["two\nlines", "one"]
    editor.ChatHistory().store_string("three \udcff")
    assert kept() == ["three \udcff", "two\nlines", "one"]
    assert file.read_text().count("\n") == 3


def test_concurrent_chats_share_one_history(home: Path) -> None:
    one, other = editor.ChatHistory(), editor.ChatHistory()
    for history, text in [(one, "a"), (other, "b"), (one, "c")]:
        history.store_string(text)
    assert kept() == ["c", "b", "a"]


def test_the_history_has_a_size_limit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editor, "LARGEST_HISTORY", 100)
    monkeypatch.setattr(editor, "LONGEST_ENTRY", 40)
    history = editor.ChatHistory()
    for i in range(30):
        history.store_string(f"message {i}")  # 12 or 13 bytes with quotes and newline
        assert (home / "chat_history").stat().st_size <= 100
    history.store_string("x" * 39)
    assert kept() == [f"message {i}" for i in range(29, 22, -1)]
    (home / "chat_history").write_text('"x"\n' * 26)
    assert kept(history) == []
    history.store_string("y")
    assert (home / "chat_history").stat().st_size == 104


def test_a_history_that_cannot_be_stored_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOTSET_HOME", "/dev/null/none")
    history = editor.ChatHistory()
    assert kept(history) == []
    for _ in range(2):
        history.store_string("a")
        history.report()
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("Messages are not kept for later chats: /dev/null")
    monkeypatch.setenv("HOTSET_HOME", "~nouser/none")
    assert kept() == []


# -- messages, and a full context ----------------------------------------------------------------


@pytest.mark.parametrize("template", [True, False])
def test_an_empty_message_is_not_sent(template: bool) -> None:
    chat, asked = object.__new__(Chat), []
    chat.template, chat.messages, chat.images, chat.commands = template, [], [], {}
    chat.model, chat.params, chat.parse_special = _Echo(), {}, True  # type: ignore[assignment]
    chat.answer = lambda: asked.append("chat")  # type: ignore[method-assign]
    chat._show = lambda stream: asked.append("raw") or ""  # type: ignore[method-assign, func-returns-value]
    for line in ("", " ", "\t \n", '"""\n \n"""'):
        chat.handle(line)
    assert asked == chat.messages == []
    chat.handle(" a ")
    assert asked == ["chat" if template else "raw"]


class _Echo:
    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        return [1] * len(text)

    def stream(self, ids: list[int], **params: Any) -> list[int]:
        return ids


class Talk:
    """A chat with a model whose prompts are stored as text."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch, **params: Any) -> None:
        self.model = hotset.load(model, device="reference", n_ctx=256)
        self.prompts: list[str] = []
        stream = self.model.stream

        def kept(ids: list[int], **params: Any) -> Any:
            chunks = stream(ids, **params)
            self.prompts.append(self.model.tokenizer.decode(ids))
            return chunks

        monkeypatch.setattr(self.model, "stream", kept)
        fixed = {"temperature": 0.0, "ignore_eos": True, **params}
        self.chat = Chat(self.model, "Be kind.", False, fixed)

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close()

    def left(self) -> list[str]:
        """Return the questions in the last prompt."""
        return re.findall(r"user\n(.*)<\|im_end\|>", self.prompts[-1])


def test_a_full_context_drops_the_oldest_turns(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Talk(model, monkeypatch, max_tokens=4) as talk:
        asked, before, n_drops = [], 0, 0
        for i in range(20):
            asked.append(f"question {i}")
            talk.chat.handle(asked[-1])
            told = " ".join(capsys.readouterr().err.split())
            assert talk.prompts[-1].startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")
            left = talk.left()
            assert left == asked[-len(left) :]
            n_dropped = before + 1 - len(left)
            if n_dropped:
                n_drops += 1
                which = f"the {n_dropped} oldest turns are" if n_dropped > 1 else "the oldest turn is"
                assert f"the context of 256 tokens is full: {which} left out; a larger -c keeps more" in told
                prompt = talk.model.tokenizer.encode(talk.prompts[-1], False, True)
                assert len(prompt) <= 256 - 256 // 4
            else:
                assert "full" not in told
            before = len(left)
        assert 5 <= n_drops <= 10  # some are dropped at once, not one per question
        assert [m["content"] for m in talk.chat.messages[::2]] == asked  # /save stores all of them
        talk.chat.handle("/regen")
        assert talk.left() == left
        talk.chat.handle("/clear")
        talk.chat.handle("new")
        assert talk.left() == ["new"]


def test_a_question_that_is_too_long_drops_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Talk(model, monkeypatch, max_tokens=4) as talk:
        for text in ("one", "two"):
            talk.chat.handle(text)
        before = list(talk.chat.messages)
        for n in (230, 256, 300, 100_000):
            with pytest.raises(hotset.ContextLengthError, match="context of 256"):
                talk.chat.handle("x" * n)
            assert talk.chat.messages == before
        assert "left out" not in capsys.readouterr().err
        talk.chat.handle("three")
        assert talk.left() == ["one", "two", "three"]
        talk.chat.handle("y" * 150)
        assert talk.left() == ["y" * 150]
        assert "the 3 oldest turns are left out" in " ".join(capsys.readouterr().err.split())
        monkeypatch.setattr(talk.model, "stream", lambda *_, **__: _raise(hotset.HotsetError("it broke")))
        for _ in range(4):  # each error removes the question, and then the one before it
            with pytest.raises(hotset.HotsetError, match="it broke"):
                talk.chat.handle("/regen")
        talk.chat.handle("/regen")
        assert "There is no question to answer again" in capsys.readouterr().err


def _raise(error: Exception) -> Any:
    raise error


def test_without_a_limit_an_eighth_of_the_context_is_kept_for_an_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Talk(model, monkeypatch) as talk:
        talk.chat.handle("one")  # its answer fills the context
        assert "the context of 256 tokens is full" in capsys.readouterr().err
        talk.chat.handle("go on")
        assert talk.left() == ["go on"]
        assert "the oldest turn is left out" in capsys.readouterr().err


def test_set_changes_a_parameter_of_later_answers(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Talk(model, monkeypatch, max_tokens=2) as talk:
        for typed, field, value in (
            ("temperature 0.5", "temperature", 0.5),
            ("parameter temp 0", "temperature", 0),
            ("--top-k 7", "top_k", 7),
            ("num_predict 5", "max_tokens", 5),
            ("repeat_penalty 1.5", "repetition_penalty", 1.5),
            ("stop END", "stop", ("END",)),
            ("ignore-eos true", "ignore_eos", True),
        ):
            talk.chat.handle(f"/set {typed}")
            assert talk.chat.params[field] == value, typed
        talk.chat.handle("hello")
        assert talk.chat.last is not None
        assert talk.chat.last.timings.predicted_tokens == 5
        talk.chat.handle("/set num_predict -1")
        assert talk.chat.params["max_tokens"] is None
        for typed, told in (
            ("temprature 1", "did you mean temperature"),
            ("top_k few", "top_k must be"),
            ("num_ctx 9", "with -c"),
        ):
            with pytest.raises(hotset.InvalidRequestError, match=told):
                talk.chat.handle(f"/set {typed}")
        capsys.readouterr()
        talk.chat.handle("/set")
        assert re.search(r"top_k +7", capsys.readouterr().err)


@needs_pty
def test_another_model_continues_the_conversation(model: Path, home: Path, tmp_path: Path) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "other.gguf").symlink_to(model)
    chat = DrawingTerminal("run", model, *CHAT, "-n", 2, "--ignore-eos")
    chat.ask("one\r")
    for command in ("/model other", "/load nothing", "/load"):
        chat.reply(PROMPT, f"{command}\r")
        chat.wait_for("there is no model" if "nothing" in command else r"other.gguf, context 512 tokens")
    chat.ask("two\r")
    assert chat.asked(tmp_path) == ["one", "two"]
    chat.leave()


@needs_pty
def test_the_chat_continues_after_an_error_in_a_full_context(model: Path, home: Path, tmp_path: Path) -> None:
    chat = DrawingTerminal("run", model, *CHAT, "-n", 3, "-c", 96, "--ignore-eos")
    for i in range(6):
        chat.ask(f"q{i}\r")
    chat.reply(PROMPT, "z" * 90 + "\r")
    told = chat.wait_for("error: .*context of 96.*\n")[0]
    assert "a larger --ctx-size." in told
    assert "n_ctx" not in told
    assert chat.asked(tmp_path) == [f"q{i}" for i in range(6)]
    chat.type("/set nothing 1\r")
    chat.wait_for("is unknown; temperature, top_k")  # the names that /set takes, not --top-k
    chat.leave()
