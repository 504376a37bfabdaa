"""Autotuning of workgroup shapes for Vulkan devices: measured once, stored, limited in time, and turned off.

Measurements and the clock are fake, so no device is needed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotset.backends.vulkan import autotune
from hotset.backends.vulkan.devices import VulkanInfo
from hotset.backends.vulkan.shapes import (
    CANDIDATES,
    DeviceShapes,
    ProductShapes,
    WorkgroupShape,
    default_shapes,
)
from hotset.backends.vulkan.weights import COMPUTED, FLOATS
from hotset.errors import OutOfMemoryError
from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.graph import Graph
from hotset.model.operations import Embed, Linear, SelectOutputs
from hotset.reporter import Reporter

AMD, INTEL, NVIDIA = 0x1002, 0x8086, 0x10DE
CARD = VulkanInfo(0, "a card", "discrete", "1.2.3", "1.3", 8 << 30, 8 << 30, "", ["timestamps"], 32, NVIDIA)
Q4, Q6, Q8 = GGMLType.Q4_0, GGMLType.Q6_K, GGMLType.Q8_0
WISHED = ProductShapes(
    WorkgroupShape(8, 8), WorkgroupShape(4, 16), WorkgroupShape(16, 8), WorkgroupShape(8, 16), 24, 8, 4
)


class Made:
    """Fake seconds of steps: each field of WISHED is faster. clock: advances 0.1 with each step."""

    def __init__(self, wished: ProductShapes = WISHED, gain: float = 0.5) -> None:
        self.wished, self.gain, self.now = wished, gain, 0.0
        self.steps: list[tuple[GGMLType, str]] = []

    def clock(self) -> float:
        return self.now

    @contextlib.contextmanager
    def measuring(self, type_: GGMLType) -> Iterator[autotune.Measure]:
        def seconds_of(shapes: ProductShapes, name: str) -> float:
            self.steps.append((type_, name))
            self.now += 0.1
            return self.gain if getattr(shapes, name) == getattr(self.wished, name) else 1.0

        yield seconds_of

    def tuned(
        self, path: Path, *types: GGMLType, info: VulkanInfo = CARD, progress: Any = None
    ) -> DeviceShapes:
        never: Any = None
        return autotune.tuned(
            info, never, types or (Q4,), progress=progress, path=path, measuring=self.measuring,
            clock=self.clock,
        )  # fmt: skip


class Said(Reporter):
    """The lines that a load reports."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(autotune, "SECONDS", 1e6)
    return tmp_path / "machine.json"


def test_the_fastest_is_kept(kept: Path) -> None:
    """Measure every candidate once. The next load measures nothing, or only another type of weights."""
    first = Made()
    assert first.tuned(kept).of(Q4) == WISHED
    assert len(first.steps) == sum(map(len, CANDIDATES.values()))
    again = Made(ProductShapes())
    assert again.tuned(kept).of(Q4) == WISHED
    assert not again.steps
    shapes = again.tuned(kept, Q4, Q8)
    assert {type_ for type_, _ in again.steps} == {Q8}
    assert (shapes.of(Q4), shapes.of(Q8), shapes.of(Q6)) == (WISHED, ProductShapes(), ProductShapes())
    assert autotune.known_shapes(CARD, kept) == shapes


@pytest.mark.parametrize("facts", [{"driver": "1.2.4"}, {"name": "another card"}, {"api": "1.4"}])
def test_another_driver_is_measured_again(kept: Path, facts: dict[str, Any]) -> None:
    Made().tuned(kept)
    other = replace(CARD, **facts)
    assert autotune.known_shapes(other, kept).of(Q4) == ProductShapes()
    second = Made(replace(WISHED, most_few=4))
    assert second.tuned(kept, info=other).of(Q4).most_few == 4
    assert second.steps
    assert autotune.known_shapes(CARD, kept).of(Q4) == WISHED


@pytest.mark.parametrize(
    "damaged",
    [7, {}, {"one": [64, 4]}, {"one": "16"}, {"most_few": 1000}, {"ahead": 3}, {"one": [16]}],
    ids=str,
)
def test_damaged_measurement_is_repeated(kept: Path, damaged: Any) -> None:
    Made().tuned(kept)
    found = json.loads(kept.read_text())
    [(key, own)] = found.items()
    kept.write_text(json.dumps({key: {**own, **damaged} if damaged and damaged != 7 else damaged}))
    assert autotune.known_shapes(CARD, kept).tuned == {}
    again = Made()
    assert again.tuned(kept).of(Q4) == WISHED
    assert again.steps


def test_noise_changes_nothing(kept: Path) -> None:
    """Check that a candidate hardly faster than the default does not replace it."""
    assert Made(gain=0.99).tuned(kept).of(Q4) == ProductShapes()


