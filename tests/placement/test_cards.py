"""Plans for GPUs that are not in this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from byte_models import write_sparse
from cli_runs import inside
from tiny_gguf import write_llama

from hotset.errors import InvalidRequestError
from hotset.placement import machine
from hotset.placement.cards import CARDS, DEFAULT, find_card

pytest.importorskip("hotset._core", reason="the native module is not built")
pytestmark = pytest.mark.backend("triton")  # the backend that plans for cards


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model, and simulate a machine without a GPU and with known CPU rates."""
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(
        machine, "cpu_rates", lambda n_threads, progress: {"read": 20e9, "gather": 12e9, "many": 1e11}
    )
    return write_sparse(tmp_path / "model.gguf", dialect="gguf")


def planned(*arguments: object) -> dict[str, Any]:
    done = inside("plan", *arguments, "--json")
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_a_card_is_found_as_people_write_it() -> None:
    for card in CARDS:
        for name in (
            card.name,
            card.name.lower(),
            card.name.replace(" ", "-"),
            f"NVIDIA GeForce {card.name}",
        ):
            assert find_card(name) is card
    assert find_card("4090") is find_card("rtx4090") is find_card("RTX 4090")
    assert find_card("4060 ti").name == "RTX 4060 Ti"
    assert len({card.name for card in CARDS}) == len(CARDS)
    assert DEFAULT in {card.name for card in CARDS}


@pytest.mark.parametrize(
    ("name", "meant"), [("RTX 4900", "RTX 4090"), ("", "it has"), ("GTX", "gpu_bandwidth")]
)
def test_a_card_that_is_unknown_is_not_guessed(name: str, meant: str) -> None:
    with pytest.raises(InvalidRequestError, match=meant):
        find_card(name)


def test_a_plan_for_a_named_card_needs_no_gpu(model: Path) -> None:
    facts = planned(model, "--gpu", "GeForce RTX 4090", "--vram-budget", 8)
    (device,) = facts["devices"]
    assert device["device"] == "RTX 4090"
    assert device["limit"] == 8 * 2**30
    assert any("RTX 4090 (24 GiB, 1008 GB/s" in note for note in facts["notes"])
    whole = planned(model, "--gpu", "4090")["devices"][0]["limit"]
    assert 23 * 2**30 < whole < 24 * 2**30  # without a budget: the card's memory


def test_a_budget_without_a_gpu_is_planned_for_a_stated_card(model: Path) -> None:
    done = inside("plan", model, "--vram-budget", 8)
    assert (
        f"There is no GPU here: this is a plan for an {DEFAULT}. Name another GPU with --gpu." in done.stderr
    )
    assert "RTX 4090" in done.stdout


@pytest.mark.usefixtures("model")
def test_plan_for_a_card_with_a_ram_budget(tmp_path: Path) -> None:
    """Check that the plan counts the CPU's workspace, although the card is not here."""
    experts = write_llama(tmp_path / "experts.gguf", experts=(4, 2))
    facts = planned(experts, "--gpu", "4090", "--ram-budget", 4)
    assert facts["ram"]["total"] <= facts["ram"]["limit"]
    assert facts["devices"][0]["device"] == "RTX 4090"


def test_a_faster_card_is_planned_to_be_faster(model: Path) -> None:
    seconds = [
        planned(model, "--gpu-bandwidth", rate, "--vram-budget", 8)["predicted_seconds"]
        for rate in (100, 400, 1600)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]
    own = planned(model, "--gpu", "4090", "--gpu-bandwidth", 100, "--gpu-link", 4, "--vram-budget", 8)
    assert own["predicted_seconds"] == pytest.approx(seconds[0])


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--gpu", "4090", "--vram-budget", 25), 1, "more than the 24 GiB of the RTX 4090"),
        (("--gpu", "4091"), 2, "did you mean"),
        (("--gpu-bandwidth", 500), 2, "--vram-budget"),
        (("--gpu-bandwidth", 0, "--vram-budget", 8), 2, "above 0"),
        (("--gpu-bandwidth", "nan", "--vram-budget", 8), 2, "a finite number"),
        (("--gpu-link", 5), 2, "--gpu-bandwidth"),
        (("--gpu", "4090", "--device", "simulated"), 2, "--gpu cannot be combined with --device"),
        (("--gpu", "4090", "--sparsity", "threshold"), 2, "measured on itself"),
    ],
)
def test_impossible_plans_are_refused(model: Path, options: tuple[object, ...], code: int, said: str) -> None:
    done = inside("plan", model, *options, returns=None)
    assert done.returncode == code, done.stdout
    assert said in " ".join(done.stderr.replace("│", " ").split())


def test_the_processor_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotset.backends.triton import measuring

    monkeypatch.setenv("HOTSET_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "N_FF", 64)
    monkeypatch.setattr(machine, "WIDTH", 64)
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    card = find_card(DEFAULT)
    first = measuring.estimate(card, n_threads=1)
    monkeypatch.delattr(machine, "CpuLoop")
    assert measuring.estimate(card, n_threads=1) == first
    assert first.read == pytest.approx(0.85 * 1008e9)
    assert 0 < first.cpu_read_link < first.cpu_read_busy < first.cpu_read


def test_a_plan_of_neurons_needs_no_torch(model: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from hotset.placement import machine\n"
        "machine.cpu_rates = lambda *a: {'read': 2e10, 'gather': 1e10, 'many': 1e11}\n"
        "from hotset.cli.main import app\n"
        f"app(['plan', {str(model)!r}, '--gpu', '4090'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
