"""The command line as persons and scripts use it: on tiny models, mostly with NumPy."""

from __future__ import annotations

import csv
import inspect
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from cli_runs import (
    ANSWERED,
    CHAT,
    COMMAND,
    PROMPT,
    Terminal,
    answer,
    hotset,
    inside,
    needs_core,
    needs_pty,
    reach,
    write_model,
)
from fake_backend import FakeBackend
from fake_hub import FakeHub
from tiny_gguf import write_llama

import hotset as hotset_package
from hotset.cli.console import print_error
from hotset.storage import catalogue, store

try:
    from hotset import _core  # noqa: F401

    HAS_CORE = True
except ImportError:
    HAS_CORE = False


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "bare.gguf", template=False)


# -- run -----------------------------------------------------------------------------------------


def test_an_answer_has_the_requested_form(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3}')
    for given in (schema, schema.read_text()):
        result = answer(model, "Hello", "--json-schema", given, "--seed", 1)
        assert len(json.loads(result["text"])) in (2, 3)
        assert result["finish_reason"] == "stop"
    rules = tmp_path / "list.gbnf"
    rules.write_text('root ::= "th" [a-c]{2} "."\n')
    for option, value in (("--grammar-file", rules), ("--grammar", rules.read_text())):
        assert re.fullmatch(r"th[a-c]{2}\.", answer(model, "Hello", option, value, "--seed", 1)["text"])
    done = inside("run", model, "Hello", "--grammar", "root ::= other", "--device", "reference", returns=2)
    assert done.stdout == ""
    assert "the grammar cannot be used: rule 'root' refers to 'other', which is not defined" in done.stderr
    inside("run", model, "Hello", "-j", "{}", "--grammar", "x", returns=2)
    inside("run", model, "Hello", "--grammar", "x", "--grammar-file", rules, returns=2)
    inside("run", model, "Hello", "--json-schema", tmp_path / "none", returns=2)


def test_run_prints_only_the_answer(model: Path) -> None:
    done = hotset("run", model, "Hello", "-n", 6, "--temp", 0, "--device", "reference")
    result = answer(model, "Hello", "-n", 6, "--temp", 0)
    assert done.stdout.rstrip("\n") == result["text"].rstrip("\n")
    assert re.search(
        r"\[prompt \d+ tokens, [\d.]+ t/s \| answer 6 tokens, [\d.]+ t/s \| "
        r"[\d.]+ KiB read per token \| truncated at \d+ tokens\]",
        done.stderr,
    )


def test_run_json_has_the_fields_that_scripts_need(model: Path) -> None:
    result = answer(model, "Hello", "-n", 5, "-t", 1, "--temp", 0)
    assert isinstance(result["text"], str)
    assert len(result["tokens"]) == 5
    assert all(isinstance(token, int) for token in result["tokens"])
    # <|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n, character by character
    assert result["prompt_tokens"] == 1 + 5 + 5 + 1 + 1 + 1 + 10
    assert result["prompt_per_second"] > 0
    assert result["predicted_per_second"] > 0
    assert result["finish_reason"] == "length"
    assert result["bytes_per_token"] > 0


def test_run_agrees_with_the_python_api(model: Path) -> None:
    import hotset as package

    with package.load(model, device="reference") as loaded:
        raw = loaded.generate("Hello", temperature=0.0, max_tokens=7)
        chat = loaded.chat([{"role": "user", "content": "Hello"}], seed=5, max_tokens=7)
    result = answer(model, "Hello", "--raw", "-n", 7, "--temp", 0)
    assert (result["text"], result["tokens"], result["prompt_tokens"]) == (raw.text, raw.tokens, 5)
    assert answer(model, "Hello", "-n", 7, "-s", 5)["tokens"] == chat.completion.tokens


def test_special_tokens_of_a_raw_prompt(model: Path) -> None:
    import hotset as package

    with package.load(model, device="reference") as loaded:
        bos = loaded.tokenizer.piece(loaded.tokenizer.bos_id)
        plain = len(loaded.encode(f"a{bos}b"))
        parsed = len(loaded.encode(f"a{bos}b", parse_special=True))
        assert parsed < plain
    one = ["--raw", "-n", 1, "--temp", 0]
    assert answer(model, f"a{bos}b", *one)["prompt_tokens"] == parsed
    assert answer(model, f"a{bos}b", *one, "--no-parse-special")["prompt_tokens"] == plain


