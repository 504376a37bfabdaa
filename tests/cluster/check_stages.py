"""A model split over the nodes of a cluster: the same text as on one machine, and a machine that dies."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from byte_models import write_model
from conftest import Nodes

import hotset
from hotset.errors import DeviceError, InvalidRequestError
from hotset.scale.links import Line
from hotset.scale.stages import StagedBackend, load_staged
from hotset.settings import LoadSettings

SETTINGS = LoadSettings(n_ctx=256, n_threads=1, max_batch=64, max_sequences=16, n_seqs=8, device="cpu")
PROMPTS = [f"{i} is a prompt of its own, " * (1 + i % 5) for i in range(16)]
PARAMS = {"max_tokens": 40, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layer=3)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[str]:
    with hotset.load(path, SETTINGS) as model:
        return [answer.text for answer in model.generate_many(PROMPTS, **PARAMS)]


@pytest.mark.parametrize("stages", ["a:3", "a:1,b:2", "a:1,b:1,c:1", "auto"])
def test_the_text_of_one_machine(path: Path, expected: list[str], nodes: Nodes, stages: str):
    with load_staged(str(path), SETTINGS, stages, nodes.address) as model:
        answers = model.generate_many(PROMPTS, **PARAMS)
        assert [answer.text for answer in answers] == expected
        assert model.generate(PROMPTS[3], **PARAMS).text == expected[3]
        assert len(model.backend.notes) == (stages.count(",") + 1)


def test_stages_that_are_not_there(path: Path, nodes: Nodes, tmp_path: Path):
    with pytest.raises(DeviceError, match="no machine of the cluster is called 'nowhere'; it has a, b, c"):
        load_staged(str(path), SETTINGS, "a:1,nowhere:2", nodes.address)
    with pytest.raises(InvalidRequestError, match="the stages have 2 layers together, and the model has 3"):
        load_staged(str(path), SETTINGS, "a:1,b:1", nodes.address)


def test_strangers_and_an_invalid_message_cost_no_answer(
    path: Path,
    expected: list[str],
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    strangers: list[socket.socket] = []

    class Beset(Line):
        def connect(self, first: str) -> None:
            for i in range(200):
                for address in (first, self.address):
                    host, _, port = address.removeprefix("tcp://").rpartition(":")
                    strangers.append(socket.create_connection((host, int(port))))
                    strangers[-1].sendall(b"\x80\4junk" * (i % 2 * 100))
            super().connect(first)

    monkeypatch.setattr("hotset.scale.stages.Line", Beset)
    with load_staged(str(path), SETTINGS, "a:1,b:2", nodes.address) as model:
        assert len(strangers) == 400
        assert model.generate(PROMPTS[3], **PARAMS).text == expected[3]
        assert isinstance(model.backend, StagedBackend)
        line: Any = model.backend._line
        line._enters._socket.send(b"\x80\4")
        answers = model.generate_many(PROMPTS, **PARAMS)
        assert [answer.text for answer in answers] == expected
        assert len(strangers) == 800  # another line
    said = "the line of the stages broke (on a: a message of a neighbour is invalid)"
    assert [record.message for record in caplog.records if said in record.message]
    for tcp in strangers:
        tcp.close()


def test_stages_that_do_not_find_one_another(path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    class Lost(Line):
        def connect(self, first: str) -> None:
            super().connect("tcp://127.0.0.1:1")

    monkeypatch.setattr("hotset.scale.stages.Line", Lost)
    with pytest.raises(DeviceError, match=r"the stages did not find one another \(.* cannot be reached\)"):
        load_staged(str(path), SETTINGS, "a:1,b:2", nodes.address)


def test_a_machine_that_dies_in_mid_load_costs_time_and_no_answer(
    path: Path, expected: list[str], nodes: Nodes
):
    for _ in range(10):  # it may die between two steps, when no sequence is running
        if lose_a_machine(path, expected, nodes):
            return
    pytest.fail("the machine died between two steps ten times")


def lose_a_machine(path: Path, expected: list[str], nodes: Nodes) -> int:
    """Return the sequences that ran when it died. All must get the expected text."""
    with load_staged(str(path), SETTINGS, "a:1,b:1,c:1", nodes.address) as model:
        rounds: list[list[str]] = []
        is_killed = threading.Event()

        def ask() -> None:  # repeatedly, since steps are quicker than the death of a machine
            while True:
                was_killed = is_killed.is_set()
                rounds.append([one.text for one in model.generate_many(PROMPTS, **PARAMS)])
                if was_killed:
                    return

        work = threading.Thread(target=ask)
        work.start()
        while model.engine.counters().generated_tokens < 40:
            time.sleep(0.01)
        nodes.kill("c")
        is_killed.set()
        work.join(120)
        assert not work.is_alive()
        assert all(found == expected for found in rounds)
        n_lost = model.engine.counters().preemptions
    nodes.add("c")
    return n_lost
