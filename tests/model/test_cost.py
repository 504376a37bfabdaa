"""Bytes and FLOPs per token, compared with manual sums for a small llama with one windowed layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_gguf import write_llama, write_relu

from hotset.formats.gguf import TensorInfo, open_gguf
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.activation import SILU
from hotset.model.config import LayerConfig, ModelConfig, config_from_gguf
from hotset.model.cost import Cost
from hotset.model.decoder import describe
from hotset.model.operations import Rope
from hotset.model.predictor import Predictor

LAYER = LayerConfig(n_ff=96, activation=SILU, rope=Rope("norm", 32, (1.0,) * 16), attention_scale=1.0)
CONFIG = ModelConfig(
    "llama", layers=(LAYER, replace(LAYER, n_ff=128, window=16)), n_embd=64, n_head=4, n_head_kv=2,
    head_dim=32, head_dim_v=32, n_vocab=300, n_ctx_train=128, norm_eps=1e-5,
)  # fmt: skip


def tensors() -> dict[str, TensorInfo]:
    """Return a file with Q4_0 matrices, a Q8_0 embedding that is also the output, F32 norms and one bias."""
    infos: dict[str, TensorInfo] = {}

    def add(name: str, type: GGMLType, *shape: int) -> None:
        nbytes = row_bytes(type, shape[0]) * (shape[1] if len(shape) > 1 else 1)
        infos[name] = TensorInfo(name, shape, type, nbytes, 0)

    add("token_embd.weight", GGMLType.Q8_0, 64, 300)
    add("output_norm.weight", GGMLType.F32, 64)
    add("blk.0.attn_q.bias", GGMLType.F32, 128)
    for i, n_ff in enumerate(CONFIG.n_ff):
        for name, shape in {
            "attn_q": (64, 128), "attn_k": (64, 64), "attn_v": (64, 64), "attn_output": (128, 64),
            "ffn_gate": (64, n_ff), "ffn_up": (64, n_ff), "ffn_down": (n_ff, 64),
        }.items():  # fmt: skip
            add(f"blk.{i}.{name}.weight", GGMLType.Q4_0, *shape)
        add(f"blk.{i}.attn_norm.weight", GGMLType.F32, 64)
        add(f"blk.{i}.ffn_norm.weight", GGMLType.F32, 64)
    return infos


@pytest.fixture(scope="module")
def cost() -> Cost:
    return Cost(describe(CONFIG, tensors()), tensors())


def test_weight_bytes(cost: Cost) -> None:
    attention = 2 * (64 * 128 + 64 * 64 + 64 * 64 + 128 * 64)
    ffn = 3 * 64 * (96 + 128)
    embedding = 300 * 64 // 32 * 34
    assert cost.weight_bytes == {
        GGMLType.Q4_0: (attention + ffn) // 32 * 18,
        GGMLType.Q8_0: embedding + 64 // 32 * 34,  # the output matrix, and one row to embed the token
        GGMLType.F32: (5 * 64 + 128) * 4,
    }
    assert next(iter(cost.weight_bytes)) == GGMLType.Q4_0


def test_kv_bytes(cost: Cost) -> None:
    channels = 2 * 2 * (32 + 32)
    assert cost.kv_bytes_per_token("f32") == channels * 4
    assert cost.kv_bytes_per_token("f16") == channels * 2
    assert cost.kv_bytes_per_token("q8_0") == channels * 34 // 32
    assert cost.kv_bytes_per_token("q4_0") == channels * 18 // 32
    assert cost.kv_bytes_per_token("q8_0/q4_0") == channels // 2 * (34 + 18) // 32
    # At depth 99 the first layer attends to 100 tokens, the second to its window.
    assert cost.kv_bytes_read(99, "f16") == (100 + 16) * channels
    assert cost.kv_bytes_read(0, "f16") == 2 * channels


def test_bytes_per_token_share_weights_in_a_batch(cost: Cost) -> None:
    weights = sum(cost.weight_bytes.values())
    kv = cost.kv_bytes_read(50, "q8_0")
    assert cost.bytes_per_token(50, "q8_0") == weights + kv
    assert cost.bytes_per_token(50, "q8_0", batch=4) == weights / 4 + kv


def test_flops(cost: Cost) -> None:
    matrices = 2 * 24576 + 3 * 64 * 224 + 300 * 64
    attention = 4 * (32 + 32) * (100 + 16)
    assert cost.flops_per_token(99) == 2 * (matrices + attention)


def test_fused_and_transposed_products(tmp_path: Path) -> None:
    """Check Falcon with predictors: rows of a fused tensor, and all other tensors, are counted once."""
    with open_gguf(write_relu(tmp_path / "m.gguf", "falcon", type_of=lambda _: GGMLType.Q8_0)) as gguf:
        config = config_from_gguf(gguf)
        plain, embedding = describe(config, gguf.tensors), gguf.tensors["token_embd.weight"]
        predicted = describe(config, gguf.tensors, Predictor("mlp", (0.0, 0.0)))
        fc = {name: info.nbytes for name, info in gguf.tensors.items() if ".fc" in name}
        total = sum(info.nbytes for info in gguf.tensors.values())
        total += sum(
            4 * 2 * config.n_embd for _ in range(config.n_layer)
        )  # a norm is read twice (decoder.py)
        expected = total - embedding.nbytes + embedding.nbytes // config.n_vocab
        assert Cost(predicted, gguf.tensors).bytes_per_token(-1, "f16") == expected
        assert Cost(plain, gguf.tensors).bytes_per_token(-1, "f16") == expected - sum(fc.values())
        dense_flops = Cost(plain, gguf.tensors).flops_per_token(9)
        of_predictors = 2 * (64 + 96) * (32 + 64)  # n_embd and n_ff, times the ranks of both layers
        assert Cost(predicted, gguf.tensors).flops_per_token(9) == dense_flops + of_predictors


def test_experts_count_as_far_as_a_token_has_them(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "m.gguf", experts=(8, 3), biased=True, n_ff_shared=64, type_of=lambda _: GGMLType.Q8_0
    )
    with open_gguf(path) as gguf:
        cost = Cost(describe(config_from_gguf(gguf), gguf.tensors), gguf.tensors)
        of_experts = sum(info.nbytes for name, info in gguf.tensors.items() if "_exps." in name)
        embedding = gguf.tensors["token_embd.weight"].nbytes
        rest = sum(info.nbytes for info in gguf.tensors.values()) - of_experts
        assert cost.token_cycle == of_experts * 3 // 8
        assert sum(cost.weight_bytes.values()) == rest - embedding + embedding // 96 + of_experts * 3 // 8
        attention, ffn = 64 * (128 + 64 + 64 + 128), 3 * 64 * (3 * 96 + 64)
        assert cost.active_parameters == 2 * (attention + ffn + 8 * 64) + 96 * 64


def test_planes_count_codes_and_scales(tmp_path: Path) -> None:
    with open_gguf(write_relu(tmp_path / "m.gguf", dialect="gguf")) as gguf:
        tensors = {name: info for name, info in gguf.tensors.items() if "ffn_down" not in name}
        for i in range(2):
            for name, type_, shape in (("codes", GGMLType.I8, (32, 96)), ("scales", GGMLType.F16, (64, 3))):
                name = f"blk.{i}.ffn_down_t.{name}"
                tensors[name] = TensorInfo(name, shape, type_, row_bytes(type_, shape[0]) * shape[1], 0)
        bytes_of = Cost(describe(config_from_gguf(gguf), tensors), tensors).weight_bytes
    assert bytes_of[GGMLType.I8] == 2 * 32 * 96
    assert bytes_of[GGMLType.F16] == 2 * 64 * 3 * 2
