"""xIELU, an activation with different parameters in each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sparse_runs import assert_every_value_is_right, prepared
from torch_graphs import same_as_reference

from hotset.backends.reference import xielu
from hotset.errors import FormatError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.operations import XIELU

torch = pytest.importorskip("torch")
tiny_models = pytest.importorskip("tiny_models")


@pytest.fixture
def apertus(run_folder: Path) -> GGUFFile:
    return open_gguf(tiny_models.shared_gguf("apertus", run_folder))


def test_every_operation_is_the_references(apertus: GGUFFile) -> None:
    assert_every_value_is_right(apertus, "dense")


def test_torch_computes_it(apertus: GGUFFile) -> None:
    same_as_reference(apertus)


@pytest.mark.backend("triton")
def test_a_device_refuses_it(apertus: GGUFFile) -> None:
    from gpu_runs import gpu

    ready, graph = prepared(apertus, "dense")
    with pytest.raises(UnsupportedModelError, match="xIELU is computed on the CPU; use device='cpu'"):
        gpu(ready.weights, graph)


def test_it_equals_transformers() -> None:
    from transformers.activations import XIELUActivation

    theirs = XIELUActivation(0.7, 1.4, beta=0.6, eps=-1e-3, dtype=torch.float32)
    x = np.array([-30, -4, -1e-3, -1e-4, -0.0, 0, 1e-9, 0.3, 7], np.float32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(xielu(x, XIELU(0.7, 1.4, 0.6, -1e-3)), expected, rtol=1e-5, atol=1e-9)


def test_numbers_differ_between_layers_or_are_one_for_all(apertus: GGUFFile) -> None:
    found = {layer.activation.xielu for layer in config_from_gguf(apertus).layers}
    assert len(found) == 3
    apertus.metadata["xielu.alpha_p"] = 0.5
    first = config_from_gguf(apertus).layers[0].activation.xielu
    assert first is not None
    assert first.positive == pytest.approx(np.log1p(np.exp(0.5)))


@pytest.mark.parametrize("value", [None, [0.5], [0.5, "a", 0.5], [0.5, float("nan"), 0.5], 1e9, True])
def test_numbers_that_make_no_sense(apertus: GGUFFile, value: Any) -> None:
    apertus.metadata["xielu.alpha_n"] = value
    with pytest.raises(FormatError, match=r"xielu\.alpha_n"):
        config_from_gguf(apertus)
