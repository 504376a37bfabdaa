"""PEFT's folders: a model with such an adapter equals transformers' model merged by PEFT's formula."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_adapters import give, scales_of, write_peft
from tiny_gguf import write_llama

from hotset.convert import peft
from hotset.convert.peft import open_peft_adapter
from hotset.errors import FormatError, HotsetError, ModelNotFoundError, UnsupportedModelError
from hotset.formats.gguf import open_gguf
from hotset.model.architectures import ARCHITECTURES
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.low_rank import adaptable

HEAD = "model.layers.0.self_attn.q_proj"
TOLERANCE = 1e-4  # share of the largest logit, as without adapters (transformers_oracle.py)


@pytest.mark.parametrize(
    ("name", "slora"),
    [
        ("llama-wide-heads", False),
        ("qwen2", True),
        ("phi3", False),
        ("gemma2", False),
        ("glm4", True),
        ("opt", True),
    ],
)
def test_logits_equal_transformers_with_the_adapter(
    tmp_path: Path, run_folder: Path, name: str, slora: bool
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import tiny_models
    from transformers_oracle import open_backend, relative_error, run

    rng, r, alpha = np.random.default_rng(1), 4, 10
    theirs = tiny_models.build(tiny_models.RECIPES[name])
    tensors: dict[str, np.ndarray] = {}
    scaling = alpha / (r**0.5 if slora else r)

    def adapt(path: str, module: Any) -> None:
        n_out, n_in = module.weight.shape
        a, b = rng.standard_normal((r, n_in)) / n_in**0.5, rng.standard_normal((n_out, r)) * 0.3
        tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"] = (
            matrix.astype(np.float32) for matrix in (a, b)
        )
        a_, b_ = (torch.tensor(matrix.astype(np.float32)) for matrix in (a, b))
        module.register_forward_hook(lambda _, x, y: y + (x[0] @ a_.T) @ b_.T * scaling)

    for path, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear) and "embed" not in path and path != "lm_head":
            adapt(path, module)
    folder = write_peft(tmp_path / "a", tensors, {"r": r, "lora_alpha": alpha, "use_rslora": slora})
    ids = rng.integers(0, tiny_models.VOCABULARY, 60)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)[None]).logits[0].numpy()
    with open_gguf(tiny_models.shared_gguf(name, run_folder)) as gguf:
        config = config_from_gguf(gguf)
        with open_peft_adapter(folder, config.architecture, config.head_dim) as file:
            file.check_model(gguf.architecture, adaptable(describe(config, gguf.tensors), gguf.tensors))
            adapter = file.read()
        assert adapter.nbytes == file.nbytes
        for backend_name in ("reference", "cpu"):
            backend = open_backend(backend_name, gguf)
            plain = run(backend, [ids], [[(0, 60)]])[0]
            give(backend, [adapter], scales_of(adapter))
            found = run(backend, [ids], [[(0, 50)], [(0, 10)]])[0]
            assert relative_error(found, expected) < TOLERANCE
            assert relative_error(plain, expected) > 0.05  # the adapter does something
            backend.close()


def tensors_of(module: str = HEAD) -> dict[str, np.ndarray]:
    a, b = np.ones((4, 64), np.float32), np.ones((128, 4), np.float32)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"self_attn.q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"v_proj": 2}}, 2.0),
        ({"alpha_pattern": {"q_proj": 4, "self_attn.q_proj": 2}}, 1.0),  # the first that matches counts
        ({"alpha_pattern": {"self_attn.q_proj": 2, "q_proj": 4}}, 0.5),
        ({"alpha_pattern": {"proj": 2, "f_attn.q_proj": 2}}, 2.0),  # whole names only
        ({"lora_alpha": 6, "r": 9}, 1.5),  # the matrices decide the rank (rank_pattern)
    ],
)
def test_factors(tmp_path: Path, config: dict[str, Any], factor: float) -> None:
    found = open_peft_adapter(write_peft(tmp_path / "a", tensors_of(), config), "llama", 32)
    assert found.read().pairs["blk.0.attn_q.weight"].factor == factor


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        ({"peft_type": "IA3"}, {}, UnsupportedModelError, "of the kind 'IA3'"),
        ({"use_dora": True}, {}, UnsupportedModelError, "use_dora True"),
        ({"bias": "all"}, {}, UnsupportedModelError, "bias 'all'"),
        ({"init_lora_weights": "pissa"}, {}, UnsupportedModelError, "init_lora_weights 'pissa'"),
        ({"alpha_pattern": {"(a+)+": 2}}, {}, UnsupportedModelError, "plain names"),
        ({"alpha_pattern": [1]}, {}, FormatError, "no object"),
        ({"alpha_pattern": {f"n{i}": 2 for i in range(5000)}}, {}, FormatError, "5000 patterns"),
        ({"alpha_pattern": {"v_proj": "8"}}, {}, FormatError, "no number"),
        ({"note": "x" * (1 << 20)}, {}, FormatError, "larger than"),
        (
            {},
            {f"{i}.lora_A.weight": np.ones((1, 1), np.float32) for i in range(1 << 13)},
            FormatError,
            "8194 tensors",
        ),
        ({"lora_alpha": "8"}, {}, FormatError, "no number"),
        ({"lora_alpha": True}, {}, FormatError, "no number"),
        ({}, {f"{HEAD}.lora_magnitude_vector": np.ones(4, np.float32)}, UnsupportedModelError, "magnitude"),
        (
            {},
            {"lm_head.modules_to_save.weight": np.ones((4, 4), np.float32)},
            UnsupportedModelError,
            "to_save",
        ),
        (
            {},
            tensors_of("model.layers.0.mlp.wide_proj"),
            UnsupportedModelError,
            "wide_proj, but adapters cannot change it",
        ),
        ({}, {f"{HEAD}.lora_A.weight": np.ones(4, np.float32)}, FormatError, "no matrix of floats"),
        ({}, {f"{HEAD}.lora_B.weight": np.ones((100, 4), np.float32)}, FormatError, "no whole heads of 32"),
        (
            {},
            {f"{HEAD}.lora_B.weight": np.ones((128, 5), np.float32)},
            FormatError,
            "with a rank that does not exceed the matrix",
        ),
        (
            {},
            {f"{HEAD}.lora_A.default.weight": np.ones((4, 64), np.float32)},
            FormatError,
            "two tensors for blk.0.attn_q.weight",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path,
    config: dict[str, Any],
    tensors: Mapping[str, np.ndarray],
    error: type[HotsetError],
    message: str,
) -> None:
    folder = write_peft(tmp_path / "a", {**tensors_of(), **tensors}, config)
    with pytest.raises(error, match=message):
        open_peft_adapter(folder, "llama", 32)


def test_the_header_of_an_adapter_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_peft(tmp_path / "a", tensors_of(), {})
    monkeypatch.setattr(peft, "HEADER_BYTES", 16)
    with pytest.raises(FormatError, match="header"):
        open_peft_adapter(folder, "llama", 32)


def test_a_client_that_leaves_ends_the_opening(tmp_path: Path) -> None:
    calls: list[None] = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        open_peft_adapter(write_peft(tmp_path / "a", tensors_of(), {}), "llama", 32, check)


def test_folders_that_are_not_complete(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "a", tensors_of())
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"holds no adapter_model\.safetensors"):
        open_peft_adapter(folder, "llama", 32)
    (folder / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(FormatError, match="not a JSON object"):
        open_peft_adapter(folder, "llama", 32)


@pytest.mark.parametrize("architecture", ["gpt2", "deepseek2", "minicpm", "falcon-h1"])
def test_models_that_a_conversion_changes_otherwise(tmp_path: Path, architecture: str) -> None:
    assert architecture in ARCHITECTURES
    with pytest.raises(UnsupportedModelError, match=f"not read for {architecture} models"):
        open_peft_adapter(write_peft(tmp_path / "a", tensors_of()), architecture, 32)


def test_damaged_folders_are_one_message(tmp_path: Path) -> None:
    gguf = open_gguf(write_llama(tmp_path / "model.gguf"))
    matrices = adaptable(describe(config_from_gguf(gguf), gguf.tensors), gguf.tensors)
    folder = write_peft(tmp_path / "a", tensors_of())
    files = [folder / "adapter_config.json", folder / "adapter_model.safetensors"]
    whole = {path: path.read_bytes() for path in files}
    rng, refused = np.random.default_rng(0), []
    for i in range(300):
        path = files[i % 2]
        damaged = bytearray(whole[path])
        for at in rng.integers(0, min(len(damaged), 300), rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            with open_peft_adapter(folder, "llama", 32) as file:
                file.check_model("llama", matrices)
                file.read()
        except HotsetError as error:
            refused.append(str(error))
        path.write_bytes(whole[path])
    assert len(refused) > 100
    assert not any("\n" in message for message in refused)
