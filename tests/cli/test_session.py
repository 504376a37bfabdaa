"""`hotset run --session`: a conversation over several runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_runs import ANSWERED, PROMPT, Terminal, inside, needs_core, needs_pty

import hotset

pytestmark = needs_core

LONG = "please say something about the following words: " * 3
OPTIONS = ("--device", "cpu", "-t", 1, "--temp", 0, "-n", 60, "--ignore-eos")


def turn(model: Path, session: Path | None, text: str, *more: object) -> dict[str, Any]:
    """Return the JSON of a run."""
    kept = () if session is None else ("--session", session)
    done = inside("run", model, text, *OPTIONS, *kept, "--json", *more)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_conversation_continues_in_the_next_run(model: Path, home: Path, tmp_path: Path) -> None:
    session = tmp_path / "talk.session"
    first = turn(model, session, LONG, "--system", "be brief")
    assert first["tokens"] == turn(model, None, LONG, "--system", "be brief")["tokens"]
    done = inside("run", model, "and now?", *OPTIONS, "--session", session)
    assert "3 messages, with their cache" in done.stderr
    cached = re.search(r"\((\d+) from the cache\)", done.stderr)
    assert cached is not None
    # The answer's text may have other tokens in a prompt.
    assert int(cached[1]) >= first["prompt_tokens"] // 64 * 64
    assert "5 messages" in inside("run", model, "more", *OPTIONS, "--session", session).stderr


def test_an_answer_in_a_session_equals_one_with_the_whole_conversation(
    model: Path, home: Path, tmp_path: Path
) -> None:
    session = tmp_path / "talk.session"
    first, second = (
        turn(model, session, LONG, "--system", "one"),
        turn(model, session, "go", "--system", "two"),
    )
    third = turn(model, session, "on")
    messages = [
        {"role": "system", "content": "two"},  # the latest one
        {"role": "user", "content": LONG}, {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "go"}, {"role": "assistant", "content": second["text"]},
        {"role": "user", "content": "on"},
    ]  # fmt: skip
    with hotset.load(model, device="cpu", n_threads=1) as loaded:
        for n, found in ((4, second), (6, third)):
            expected = loaded.chat(messages[:n], temperature=0, max_tokens=60, ignore_eos=True)
            assert found["tokens"] == expected.completion.tokens


def test_a_raw_session_stores_only_the_cache(model: Path, home: Path, tmp_path: Path) -> None:
    session = tmp_path / "raw.session"
    expected = turn(model, session, LONG, "--raw")
    done = inside("run", model, LONG, *OPTIONS, "--raw", "--session", session)
    assert "0 messages, " in done.stderr
    assert "from the cache)" in done.stderr
    assert done.stdout.removesuffix("\n") == expected["text"].removesuffix("\n")


def test_a_damaged_block_is_computed_again(model: Path, home: Path, tmp_path: Path) -> None:
    session, whole = tmp_path / "talk.session", tmp_path / "whole.session"
    turn(model, whole, LONG)
    data = bytearray(whole.read_bytes())
    expected = turn(model, whole, "go on")
    data[-1] ^= 1
    session.write_bytes(bytes(data))
    assert turn(model, session, "go on")["tokens"] == expected["tokens"]


@pytest.mark.parametrize("contents", [b"", b"something else", b"hotsetKV" * 40])
def test_a_file_that_is_not_a_session_is_not_replaced(
    model: Path, home: Path, tmp_path: Path, contents: bytes
) -> None:
    file = tmp_path / "file"
    file.write_bytes(contents)
    done = inside("run", model, "hello", *OPTIONS, "--session", file, returns=1)
    assert str(file) in done.stderr.replace("\n", "")
    assert file.read_bytes() == contents
    refused = inside("run", model, "hello", *OPTIONS, "--session", model, returns=2)
    assert "is one of the files that are read" in refused.stderr.replace("\n", " ")


def test_a_session_on_another_backend_is_refused(model: Path, home: Path, tmp_path: Path) -> None:
    done = inside("run", model, "hello", "--device", "reference", "--session", tmp_path / "x", returns=1)
    assert "--session needs the whole model on this machine's CPU" in done.stderr.replace("\n", " ")


def test_with_another_cache_type_a_sessions_messages_are_kept(
    model: Path, home: Path, tmp_path: Path
) -> None:
    session = tmp_path / "talk.session"
    turn(model, session, LONG)
    done = inside("run", model, "go on", *OPTIONS, "-ctk", "f32", "--session", session)
    assert "2 messages, without a cache" in done.stderr


@needs_pty
def test_a_chat_continues(model: Path, home: Path, tmp_path: Path) -> None:
    session = tmp_path / "talk.session"
    for n in range(2):
        chat = Terminal(
            "run", model, "--device", "cpu", "--seed", 1, "-n", 2, "--ignore-eos", "--session", session
        )
        if n:
            chat.wait_for("2 messages")
        chat.reply(PROMPT, "hello\n")
        chat.wait_for(ANSWERED)
        chat.leave()
    assert "4 messages" in inside("run", model, "x", *OPTIONS, "--session", session).stderr


def test_a_session_that_cannot_be_stored_is_refused_before_an_answer(
    model: Path, home: Path, tmp_path: Path
) -> None:
    done = inside("run", model, "hello", *OPTIONS, "--session", tmp_path / "nodir" / "x", returns=None)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no folder" in done.stderr
    (other := tmp_path / "Modelfile").write_text("FROM model.gguf")
    done = inside("run", model, "hello", *OPTIONS, "--session", other, returns=None)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not a session of hotset" in " ".join(done.stderr.split())
    done = inside("run", model, "hello", *OPTIONS, "--cache-disk", "1G", returns=None)
    assert (done.returncode, "--cache-disk" in done.stderr) == (2, True)