def test_all_ways_to_give_a_prompt_are_equal(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("the question\n")
    fixed = ["-n", 4, "--temp", 0]
    first = answer(model, "the question", *fixed)
    for arguments, stdin in [
        (["-m", model, "-p", "the question"], ""),
        (["-m", model, "the question"], ""),
        ([model, "-f", tmp_path / "prompt.txt"], ""),
        ([model, "-f", "-"], "the question\n"),
        ([model], "the question\n"),
        ([model, "the question"], " \n"),
    ]:
        other = answer(*arguments, *fixed, stdin=stdin)
        assert (other["tokens"], other["prompt_tokens"]) == (first["tokens"], first["prompt_tokens"])
    assert answer(model, "the question", "--raw", *fixed)["prompt_tokens"] < first["prompt_tokens"]
    longer = answer(model, "the question", "--system", "Be kind.", *fixed)
    assert longer["prompt_tokens"] > first["prompt_tokens"]


def test_a_file_or_the_standard_input_follows_the_prompt(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the text\n")
    fixed = ["-n", 4, "--temp", 0]
    whole = answer(model, "Summarise:\n\nthe text", *fixed)
    assert whole["prompt_tokens"] > answer(model, "Summarise:", *fixed)["prompt_tokens"]
    for arguments, stdin in [
        ([model, "Summarise:"], "the text\n"),
        ([model, "Summarise:", "-f", "-"], "the text\n"),
        ([model, "Summarise:", "-f", tmp_path / "text.txt"], "left alone"),
    ]:
        assert answer(*arguments, *fixed, stdin=stdin)["tokens"] == whole["tokens"]


@needs_pty
def test_a_prompt_does_not_wait_for_a_terminal_or_a_silent_pipe(model: Path) -> None:
    words = ("run", model, "Hello", "-n", 2, *CHAT)
    assert Terminal(*words).exit_code() == 0
    reader, writer = os.pipe()  # open but without data
    done = subprocess.run(
        [*COMMAND, *map(str, words)], stdin=reader, capture_output=True, text=True, timeout=60
    )
    os.close(writer)
    os.close(reader)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "the standard input is open and has no text yet" in done.stderr


def test_a_file_without_a_template_continues_the_prompt(bare: Path) -> None:
    result = answer(bare, "Hello", "-n", 3, "--temp", 0)
    assert result["prompt_tokens"] == 5
    done = inside("run", bare, "Hello", "--system", "x", "--device", "reference", returns=2)
    assert "chat template" in done.stderr


def test_a_template_of_the_command_line_replaces_the_files(model: Path, bare: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.jinja"
    file.write_text("{{ messages[0].content }}")
    fixed = "Hello", "-n", 3, "--temp", 0
    short = answer(model, *fixed, "--chat-template-file", file)["prompt_tokens"]
    assert short < answer(model, *fixed)["prompt_tokens"]
    assert answer(bare, *fixed, "--chat-template", "vicuna")["prompt_tokens"] > short
    both = "--chat-template", "vicuna", "--chat-template-file", file
    for wrong, problem in ((both, "cannot be combined"), ((*both[:1], "x"), "no chat template 'x'")):
        done = inside("run", bare, "Hello", *wrong, "--device", "reference", returns=None)
        assert done.returncode != 0
        assert problem in " ".join(done.stderr.split())


def test_sampling_options_reach_the_sampler(model: Path) -> None:
    greedy = answer(model, "Hello", "-n", 12, "--temp", 0)["tokens"]
    assert answer(model, "Hello", "-n", 12, "--top-k", 1, "-s", 1)["tokens"] == greedy
    assert answer(model, "Hello", "-n", 12, "--top-p", 0, "-s", 1)["tokens"] == greedy
    assert answer(model, "Hello", "-n", 12, "--min-p", 1, "-s", 1)["tokens"] == greedy
    hot = [answer(model, "Hello", "-n", 12, "--temp", 5, "-s", 3, "--min-p", 0)["tokens"] for _ in range(2)]
    assert hot[0] == hot[1] != greedy
    forbidden = answer(model, "Hello", "-n", 12, "--temp", 0, "--logit-bias", f"{greedy[0]}-100")["tokens"]
    assert greedy[0] not in forbidden
    penalised = answer(model, "Hello", "-n", 12, "--temp", 0, "--presence-penalty", 50)["tokens"]
    assert len(set(penalised)) == 12
    repeated = answer(model, "Hello", "-n", 12, "--temp", 0, "--repeat-penalty", 9)["tokens"]
    assert repeated != greedy
    often = answer(model, "Hello", "-n", 12, "--temp", 0, "--frequency-penalty", 50)["tokens"]
    assert often != greedy


def test_stop_ends_the_answer_before_its_text(model: Path) -> None:
    text = answer(model, "Hello", "-n", 12, "--temp", 0)["text"]
    stop = text[3:5]
    result = answer(model, "Hello", "-n", 12, "--temp", 0, "--stop", stop)
    assert result["text"] == text[: text.index(stop)]
    assert result["finish_reason"] == "stop"


def test_a_full_context_is_reported(model: Path) -> None:
    done = inside("run", model, "Hello", "--temp", 0, "-c", 40, "--ignore-eos", "--device", "reference")
    assert "the context of 40 tokens is full" in done.stderr
    done = inside("run", model, "Hello " * 20, "-c", 40, "--device", "reference", returns=1)
    assert len(done.stderr.strip().splitlines()) == 1
    assert "context of 40; shorten it or load the model with a larger --ctx-size." in done.stderr


def test_a_message_names_options_instead_of_python_settings(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("the cache has no room; lower n_ctx, or use kv_type q8_0. n_threads too")
    said = "the cache has no room; lower --ctx-size, or use --cache-type q8_0. --threads too"
    assert " ".join(capsys.readouterr().err.split()) == f"error: {said}."
    print_error("repetition_penalty must be at least 0; keep_alive is a number, and cache_disk is GiB")
    said = "--repeat-penalty must be at least 0; keep_alive is a number, and --cache-disk is GiB"
    assert capsys.readouterr().err.replace("\n", " ") == f"error: {said}. "
    for of_a_file in (
        "m.toml: models.a.load has no 'n_cttx' (did you mean n_ctx?)", "[models.b] n_ctx must be 1",
        "PARAMETER top_k is a whole number",
    ):  # fmt: skip
        print_error(of_a_file)
        assert capsys.readouterr().err == f"error: {of_a_file}.\n"
    for name in (
        "There is no model 'n_ctx'", "n_ctx.gguf is empty", "a/n_ctx/b has no file", "my-n_ctx-2 is old",
    ):  # fmt: skip
        print_error(name)
        assert capsys.readouterr().err == f"error: {name}.\n"


@pytest.mark.parametrize(
    ("options", "named"),
    [(("-ctk", "q4"), "--cache-type"), (("-ctk", "q8_0", "-ctv", "q4"), "--cache-type-v")],
)
def test_the_option_with_a_wrong_type_is_named(model: Path, options: tuple[str, ...], named: str) -> None:
    done = inside("run", model, "Hello", *options, returns=2)
    assert f"{named} must be one of f16, q8_0, q4_0" in " ".join(done.stderr.split())


def test_activation_overrides_the_file(model: Path) -> None:
    greedy = answer(model, "Hello", "-n", 12, "--temp", 0)["tokens"]
    assert answer(model, "Hello", "-n", 12, "--temp", 0, "--activation", "relu")["tokens"] != greedy
    done = inside("run", model, "Hello", "--activation", "nonsense", "--device", "reference", returns=2)
    assert "nonsense" in done.stderr


@needs_core
def test_the_native_backend_is_the_default(model: Path) -> None:
    done = inside("run", model, "Hello", "-n", 8, "--temp", 0, "-t", 1, "--json")
    assert json.loads(done.stdout)["tokens"] == answer(model, "Hello", "-n", 8, "--temp", 0)["tokens"]
    again = inside("run", model, "Hello", "-n", 8, "--temp", 0, "-t", 2, "--cache-type", "q8_0", "--json")
    assert len(json.loads(again.stdout)["tokens"]) == 8


def test_a_closed_pipe_is_not_an_error(model: Path) -> None:
    options = ["-n", "200", "--ignore-eos", "--device", "reference", "-s", "1"]
    command = [*COMMAND, "run", str(model), "Hello", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert process.stdout
    assert process.stderr
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == b""


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "fragment"),
    [
        (["run", "no-such-model", "hi"], 2, "there is no model 'no-such-model'"),
        (["run", "smolm2-135", "hi"], 2, "did you mean smollm2-135m"),
        (["run", "missing.gguf", "hi"], 2, "there is no file missing.gguf"),
        (["run", "turbosparse-mistral-7b", "hi"], 1, "hotset convert FOLDER OUT.gguf"),
        (["run", "MODEL", "hi", "--temp", "-1"], 2, "error: --temp must be at least 0"),
        (["run", "MODEL", "hi", "--device", "abacus"], 2, "--device must be one of auto, cpu"),
        (["run", "MODEL", "hi", "--cache-type", "q4"], 2, "--cache-type must be one of f16, q8_0, q4_0"),
        (["run", "MODEL", "hi", "--temp", "warm"], 2, "--temp must be a finite number, not 'warm'."),
        (["run", "MODEL", "hi", "--seed", "1.5"], 2, "--seed must be a whole number, not '1.5'."),
        (["run", "MODEL", "hi", "-t", "0"], 2, "--threads must be at least 1, not 0."),
        (["serve", "MODEL", "--port", "70000"], 2, "--port must be between 0 and 65535, not 70000."),
        (["run", "MODEL", "hi", "there"], 2, "put a text of several words in quotes"),
        (["profile", "MODEL"], 2, "there is no profile"),
        (["pull", "https://huggingface.co/owner/repo"], 2, "write hf:owner/repo."),
        (["pull", "hf:owner"], 2, "'hf:owner' is not a repository"),
        (["run", "MODEL", "hi", "-n", "0"], 2, "--n-predict must be at least 1, not 0"),
        (["run", "MODEL", "hi", "-p", "ho"], 2, "given twice"),
        (["run", "MODEL", "hi", "--logit-bias", "x"], 2, "ID+BIAS"),
        (["run", "MODEL"], 2, "there is no prompt"),
        (["run", "MODEL", "hi", "--nonsense"], 2, "--nonsense"),
        (["frobnicate"], 2, "There is no subcommand 'frobnicate'; 'hotset help' lists them."),
        (["quantise"], 2, "did you mean quantize?"),
        (["RUN"], 2, "did you mean run"),
        (["chat"], 2, "did you mean run"),
        (["ver"], 2, "did you mean version"),
        (["help", "serv"], 2, "did you mean serve?"),
        (["show", "EMPTY"], 2, "EMPTY"),
        (["rm", "nothing"], 2, "no model 'nothing'"),
        (["bench", "-m", "MODEL", "-p", "many"], 2, "128,512"),
        (["bench", "-m", "MODEL", "-o", "xml"], 2, "jsonl"),
        (["bench", "-m", "MODEL", "-p", "0", "-n", "0"], 2, "nothing to measure"),
        (["perplexity", "MODEL", "-f", "SHORT"], 2, "at least 1024 tokens"),
        (["perplexity", "MODEL", "-f", "BINARY"], 2, "not UTF-8"),
        (["convert", "EMPTY", "out.gguf", "--type", "q9"], 2, "q9"),
    ],
)
def test_a_mistake_is_reported_without_a_traceback(
    home: Path, tmp_path: Path, model: Path, arguments: list[str], code: int, fragment: str
) -> None:
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "SHORT").write_text("too short")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe")
    places = {"MODEL": str(model)} | {n: str(tmp_path / n) for n in ("EMPTY", "SHORT", "BINARY")}
    if arguments[0] in ("run", "perplexity") and not {"--backend", "--device"} & {*arguments}:
        arguments = [*arguments, "--device", "reference"]
    done = inside(*[places.get(argument, argument) for argument in arguments], returns=code)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert fragment in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: ")


def test_a_damaged_file_gives_one_message(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:3000])
    for subcommand in (["run", broken, "hi"], ["show", broken]):
        assert len(inside(*subcommand, returns=1).stderr.strip().splitlines()) == 1


def test_a_fault_of_hotset_asks_for_a_report(model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import hotset.storage.store as s\ndef f(*a, **k): raise ZeroDivisionError('oh')\ns.list_models = f\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = hotset("list", env={"PYTHONPATH": path}, returns=1)
    assert "ZeroDivisionError: oh" in done.stderr
    assert "HOTSET_DEBUG=1" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in hotset("list", env={"PYTHONPATH": path, "HOTSET_DEBUG": "1"}, returns=1).stderr


def test_help_and_version() -> None:
    for subcommand in (
        "run", "pull", "list", "rm", "show", "bench", "perplexity", "eval", "doctor", "convert",
    ):  # fmt: skip
        assert subcommand in inside("--help").stdout
        inside(subcommand, "-h")
    assert re.match(r"hotset \S+\n$", hotset("--version").stdout)
    for words, options in [
        (["help"], ["--help"]),
        (["help", "help"], ["--help"]),
        (["help", "run"], ["run", "--help"]),
        (["help", "ls"], ["list", "--help"]),
        (["version"], ["--version"]),
        (["ls", "--all", "--json"], ["list", "--all", "--json"]),
    ]:
        done = inside(*words, returns=None)
        assert (done.returncode, done.stdout) == (0, inside(*options).stdout)


def test_options_of_several_subcommands_are_declared_once() -> None:
    """Check that such an option has one spelling, help, default and Python name."""
    from hotset.cli.main import SUBCOMMANDS, app

    group = typer.main.get_command(app)
    found: dict[str, dict[str, tuple[Any, ...]]] = {}
    for subcommand in SUBCOMMANDS:
        command = group.get_command(None, subcommand)  # type: ignore[attr-defined]
        for parameter in command.params:
            for name in getattr(parameter, "opts", []):
                facts = (parameter.name, parameter.help, parameter.default, tuple(parameter.opts))
                found.setdefault(name, {})[subcommand] = facts
    shared = ["--sparsity", "--predictor", "--vram-budget", "--n-gpu-layers", "--gpu-index",
              "--reset-gpu-index", "--split"]  # fmt: skip
    # In these, --sparsity is a target.
    others = ("sparse make", "sparse train", "sparse calibrate")
    for name in shared:
        subcommands = {
            subcommand: facts for subcommand, facts in found[name].items() if subcommand not in others
        }
        assert len(subcommands) >= 3, name
        assert len(set(subcommands.values())) == 1, subcommands
    assert found["--reset-gpu-index"]["run"][0] == "reset_gpu_index"
    assert "reset_gpu_index" in inspect.signature(hotset_package.load).parameters


# -- a terminal ----------------------------------------------------------------------------------


@needs_pty
def test_a_chat_answers_and_obeys_commands(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    chat = Terminal("run", model, *CHAT, "-n", 5)
    chat.wait_for("tiny.gguf, context 512 tokens")
    chat.reply(PROMPT, "one\n")
    first = int(chat.wait_for(r"\[prompt (\d+) tokens")[1])
    chat.reply(PROMPT, "one\n")
    assert int(chat.wait_for(r"\[prompt (\d+) tokens")[1]) > first  # the conversation grows
    for typed, shown in [
        ("/help", r"/regen\s+answer the last question again"),
        ("/stats", r"Answers: 2, with 10 tokens"),
        ("/regen", ANSWERED),
        (f"/save {saved}", "Saved 4 messages"),
        ("/frob", "There is no command /frob"),
        ("/system Be brief.", "a new conversation"),
        ("/clear", "a new conversation"),
        ("/regen", "no question to answer again"),
    ]:
        chat.reply(PROMPT, typed + "\n")
        chat.wait_for(shown)
    chat.reply(PROMPT, "one\\\ntwo\n")
    chat.wait_for(ANSWERED)
    chat.leave("/exit\n")
    roles = [message["role"] for message in json.loads(saved.read_text())]
    assert roles == ["user", "assistant", "user", "assistant"]


@needs_pty
def test_ctrl_c_stops_the_answer_and_not_the_chat(model: Path) -> None:
    chat = Terminal("run", model, *CHAT, "--ignore-eos", "-c", 9999)  # which takes seconds to fill
    chat.reply(PROMPT, "count\n")
    chat.reply(r"count\r?\n[^\n]{3}", "\x03")  # the echo and the beginning of the answer
    chat.wait_for(r"\[prompt \d+ tokens.* interrupted\]")
    chat.reply(PROMPT, "\x03")
    chat.wait_for("Ctrl-D or /exit leaves")
    chat.leave()


@needs_pty
def test_ctrl_c_ends_a_single_answer(model: Path) -> None:
    run = Terminal("run", model, "count", *CHAT, "--ignore-eos", "-c", 512)
    run.reply(r"\S{3}", "\x03")
    run.wait_for(r"interrupted\]")
    assert run.exit_code() == 130


@needs_pty
def test_without_a_model_the_user_chooses_one_at_the_terminal(home: Path, model: Path) -> None:
    folder = home / "models"
    folder.mkdir(parents=True)
    (folder / "tiny-relu.gguf").symlink_to(model)
    (folder / "another.gguf").symlink_to(model)
    write_model(folder / "vectors.gguf", keys={"llama.pooling_type": 1})
    (folder / "bge-reranker.gguf").symlink_to(model)
    chat = Terminal("run", *CHAT, "-n", 3)
    table = chat.wait_for(r"(?s)(1\s+tiny-relu.*)Which one\?")[1]
    assert table.index("tiny-relu") < table.index("another") < table.index("bamboo-7b")
    assert not re.search("to be fetched.*here", table, re.DOTALL)
    assert not re.search("turbosparse|vectors|rerank|embed", table)
    chat.type("99\n")
    chat.reply("A number from 1 to", "bamboo-7b\n")
    chat.reply(r"Fetch bamboo-7b \(.*\)\? \[y/N\]", "\n")
    chat.reply(r"Which one\? \[tiny-relu\]", "\n")
    chat.wait_for("tiny-relu.gguf, context 512")
    chat.leave()


# -- the store -----------------------------------------------------------------------------------


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as fake:
        yield fake


@needs_pty
def test_a_large_default_model_is_fetched_after_a_yes(home: Path, hub: FakeHub, model: Path) -> None:
    entry = catalogue.default_for(store.usable_memory())
    hub.repositories[entry.repo] = {f"m-{entry.quant}.gguf": model.read_bytes()}
    refused = hotset("run", "Hello there", "-n", 2, env=reach(hub.url), returns=1)
    assert f"'hotset pull {entry.name}' fetches it" in refused.stderr
    assert store.list_models() == []

    question = rf"Fetch {entry.name} \(.*B, licence apache-2.0\)\? \[y/N\]"
    for typed in ("n", "y"):
        run = Terminal("run", "Hello there", "-n", 2, *CHAT, env=reach(hub.url))
        run.wait_for(question)
        run.type(f"{typed}\n")
        assert (run.exit_code() == 0) is (typed == "y"), run.screen
    assert [one.name for one in store.list_models()] == [entry.name]
    hotset("run", "Hello there", "-n", 2, *CHAT, env=reach(hub.url))


def test_pull_list_show_and_rm(home: Path, hub: FakeHub, model: Path) -> None:
    hub.repositories["owner/repo"] = {
        "tiny.Q8_0.gguf": model.read_bytes(),
        "tiny.F16.gguf": b"GGUF" * 9,
        "activation/activation_0.pt": b"zero",
    }
    env = reach(hub.url)
    assert json.loads(inside("list", "--json").stdout) == []
    assert "hotset pull NAME" in inside("list").stderr

    pulled = hotset("pull", "hf:owner/repo", env=env)
    assert pulled.stdout == ""
    assert "Choosing tiny.Q8_0.gguf" in pulled.stderr
    assert "most precise of 2 models that fits" in pulled.stderr
    again = json.loads(hotset("pull", "hf:owner/repo", "--json", env=env).stdout)
    assert again["size"] == model.stat().st_size

    (item,) = json.loads(inside("list", "--json").stdout)
    assert item["name"] == "owner/repo"
    assert item["path"] == again["path"]
    assert item["size"] == model.stat().st_size
    assert item["fits"]
    assert "owner/repo" in inside("list").stdout
    assert answer("owner/repo", "Hello", "-n", 2, "-s", 1)["model"] == again["path"]
    assert answer("hf:owner/repo", "Hello", "-n", 2, "-s", 1)["tokens"]

    assert json.loads(inside("show", "owner/repo", "--json").stdout)["architecture"] == "llama"
    path = Path(again["path"])
    whole = path.read_bytes()
    path.write_bytes(whole[::-1])
    hotset("pull", "hf:owner/repo", env=env)
    assert path.read_bytes() == whole[::-1]
    mended = hotset("pull", "hf:owner/repo", "--check", env=env)
    assert "is damaged: fetching it again" in mended.stderr
    assert path.read_bytes() == whole
    for name in ("", ".", ":", "hf:"):
        inside("rm", name, returns=2)

    removed = json.loads(inside("rm", "owner/repo", "--json").stdout)
    assert removed[0]["freed"] == model.stat().st_size + 4
    assert not list(home.rglob("*.gguf"))


def test_run_downloads_a_model_named_by_its_repository(home: Path, hub: FakeHub, model: Path) -> None:
    hub.repositories["owner/repo"] = {"tiny.gguf": model.read_bytes()}
    arguments = ("run", "hf:owner/repo", "Hello", "-n", 2, "-s", 1, "--device", "reference", "--json")
    assert json.loads(hotset(*arguments, env=reach(hub.url)).stdout)["tokens"]


def test_pull_reports_a_wrong_checksum(home: Path, hub: FakeHub, model: Path) -> None:
    hub.repositories["owner/repo"] = {"tiny.gguf": model.read_bytes()}
    hub.corrupt.add("tiny.gguf")
    done = hotset("pull", "hf:owner/repo", env=reach(hub.url), returns=1)
    assert "does not match its checksum" in done.stderr
    assert json.loads(inside("list", "--json").stdout) == []


def test_pull_without_a_network_fails_in_seconds(home: Path) -> None:
    began = time.monotonic()
    done = hotset("pull", "hf:owner/repo", env=reach("http://127.0.0.1:9"), returns=1)
    assert "does not answer" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 15


def test_list_all_shows_the_catalogue_and_unsupported_models(home: Path) -> None:
    items = {item["name"]: item for item in json.loads(inside("list", "--all", "--json").stdout)}
    assert items["bamboo-7b"]["unsupported"] is items["smallthinker-4b"]["unsupported"] is None
    assert "hotset convert" in items["turbosparse-mistral-7b"]["unsupported"]
    assert "0.6B active per token" in items["smallthinker-4b"]["needs"]
    assert items["relufalcon-40b"]["repository"] == "PowerInfer/ReluFalcon-40B-PowerInfer-GGUF"
    assert "cannot run yet" in inside("list", "--all").stdout


def test_show_prints_facts_about_a_file(model: Path) -> None:
    facts = json.loads(inside("show", model, "--json", "--tensors").stdout)
    wanted = {
        "architecture": "llama", "name": "Tiny Random", "license": "mit", "context": 512, "layers": 2,
        "embedding": 64, "feed_forward": [96], "heads": 2, "kv_heads": 1, "head_size": 32,
        "activation": "silu", "tokenizer": "gpt2", "vocabulary": 101, "chat_template": True, "runs": True,
        "kv_bytes_per_token": 2 * 2 * (32 + 32),
    }  # fmt: skip
    assert {key: facts[key] for key in wanted} == wanted
    assert facts["types"]["Q8_0"]["tensors"] == 15
    assert facts["types"]["F32"]["tensors"] == 5
    assert len(facts["tensors"]) == 20
    assert {"name": "blk.1.ffn_up.weight", "type": "Q8_0", "shape": [64, 96], "nbytes": 6528} in facts[
        "tensors"
    ]
    assert facts["metadata"]["llama.rope.freq_base"] == 10000
    shown = inside("show", model, "--tensors", "--metadata").stdout
    assert re.search(r"blk\.1\.ffn_up\.weight\s+Q8_0\s+64 x 96\s+6\.4 KiB", shown)
    assert re.search(r"tokenizer\.ggml\.tokens\s+\[!, \", #, \$, \.\.\. 101 in all\]", shown)


def test_show_prints_experts_and_their_bytes_per_token(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", experts=(8, 2), n_ff_shared=32)
    facts = json.loads(inside("show", path, "--json").stdout)
    cycle = 2 * 2 * 3 * 64 * 96 * 4  # layers, experts per token, matrices
    assert facts["experts"] == {
        "count": 8, "used": 2, "neurons": [96], "shared_neurons": 32, "layers": 2, "token_cycle": cycle
    }  # fmt: skip
    assert facts["active_parameters"] < facts["parameters"] / 2
    shown = " ".join(inside("show", path).stdout.split())
    assert "8 of 96 neurons in 2 layers, and 32 that all share; a token has 2" in shown
    assert "288.0 KiB of experts are read for a token" in shown
    done = inside("plan", path)
    assert "a token cycle, 2 experts in each of 2 layers, is 288.0 KiB" in done.stderr
    planned = json.loads(inside("plan", path, "--json").stdout)
    assert {key: planned[key] for key in ("active_parameters", "experts")} == {
        key: facts[key] for key in ("active_parameters", "experts")
    }
    caches = {cache["share"]: cache for cache in planned["caches"]}
    assert [caches[share]["slots"] for share in (0.2, 0.25, 0.4)] == ["per_layer", "per_layer", "shared"]
    assert caches[0.25] == {
        "share": 0.25, "n_slots": 4, "n_bytes": cycle, "cycles": 1.0, "slots": "per_layer"
    }  # fmt: skip


def test_show_describes_a_model_that_cannot_run(tmp_path: Path) -> None:
    path = write_model(tmp_path / "x.gguf", architecture="zebra")
    facts = json.loads(inside("show", path, "--json").stdout)
    assert facts["architecture"] == "zebra"
    assert not facts["runs"]
    assert "zebra" in facts["reason"]
    assert "runs here" in inside("show", path).stdout


# -- measuring -----------------------------------------------------------------------------------


@pytest.mark.parametrize("can_hold_one_more", [True, False])
def test_bench_measures_from_event_to_event(monkeypatch: pytest.MonkeyPatch, can_hold_one_more: bool) -> None:
    """Use steps in which n tokens take 10 + n seconds: the results follow from this."""
    from hotset.cli.bench import Conditions, Test, measure

    now = [0.0]
    monkeypatch.setattr("hotset.engine.engine.time.perf_counter", lambda: now[0])

    class Clocked(FakeBackend):
        def step(self, batch: Any) -> Any:
            now[0] += 10 + len(batch.tokens)
            return super().step(batch)

    def seconds(p: int, n: int, d: int) -> list[float]:
        n_blocks = -(-(p + n + d + 2 * can_hold_one_more) // 64)
        backend = Clocked(n_blocks=n_blocks, max_batch=50)
        return measure(backend, Test(p, n, d), Conditions(2, 2048), lambda: 1e9).seconds

    assert seconds(0, 64, 0) == [64 * 11.0] * 2
    assert seconds(0, 10, 128) == [10 * 11.0] * 2
    assert seconds(100, 0, 0) == [2 * 60.0] * 2
    assert seconds(100, 28, 0) == [2 * 60.0 + 28 * 11] * 2
    assert seconds(100, 0, 64) == [2 * 60.0] * 2
    assert seconds(44, 0, 70) == [pytest.approx(60.0 * 44 / 50)] * 2  # 6 of the depth again


def test_bench_uses_the_engine_and_reuses_the_depth() -> None:
    from hotset.cli.bench import Conditions, Test, _entry, measure

    backend = FakeBackend(n_blocks=8, max_batch=50)
    rates = iter([1e9, 3e9, 2e9])
    result = measure(backend, Test(120, 3, 70), Conditions(3, 2048), lambda: next(rates))
    warm_up, repetition = [50, 50, 50, 40, 1, 1], [50, 50, 26, 1, 1, 1]
    assert backend.batches == warm_up + repetition * 3
    small = FakeBackend(n_blocks=8, max_batch=50)
    measure(small, Test(60, 0, 0), Conditions(1, 32), lambda: 1e9)
    assert small.batches == [32, 28] * 2
    entry = _entry({"backends": "CPU"}, Test(0, 100, 0), result, 1000)
    assert entry["read_bandwidth"] == 2e9
    assert entry["avg_ts"] == pytest.approx(np.mean(entry["samples_ts"]))
    assert entry["stddev_ts"] == pytest.approx(np.std(entry["samples_ts"], ddof=1))
    assert entry["bandwidth_share"] == pytest.approx(entry["avg_ts"] * 1000 / 2e9)
    assert _entry({"backends": "VULKAN"}, Test(0, 100, 0), result, 1000)["bandwidth_share"] is None
    assert Test(512, 0, 0).name == "pp512"
    assert Test(512, 128, 4096).name == "pp512+tg128 @ d4096"


@needs_core
def test_bench_json_has_llama_benchs_fields(model: Path) -> None:
    done = inside(
        "bench", "-m", model, "-p", "8,16", "-n", 4, "-pg", "8,4", "-d", "0,64", "-t", 1, "-r", 2, "-o",
        "json", returns=None
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    entries = json.loads(done.stdout)
    tensors = json.loads(inside("show", model, "--json", "--tensors").stdout)["tensors"]
    assert [(e["n_prompt"], e["n_gen"], e["n_depth"]) for e in entries] == [
        (p, n, d) for d in (0, 64) for p, n in [(8, 0), (16, 0), (0, 4), (8, 4)]
    ]
    for entry in entries:
        assert entry["n_threads"] == 1
        assert len(entry["samples_ts"]) == 2
        assert entry["avg_ts"] == pytest.approx(sum(entry["samples_ts"]) / 2)
        assert entry["stddev_ts"] >= 0
        assert entry["read_bandwidth"] > 0
        assert entry["bytes_per_token"] > 0
        assert entry["model_type"] == "llama 68.22 K Q8_0"
        assert entry["model_size"] == sum(t["nbytes"] for t in tensors)
        assert entry["type_k"] == "f16"
    assert "read bandwidth of the mapped file" in done.stderr
    deeper = [e["bytes_per_token"] for e in entries if e["n_gen"] and not e["n_prompt"]]
    assert deeper[1] > deeper[0]  # with a depth, the KV cache is read too


@needs_core
@pytest.mark.backend("vulkan")
def test_bench_times_operations_on_a_device(model: Path) -> None:
    arguments = "bench", model, "-p", 8, "-n", 3, "-r", 1, "-t", 1, "--timings"
    refused = inside(*arguments, returns=2).stderr
    assert "--timings requires --device vulkan[:N]" in refused
    done = inside(*arguments, "--device", "vulkan", returns=None)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\ntg3: a step of 1 token on .+, the mean of \d+: [\d.]+ ms on the device", done.stdout)
    assert re.search(r"attn_q\W+rounded_few\W+2 ", done.stdout)
    for entry in map(json.loads, inside(*arguments, "--device", "vulkan", "-o", "jsonl").stdout.splitlines()):
        (times,) = entry["operations"]
        assert times["n_tokens"] == (entry["n_prompt"] or 1)
        assert {one["operation"] for one in times["operations"]} > {"attn_q", "ffn_gate"}


@needs_core
def test_bench_prints_a_table_and_csv_and_lines(model: Path) -> None:
    arguments = ("bench", model, "-p", 8, "-n", 4, "-t", 1, "-r", 2)
    mixed = inside(*arguments, "-ctk", "f16,q8_0/q4_0", "-o", "jsonl").stdout.splitlines()
    types = [(line["type_k"], line["type_v"]) for line in map(json.loads, mixed)]
    assert types == [("f16", "f16")] * 2 + [("q8_0", "q4_0")] * 2
    assert "must be one of f16, q8_0, q4_0" in inside(*arguments, "-ctk", "q4_1", returns=2).stderr
    table = inside(*arguments).stdout
    assert re.match(r"read bandwidth of the mapped file: [\d.]+ GB/s with 1 thread\n", table)
    assert re.search(r"\| llama \S+ K Q8_0 +\|.*\| +pp8 \| +[\d.]+ ± [\d.]+ \|", table)
    assert re.search(r"\| +tg4 \| +[\d.]+ ± [\d.]+ \| +\d+% \|", table)
    rows = list(csv.DictReader(io.StringIO(inside(*arguments, "-o", "csv").stdout)))
    assert [row["n_gen"] for row in rows] == ["0", "4"]
    lines = [json.loads(line) for line in inside(*arguments, "-o", "jsonl").stdout.splitlines()]
    assert [line["n_prompt"] for line in lines] == [8, 0]


@needs_core
def test_bench_compares_models_in_one_table(model: Path, bare: Path) -> None:
    arguments = ("bench", "-m", f"{model},{bare}", "-p", 4, "-n", 0, "-r", 1, "-t", 1)
    found = json.loads(inside(*arguments, "--json").stdout)
    assert [entry["model_filename"] for entry in found] == [str(model), str(bare)]
    lines = inside(*arguments).stdout.splitlines()
    assert [line.count("pp4") for line in lines[-3:]] == [0, 1, 1]
    assert len({line.count("|") for line in lines[-4:]}) == 1
    rows = list(csv.DictReader(io.StringIO(inside("bench", model, bare, *arguments[3:], "-o", "csv").stdout)))
    assert [row["model_filename"] for row in rows] == [str(model), str(bare)]


@needs_core
def test_bench_reports_the_time_of_steps_of_several_tokens(model: Path) -> None:
    arguments = ("bench", model, "--step-tokens", "1,2,4", "-t", 1, "-r", 2, "-d", 70)
    found = json.loads(inside(*arguments, "--json").stdout)
    assert [entry["n_tokens"] for entry in found] == [1, 2, 4]
    assert all(entry.keys() == {"n_tokens", "ms"} and entry["ms"] > 0 for entry in found)
    table = inside(*arguments).stdout
    assert "÷ 1" in table
    assert re.search(r"^ *4 +[\d.]+ +[\d.]+ +[\d.]+", table, re.MULTILINE)
    drafting = inside(*arguments, "--speculate", "ngram", returns=None)
    assert (drafting.returncode, "cannot be combined with --step-tokens" in drafting.stderr) == (2, True)


@needs_core
def test_bench_reports_accepted_and_rejected_draft_tokens(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 8, "utf-8")
    arguments: tuple[Any, ...] = ("bench", model, "-p", 0, "-n", 40, "-t", 1, "-r", 2, "-f", text)
    arguments += ("--depth", 100)
    [entry] = json.loads(inside(*arguments, "--speculate", "ngram", "--json").stdout)
    assert entry["tokens_per_step"] >= 1
    facts = entry["speculation"]
    assert facts["speculate"] == "ngram"
    assert facts["drafted_tokens"] >= facts["accepted_tokens"]
    assert facts["step_ms"]["1"] > 0
    table = inside(*arguments, "--lookup", text)
    assert "speculation ngram | " in table.stderr
    assert "speculation" not in json.loads(inside(*arguments, "--json").stdout)[0]
    short = inside(*arguments, "-d", 2000, returns=None)
    assert (short.returncode, "are needed" in short.stderr) == (2, True)
    random = inside("bench", model, "--speculate", "ngram", returns=None)
    assert (random.returncode, "random tokens" in random.stderr) == (2, True)


@needs_core
def test_run_reports_tokens_per_step(model: Path) -> None:
    arguments = ("run", model, "-p", "abcabcabc", "-n", 20, "--temp", 0, "-t", 1, "--json")
    plain = json.loads(inside(*arguments).stdout)
    drafted = json.loads(inside(*arguments, "--speculate", "ngram", "--draft-max", 4).stdout)
    assert drafted["tokens"] == plain["tokens"]
    assert plain["tokens_per_step"] == 1
    assert drafted["tokens_per_step"] >= 1
    assert drafted["speculation"]["speculate"] == "ngram"
    assert "speculation" not in plain
    stats = inside(*arguments[:-1], "--speculate", "ngram", "--stats")
    assert re.search(r"\[speculation ngram \| [\d.]+ tokens per step \| \d+ of \d+ drafted", stats.stderr)


def test_perplexity_agrees_with_the_python_api(model: Path, tmp_path: Path) -> None:
    import hotset as package

    text = "the quick brown fox jumps over the lazy dog\r\n" * 20
    (tmp_path / "text.txt").write_bytes(text.encode())
    arguments = (
        "perplexity", model, "-f", tmp_path / "text.txt", "-c", 32, "--chunks", 4, "--device", "reference",
    )  # fmt: skip
    done = inside(*arguments, "--json")
    result = json.loads(done.stdout)
    with package.load(model, n_ctx=32, device="reference") as loaded:
        expected = loaded.perplexity(text, n_ctx=32, chunks=4)
    assert result["ppl"] == pytest.approx(expected.ppl)
    assert result["error"] == pytest.approx(expected.error)
    assert result["chunks"] == 4
    assert f"PPL = {expected.ppl:.4f} ±" in inside(*arguments).stdout


def test_doctor_reports_the_machine(home: Path) -> None:
    report = json.loads(inside("doctor", "--json").stdout)
    assert report["processor"]["usable_cores"] >= 1
    assert report["memory"]["usable"] > 10**8
    assert report["store"]["path"] == str(home / "models")
    assert report["packages"]["numpy"] == np.__version__
    assert report["kernels"]["why"]
    shown = inside("doctor").stdout
    for word in ("processor", "kernels", "memory", "NVIDIA", "torch", "store"):
        assert word in shown


@needs_core
def test_doctor_reports_forced_kernels(home: Path) -> None:
    kernels = json.loads(hotset("doctor", "--json", env={"HOTSET_ISA": "scalar"}).stdout)["kernels"]
    assert kernels["chosen"] == "scalar"
    assert "HOTSET_ISA" in kernels["why"]


@needs_core
def test_doctor_explains_a_slow_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotset import _core
    from hotset.cli.doctor import examine

    monkeypatch.delenv("HOTSET_ISA", raising=False)
    monkeypatch.setattr(_core, "isa", lambda: "scalar")
    monkeypatch.setattr(_core, "available_isas", lambda: ["scalar"])
    kernels = examine({})["kernels"]
    assert kernels["chosen"] == "scalar"
    assert "very slow" in kernels["why"]
    assert "Armv8.2" in kernels["why"]


@needs_core
def test_unusable_kernels_give_one_message(home: Path, model: Path) -> None:
    env = {"HOTSET_ISA": "sse"}
    report = json.loads(hotset("doctor", "--json", env=env).stdout)["kernels"]
    assert report["chosen"] is None
    assert (
        report["why"]
        == "HOTSET_ISA=sse cannot be used: it must be scalar, avx2, avxvnni, avx512, amx, neon or i8mm"
    )
    assert "scalar" in report["available"]
    assert hotset("run", model, "Hello", "-n", 1, env=env, returns=2).stderr == f"error: {report['why']}.\n"


def test_convert_writes_a_file_that_runs(tmp_path: Path) -> None:
    from scratch import write_checkpoint

    write_checkpoint(tmp_path / "source")
    done = inside("convert", tmp_path / "source", tmp_path / "out.gguf", "--type", "f32", "--json")
    assert json.loads(done.stdout)["size"] == (tmp_path / "out.gguf").stat().st_size
    facts = json.loads(inside("show", tmp_path / "out.gguf", "--json").stdout)
    assert facts["layers"] == 1
    assert facts["types"]["F32"]["tensors"] > 0


# -- starting ------------------------------------------------------------------------------------


def test_run_imports_only_needed_modules(model: Path) -> None:
    code = (
        "import sys; from hotset.cli.main import app\n"
        f"try: app(['run', {str(model)!r}, 'Hello', '-n', '2', '--backend', 'reference'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'scipy', 'pydantic', 'rich'}\n"
        "heavy.add('prompt_toolkit')\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("loaded: []\n"), done.stdout + done.stderr


OWN_WORDS = (
    "must be (a (whole|finite) number|at least|at most|between|an iterable)|there is no "
    "|is (not )?a folder|not a valid path"
)


def test_values_without_typer_equal_typers_values() -> None:
    """Compare values and messages of all options, except hotset's own messages for numbers."""
    from hotset.cli.main import SUBCOMMANDS, app
    from hotset.cli.values import OptionType, Taking

    group: Any = typer.main.get_command(app)
    values = [None, "", "a b", "7", "-3", "0", "-0", "1.5", "-0.25", "1e3", "x", "1_000", " 5 ", "+5", "0x10",
              "nan", "inf", "9" * 30, "1.0", "é", "a\udcff", "٣", 7, -1, 2.5, True]  # fmt: skip
    n_plain = 0

    def outcome(process: Callable[..., Any], context: Any, value: Any) -> tuple[Any, ...]:
        try:
            made = process(context, value)
        except typer.BadParameter as error:
            return type(error), error.format_message()
        return type(made), repr(made)

    for subcommand in SUBCOMMANDS:
        command = group.get_command(None, subcommand)
        context = typer.Context(command)
        for option in command.params:
            taking = option.process_value
            if isinstance(taking, Taking) and not isinstance(taking._read, OptionType):
                n_plain += 1
                for value in values:
                    ours, theirs = (outcome(one, context, value) for one in (taking, taking._ask))
                    if taking._read is not None and ours[0] is typer.BadParameter:
                        assert re.search(OWN_WORDS, ours[1])
                        ours, theirs = ours[:1], theirs[:1]
                    assert ours == theirs or value in ("nan", "inf", True), (subcommand, option)
    assert n_plain > 100