def test_measuring_is_bounded(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the time limit for all types of a load.

    Unmeasured fields keep their defaults. A type whose measurement began is not measured again, but the next
    type is.
    """
    monkeypatch.setattr(autotune, "SECONDS", 1.05)
    made = Made()
    shapes = made.tuned(kept, Q4, Q6)
    assert len(made.steps) == 11
    assert shapes.of(Q4) == replace(ProductShapes(), one=WISHED.one, ahead=WISHED.ahead)
    assert Q6 not in shapes.tuned
    again = Made()
    assert again.tuned(kept, Q4, Q6).of(Q6).one == WISHED.one
    assert {type_ for type_, _ in again.steps} == {Q6}


def test_it_is_turned_off(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that nothing is measured then, and that earlier measurements are not used."""
    Made().tuned(kept)
    monkeypatch.setenv("HOTSET_AUTOTUNE", "0")
    made = Made()
    assert made.tuned(kept, Q4, Q8) == autotune.known_shapes(CARD, kept) == DeviceShapes(ProductShapes())
    assert not made.steps
    assert autotune.why_untuned(CARD) == "HOTSET_AUTOTUNE=0"
    monkeypatch.setenv("HOTSET_AUTOTUNE", "1")
    assert made.tuned(kept).of(Q4) == WISHED


def test_software_drivers_are_not_tuned(kept: Path) -> None:
    made = Made()
    assert made.tuned(kept, info=replace(CARD, kind="software")).of(Q4) == ProductShapes()
    assert not made.steps
    assert not kept.exists()


def test_devices_without_timestamps_are_not_tuned(kept: Path) -> None:
    """Check that the load neither allocates matrices nor says that it measures."""
    made, info, said = Made(), replace(CARD, features=[]), Said()
    assert made.tuned(kept, info=info, progress=said).of(Q4) == ProductShapes()
    assert autotune.why_untuned(info) == "no timestamps"
    assert not made.steps
    assert not said.lines
    made.tuned(kept, progress=said)
    assert said.lines == ["Measuring workgroups of a card (Vulkan), once."]


def test_no_memory_to_measure_in(kept: Path) -> None:
    """Check that the defaults are used, and that the next load tries again."""

    class Full(Made):
        @contextlib.contextmanager
        def measuring(self, type_: GGMLType) -> Iterator[autotune.Measure]:
            if type_ == Q4:
                raise OutOfMemoryError("no room")
            with super().measuring(type_) as seconds_of:
                yield seconds_of

    shapes = Full().tuned(kept, Q4, Q8)
    assert (shapes.of(Q4), shapes.of(Q8)) == (ProductShapes(), WISHED)
    assert Made().tuned(kept).of(Q4) == WISHED


def test_a_table_replaces_measurements(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the file of one machine as the table of others, for any driver; own measurements come first."""
    Made().tuned(kept)
    monkeypatch.setattr(autotune, "TABLES", tmp_path / "tables")
    table = autotune.file_of(CARD, autotune.TABLES)
    assert table.name == "a-card.json"
    table.parent.mkdir()
    table.write_bytes(kept.read_bytes())
    other, own, made = replace(CARD, driver="9.9"), tmp_path / "own.json", Made(ProductShapes())
    assert made.tuned(own, info=other).of(Q4) == WISHED
    assert not made.steps
    assert made.tuned(own, Q8, info=other).of(Q8) == ProductShapes()
    table.write_text("{")
    Made(replace(WISHED, ahead=2)).tuned(own, info=other)
    table.write_bytes(kept.read_bytes())
    assert autotune.known_shapes(other, own).of(Q4).ahead == 2
    assert autotune.known_shapes(replace(other, name="another card"), own).tuned == {}


@pytest.mark.parametrize("type_", [type_ for type_ in COMPUTED if type_ not in FLOATS], ids=lambda t: t.name)
def test_a_measured_step_reads_more_than_caches_hold(type_: GGMLType) -> None:
    n_bytes = autotune.n_large(type_) * row_bytes(type_, autotune.WIDTH) * 4 * autotune.WIDTH
    assert 3 * autotune.CACHE_BYTES <= n_bytes < 4 * autotune.CACHE_BYTES


def test_defaults() -> None:
    """Check the defaults by vendor and subgroup: all are candidates, and the kernel supports the shapes."""
    for vendor, subgroup in ((AMD, 64), (AMD, 32), (INTEL, 8), (INTEL, 32), (NVIDIA, 32), (0x10005, 8)):
        default = default_shapes(replace(CARD, vendor=vendor, subgroup=subgroup))
        is_known = vendor == INTEL or subgroup == 64
        assert (default != ProductShapes()) == is_known
        for name, candidates in CANDIDATES.items():
            assert getattr(default, name) in candidates
        if subgroup == 64:
            assert default.one.rows * default.one.lanes == subgroup
    for rows, lanes in CANDIDATES["one"]:  # limits of rounded_few.comp
        assert 32 % rows == 0
        assert lanes in (8, 16)
        assert rows * lanes <= 256  # the least that hotset requires of a device
    shapes = ProductShapes(*CANDIDATES["one"][:4])
    places = [(1, 100), (1, 16384), (4, 100), (4, 16384)]
    assert [shapes.of(*place) for place in places] == list(CANDIDATES["one"][:4])


def test_types_of_products() -> None:
    """Check that the types of quantised matrices are sorted by bytes, most first."""
    graph, tensors = Graph(), {}
    x = graph.add(Embed(graph.value("x", 256), "embedding"))
    for i, type_ in enumerate((Q8, GGMLType.F16, Q4, Q4, Q4)):
        tensors[f"{i}"] = TensorInfo(f"{i}", (256, 8), type_, 8 * 16 * (9 if type_ == Q4 else 17), 0)
        x = graph.add(Linear(graph.value(f"{i}", 256), x, f"{i}"))
    graph.add(SelectOutputs(graph.value("logits", 256), x))
    assert autotune.product_types(graph, tensors) == [Q4, Q8]
