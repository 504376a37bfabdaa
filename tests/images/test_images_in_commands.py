"""`hotset run --image` and /image of the chat, with a stand-in encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from byte_models import PRINTABLE, write_model
from cli_runs import hotset as hotset_command
from cli_runs import inside
from stand_in_encoder import StandInEncoder, asks, file_of, give_images

import hotset
from hotset import api
from hotset.cli.chat import Chat
from hotset.cli.session import Session
from hotset.errors import InvalidRequestError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {"llama.context_length": 512}
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", more_tokens=["<|image|>"], **keys)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    file = tmp_path / "a picture.png"
    file.write_bytes(file_of(16, 24))
    return file


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> list[StandInEncoder]:
    """Give each model that a command loads a stand-in encoder; return these."""
    encoders: list[StandInEncoder] = []
    load = api.load

    def loaded(*args: Any, **how: Any) -> hotset.Model:
        model = load(*args, **how)
        encoders.append(give_images(model))
        return model

    monkeypatch.setattr(api, "load", loaded)
    return encoders


RUN = ["--device", "cpu", "-t", "1", "--temp", "0", "-n", "4"]


def test_run_shows_the_model_images(path: Path, image: Path, seeing: list[StandInEncoder]):
    images = ["--image", image, "--image", image]
    found = json.loads(inside("run", path, "What is this?", *images, "--json", *RUN).stdout)
    with hotset.load(path, device="cpu", n_threads=1) as model:
        give_images(model)
        data = image.read_bytes()
        assert found["prompt_tokens"] == len(model.encode_chat([asks(data, data, "What is this?")]))
    assert [encoder.n_encoded for encoder in seeing[:1]] == [1]


def test_run_without_an_encoder_names_the_missing_file(path: Path, image: Path):
    done = hotset_command("run", path, "What is this?", "--image", image, *RUN, returns=2)
    assert "there is no projector next to tiny.gguf" in " ".join(done.stderr.split())


def test_run_raw_takes_no_image(path: Path, image: Path):
    done = inside("run", path, "a", "--raw", "--image", image, *RUN, returns=2)
    assert "--image" in done.stderr


def chat_of(model: hotset.Model) -> Chat:
    params = {"temperature": 0, "max_tokens": 4, "logit_bias": PRINTABLE}
    return Chat(model, None, raw=False, params=params)


def test_the_chat_shows_an_image_with_the_next_message(
    path: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with hotset.load(path, device="cpu", n_threads=1) as model:
        encoder, chat = give_images(model), chat_of(model)
        chat.handle(f"/image {image}")
        assert "96 tokens" in capsys.readouterr().err
        chat.handle("What is this?")
        chat.handle("And a question without one.")
        content = [{"type": "image", "path": str(image)}, {"type": "text", "text": "What is this?"}]
        assert chat.messages[0]["content"] == content
        assert chat.messages[2]["content"] == "And a question without one."
        assert encoder.n_encoded == 1
        chat.handle(f"/save {tmp_path / 'saved.json'}")
        assert json.loads((tmp_path / "saved.json").read_text())[0]["content"] == content


def test_the_chat_refuses_a_bad_image_at_once(path: Path, tmp_path: Path):
    with hotset.load(path, device="cpu", n_threads=1) as model:
        chat = chat_of(model)
        with pytest.raises(InvalidRequestError, match="no projector"):
            chat.handle(f"/image {path}")
        give_images(model)
        with pytest.raises(InvalidRequestError, match="there is no image"):
            chat.handle("/image nowhere.png")
        with pytest.raises(InvalidRequestError, match="no known format"):
            chat.handle(f"/image {path}")
        assert chat.images == []


def test_a_session_continues_after_an_image(path: Path, image: Path, tmp_path: Path):
    file, reused = tmp_path / "kept.session", []
    for question in ("What is this?", "Really?"):
        with hotset.load(path, device="cpu", n_threads=1) as model:
            give_images(model)
            session, chat = Session(model, file), chat_of(model)
            chat.messages = session.turns
            if not chat.messages:
                chat.handle(f"/image {image}")
            chat.handle(question)
            assert chat.last is not None
            reused.append(chat.last.timings.reused_tokens)
            session.save(chat.whole)
    assert reused[0] == 0
    assert reused[1] >= 64
