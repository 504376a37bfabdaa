"""The capabilities of the backend for PyTorch devices."""

from __future__ import annotations

from hotset.backends.registry import Capabilities
from hotset.errors import UnsupportedModelError
from hotset.formats.quants import GGMLType as T
from hotset.load_parameters import KVType
from hotset.model import operations as ops

CAPABILITIES = Capabilities(
    title="a GPU through PyTorch",
    operations=(
        ops.Embed, ops.RMSNorm, ops.LayerNorm, ops.Linear, ops.Rotate, ops.Attention, ops.Activate,
        ops.Multiply, ops.Add, ops.Scale, ops.SoftCap, ops.Mask, ops.Threshold, ops.Route, ops.ExpertLinear,
        ops.ExpertSum, ops.SelectOutputs, ops.TransposedLinear, ops.GaussianTopK, ops.PositionGain,
    ),
    tensor_types=(T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q6_K),
    kv_types=("f32", "f16"),
    neuron_split=True, expert_cache=True, sparse_ffn=True, thresholds=True, images=True,
    ram_budget=True, unasked=True,
    cards=True,
    state="measured on an NVIDIA H100; never run on another NVIDIA card, nor on AMD, Apple or Intel GPUs",
    determinism="the same bits in each run; they depend on the number of tokens in a step",
)  # fmt: skip


def check_cache(kv_type: KVType) -> None:
    """Raise UnsupportedModelError if the attention kernels cannot read this type of KV cache."""
    if kv_type not in CAPABILITIES.kv_types:
        raise UnsupportedModelError(f"a {kv_type} cache runs on the CPU only: use f16, or use device='cpu'")
