"""Modelfiles: their meaning, refused ones, and templates with leading messages, which equal the messages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import hotset, inside, needs_core, write_model
from tiny_adapters import random_pairs, write_adapter

import hotset as library
from hotset.errors import HotsetError, InvalidRequestError
from hotset.formats.gguf import open_gguf
from hotset.loader.modelfile import Modelfile, made_of, with_messages
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.storage import aliases, created, find_created, resolve
from hotset.text.turn_formats import named

WHOLE = '''# a comment
FROM model.gguf
system """Be
  "brief" and {{ kind }} {% endif %} \\n, é😀."""
PARAMETER temperature 0.25
PARAMETER stop "END"
PARAMETER stop ###
PARAMETER num_ctx 128
PARAMETER num_predict -1
PARAMETER seed -1
PARAMETER num_gpu 99
LICENSE """
Mine.
"""
MESSAGE user What is water?
MESSAGE assistant """H2O
"""
'''
SYSTEM = 'Be\n  "brief" and {{ kind }} {% endif %} \\n, é😀.'
EXAMPLES = [{"role": "user", "content": "What is water?"}, {"role": "assistant", "content": "H2O\n"}]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    return write_model(tmp_path / "model.gguf")


def test_modelfile_is_parsed() -> None:
    found = Modelfile.parse(WHOLE)
    assert (found.base, found.system) == ("model.gguf", SYSTEM)
    assert found.parameters == {
        "temperature": ("0.25",), "stop": ("END", "###"), "num_ctx": ("128",), "num_predict": ("-1",),
        "seed": ("-1",), "num_gpu": ("99",),
    }  # fmt: skip
    assert [{"role": role, "content": text} for role, text in found.messages] == EXAMPLES
    assert Modelfile.parse(found.text) == found
    assert Modelfile.parse(WHOLE.replace("\n", "\r\n")) == found
    stops = ("\n\n", " a ", '"', "x\ny", '""', "#")
    of_stops = Modelfile(base="m", parameters={"stop": stops}, adapters=("a b", "c"))
    assert Modelfile.parse(of_stops.text) == of_stops


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("SYSTEM x", "has no FROM"),
        ("FROM m\nRUN rm", "line 2: there is no 'RUN'; instructions are FROM"),
        ('FROM m\n\nSYSTEM """open', 'line 3: its """ is not closed'),
        ("FROM m\nMESSAGE robot x", "line 2: MESSAGE is of system, user, assistant"),
        ("FROM m\n" + "#" * (1 << 20), "characters"),
    ],
)
def test_invalid_modelfiles(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        Modelfile.parse(text)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("PARAMETER heat 1", "there is no PARAMETER 'heat'; there are .*frequency_penalty"),
        ("PARAMETER top_k many", "PARAMETER top_k is a whole number, not 'many'"),
        ("PARAMETER top_p 7", "PARAMETER top_p must"),
        ("PARAMETER num_ctx 0", "PARAMETER num_ctx must"),
        ("TEMPLATE {{ .Prompt }}", "TEMPLATE is a template of Go"),
        ("ADAPTER ./lora", "ADAPTER is a whole path on the server, not './lora'"),
        ("ADAPTER /no/lora", "there is no adapter /no/lora"),
    ],
)
def test_impossible_models_are_refused(model: Path, lines: str, problem: str) -> None:
    modelfile = Modelfile.parse(f"FROM {model}\n{lines}")
    with pytest.raises(InvalidRequestError, match=problem):
        made_of(modelfile, model, base=str(model), source="")


def test_a_system_message_without_a_template_gets_one_by_name_or_vocabulary(tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare.gguf", template=False)
    made = made_of(Modelfile(base="bare", system="x"), bare, base="bare", source="")
    assert made.template == with_messages(named("chatml"), [("system", "x")], [])
    made = made_of(Modelfile(base="bare", system="x", template="gemma"), bare, base="bare", source="")
    assert made.template == with_messages(named("gemma"), [("system", "x")], [])
    made = made_of(Modelfile(base="bare", parameters={"seed": ("3",)}), bare, base="bare", source="")
    assert (made.template, made.sampling) == (None, {"seed": 3})


@needs_core
def test_template_equals_the_messages(model: Path) -> None:
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Why?"}]
    own = [{"role": "system", "content": "Other."}]
    with library.load(model, device="cpu", n_threads=1) as plain:
        expected = [
            plain.encode_chat([{"role": "system", "content": SYSTEM}, *EXAMPLES, *asked]),
            plain.encode_chat([*own, *EXAMPLES, *asked]),
        ]
        source = plain.chat_template.source
    template = with_messages(
        source, [("system", SYSTEM)], [(one["role"], one["content"]) for one in EXAMPLES]
    )
    from hotset.api import load_opened
    from hotset.loader.build import open_model
    from hotset.settings import LoadSettings

    opened = open_model(model, LoadSettings(device="cpu", n_threads=1))
    opened.gguf.metadata["tokenizer.chat_template"] = template
    with load_opened(opened) as made:
        assert [made.encode_chat(asked), made.encode_chat([*own, *asked])] == expected


# ---- the command line


def test_created_models_are_kept_found_and_deleted(model: Path) -> None:
    file = model.parent / "Modelfile"
    file.write_text(WHOLE)
    inside("create", "brief", "-f", file)
    made = created.find("BRIEF:latest")
    assert made is not None
    assert made.base == str(model)  # from the Modelfile's own folder
    assert made.sampling == {"temperature": 0.25, "stop": ["END", "###"]}
    assert made.load == {"n_ctx": 128}
    assert resolve("brief") == model
    assert "created from" in inside("list").stdout
    aliases.add("short", "brief")
    assert resolve("SHORT:latest") == model
    assert find_created("short") == ("brief", made)
    assert "alias of brief" in inside("list").stdout
    assert json.loads(inside("show", "short", "--json").stdout)["path"] == str(model)
    assert "an alias; brief stays" in inside("rm", "short").stderr
    assert aliases.read() == {}
    rows = json.loads(inside("list", "--json").stdout)
    assert [row["name"] for row in rows if row["source"].startswith("created from")] == ["brief"]
    file.write_text("FROM brief")
    done = inside("create", "again", "-f", file, returns=None)
    assert (done.returncode, "was created itself" in done.stderr) == (2, True)
    inside("rm", "brief")
    assert created.read() == {}
    assert model.exists()
    with pytest.raises(HotsetError):
        resolve("brief")


@needs_core
def test_an_adapter_of_a_created_model(model: Path) -> None:
    with open_gguf(model) as gguf:
        pairs = random_pairs(describe(config_from_gguf(gguf), gguf.tensors), gguf.tensors)
    write_adapter(model.parent / "style.gguf", pairs)
    file = model.parent / "Modelfile"
    file.write_text("FROM model.gguf\nADAPTER style.gguf\nPARAMETER temperature 0\nPARAMETER num_predict 7")
    inside("create", "styled", "-f", file)
    given = ["Why?", "--temp", 0, "-n", 7, "--json"]
    style = model.parent / "style.gguf"
    done = [
        inside("run", "styled", "Why?", "--json"),
        inside("run", model, *given, "--lora", style),
        inside("run", model, *given),
        inside("run", "styled", "Why?", "--json", "--lora", f"{style}:0"),
    ]
    texts = [json.loads(each.stdout)["text"] for each in done]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    file.write_text("FROM model.gguf\nADAPTER model.gguf")
    done = inside("create", "wrong", "-f", file, returns=None)
    assert (done.returncode, "is not an adapter" in done.stderr) == (1, True)


def test_names_of_created_models(model: Path) -> None:
    made = created.Created(base="x")
    with pytest.raises(InvalidRequestError, match="a name has letters"):
        created.add("../x", made)
    stored = model.parent / "home" / "models" / "taken.gguf"
    stored.parent.mkdir(parents=True)
    stored.write_bytes(model.read_bytes())
    with pytest.raises(InvalidRequestError, match="is called 'taken' already"):
        created.add("taken", made)
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        created.add("mine", created.Created(base="x", modelfile="\ud800"))
    assert created.read() == {}


def test_a_damaged_file_hides_no_other_created_model(model: Path) -> None:
    made = created.Created(base="x")
    created.add("one", made)
    created.add("group/Two:small", made)
    (file,) = (path for path in (model.parent / "home" / "created").glob("*.json") if "one" in path.name)
    file.write_text("[]")
    with pytest.raises(HotsetError, match=r"one\.json is not a created model; delete it"):
        created.find("one")
    assert set(created.read()) == {"group/Two:small"}
    assert created.find_named("GROUP/two:small") == ("group/Two:small", made)
    created.add("ONE", made)
    assert set(created.read()) == {"ONE", "group/Two:small"}
    assert created.find("\ud800") is created.find("../one") is created.find("x" * 5000) is None


def test_models_of_an_older_hotset_are_kept(model: Path) -> None:
    """Read the old single file of all names, which the first change replaces."""
    rows = {
        "Mine:small": {
            "base": "x",
            "template": "t",
            "sampling": {"top_k": 3},
            "load": {},
            "modelfile": "FROM x",
        },
        "other": {"base": "y"},
    }
    old = model.parent / "home" / "created.json"
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_text(json.dumps(rows))
    expected = {name: created.Created(**row) for name, row in rows.items()}
    assert created.read() == expected
    assert created.find("mine:SMALL") == expected["Mine:small"]
    assert old.exists()
    created.add("new", created.Created(base="z"))
    assert created.read() == {**expected, "new": created.Created(base="z")}
    assert not old.exists()
    assert created.remove("OTHER:latest")
    assert not created.remove("other")
    assert set(created.read()) == {"Mine:small", "new"}


def test_a_created_model_is_read_again_when_it_changed(model: Path) -> None:
    created.add("one", created.Created(base="x"))
    assert created.find("one") is created.find("one")
    created.add("one", created.Created(base="y"))
    found = created.find("one")
    assert found is not None
    assert found.base == "y"


def test_no_more_is_kept_than_can_be_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(created, "MAX_BYTES", 3000)
    made = created.Created(base="x", modelfile="a" * 1000)
    created.add("one", made)
    created.add("two", made)
    with pytest.raises(InvalidRequestError, match=r"the limit is .*; delete some of them"):
        created.add("three", made)
    assert set(created.read()) == {"one", "two"}


@pytest.fixture
def brief(model: Path) -> str:
    """Create a model with this name."""
    file = model.parent / "Modelfile"
    file.write_text(
        "FROM model.gguf\nSYSTEM Be brief.\nPARAMETER temperature 0\n"
        "PARAMETER num_predict 7\nPARAMETER num_ctx 96"
    )
    inside("create", "brief", "-f", file)
    return "brief"


@needs_core
def test_run_has_the_parameters_and_the_messages(model: Path, brief: str) -> None:
    home = {"HOTSET_HOME": str(model.parent / "home")}
    made = hotset("run", brief, "Why?", "--json", env=home, returns=None)
    same = hotset(
        "run",
        model,
        "Why?",
        "--system",
        "Be brief.",
        "--temp",
        0,
        "-n",
        7,
        "-c",
        96,
        "--json",
        env=home,
        returns=None,
    )
    assert made.returncode == same.returncode == 0, made.stderr
    one, other = json.loads(made.stdout), json.loads(same.stdout)
    assert (one["text"], one["prompt_tokens"], len(one["tokens"])) == (
        other["text"],
        other["prompt_tokens"],
        7,
    )
    longer = json.loads(hotset("run", brief, "Why?", "-n", 3, "--json", env=home).stdout)
    assert len(longer["tokens"]) == 3  # an option overrides the parameter


def test_who_is_left_without_a_model_is_named(model: Path) -> None:
    base = model.parent / "home" / "models" / "base.gguf"
    base.parent.mkdir(parents=True)
    base.write_bytes(model.read_bytes())
    created.add("made", created.Created(base="base"))
    created.add("other", created.Created(base=str(model)))
    aliases.add("short", "made")
    done = inside("rm", "base")
    assert "Made of it, and without a file now: made, short." in " ".join(done.stderr.split())
    assert not base.exists()


def test_the_library_has_the_parameters_and_the_messages(model: Path, brief: str) -> None:
    asked = [{"role": "user", "content": "Why?"}]
    with library.load(model, device="reference", n_ctx=96) as plain:
        expected = plain.chat(
            [{"role": "system", "content": "Be brief."}, *asked], temperature=0, max_tokens=7
        )
    with library.load(brief, device="reference") as made:
        assert made.n_ctx == 96
        assert made.chat(asked).content == expected.content
        asynchronous = asyncio.run(library.AsyncModel(made).generate("Why?"))
        assert len(asynchronous.tokens) == len(made.generate("Why?").tokens) == 7
        assert len(made.generate("Why?", max_tokens=3).tokens) == 3
    with library.load(brief, device="reference", n_ctx=64) as smaller:
        assert smaller.n_ctx == 64


def test_another_template_keeps_the_messages_of_a_created_model(brief: str) -> None:
    expected = with_messages(named("gemma"), [("system", "Be brief.")], [])
    with library.load(brief, device="reference", chat_template="gemma") as made:
        assert made.chat_template.source == expected


@pytest.mark.parametrize("is_created", [False, True])
def test_the_models_file_has_a_chat_template(
    model: Path, brief: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_created: bool
) -> None:
    name, expected = "plain", named("gemma")
    if is_created:
        name, expected = brief, with_messages(expected, [("system", "Be brief.")], [])
    file, begun = tmp_path / "models.toml", list[Any]()
    base = "" if is_created else f"model = {json.dumps(str(model))}\n"
    file.write_text(f'[models.{name}]\n{base}[models.{name}.load]\nchat_template = "gemma"\n')
    monkeypatch.setattr("hotset.server.listen.listen", lambda host, _: begun.append(host))
    inside("serve", "--models-file", str(file), "--device", "reference")
    (host,) = begun

    async def loaded() -> None:
        host.start()
        service = await host.when_loaded(name, [])
        assert service.model.chat_template.source == expected
        await host.close()

    asyncio.run(loaded())


def test_a_server_of_one_created_model(brief: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr("hotset.server.listen.listen", lambda host, _: begun.append(host))
    inside("serve", "BRIEF", "--device", "reference")
    (service,) = begun
    assert service.name == "brief"

    async def loaded() -> None:
        service.start()
        await service.loaded()
        assert service.sampling == {"temperature": 0.0, "max_tokens": 7}
        assert service.model.n_ctx == 96
        assert "Be brief." in service.model.chat_template.source
        await service.close()

    asyncio.run(loaded())


def test_a_server_of_several_has_a_created_one(
    model: Path, brief: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr("hotset.server.listen.listen", lambda host, _: begun.append(host))
    inside("serve", brief, "--keep-alive", "5m")
    (models,) = begun
    assert [one.name for one in models.catalogue.models] == ["model", "brief"]
    assert models.first == ("brief",)


def test_a_batch_of_a_created_model(model: Path, brief: str) -> None:
    line = {
        "custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
        "body": {"model": "brief", "messages": [{"role": "user", "content": "Why?"}]},
    }  # fmt: skip
    requests, output = model.parent / "in.jsonl", model.parent / "out.jsonl"
    requests.write_text(json.dumps(line) + "\n")
    inside("batch", requests, "-o", output, "-m", brief, "--device", "reference")
    answer = json.loads(output.read_text())["response"]["body"]
    assert (answer["model"], answer["usage"]["completion_tokens"]) == ("brief", 7)


def test_tools_of_a_created_model(model: Path, brief: str) -> None:
    client = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }
    requests = [
        ("initialize", client),
        ("tools/call", {"name": "chat", "arguments": {"prompt": "Why?"}}),
        ("tools/call", {"name": "list_models", "arguments": {}}),
    ]
    messages = [
        {"jsonrpc": "2.0", "id": i, "method": method, "params": params}
        for i, (method, params) in enumerate(requests)
    ]
    messages.insert(1, {"jsonrpc": "2.0", "method": "notifications/initialized"})
    given = "".join(f"{json.dumps(one)}\n" for one in messages)
    done = inside("mcp", brief, "--device", "reference", stdin=given)
    replies = {reply["id"]: reply["result"] for reply in map(json.loads, done.stdout.splitlines())}
    chat, models = (replies[i]["structuredContent"] for i in (1, 2))
    assert chat["tokens"] == 7
    assert {"name": "brief", "size": None, "is_default": True} in models["models"]


@pytest.mark.parametrize(
    "words",
    [("run", "brief", "Why?", "--stages", "auto"), ("serve", "brief", "--replicas", "2")],
)
def test_other_machines_do_not_know_created_models(brief: str, words: tuple[str, ...]) -> None:
    assert "'brief' is a created model" in " ".join(inside(*words, returns=2).stderr.split())
