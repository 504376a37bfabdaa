"""The capabilities of the Vulkan backend."""

from __future__ import annotations

from hotset.backends.registry import Capabilities
from hotset.errors import UnsupportedModelError
from hotset.formats.quants import GGMLType as T
from hotset.model import operations as ops

CAPABILITIES = Capabilities(
    title="a Vulkan device",
    operations=(
        ops.Embed, ops.NgramEmbed, ops.PositionGain, ops.RMSNorm, ops.UnitNorm, ops.LayerNorm, ops.Linear,
        ops.Rotate,
        ops.Attention, ops.Activate, ops.Multiply, ops.Add, ops.Scale, ops.SoftCap, ops.Mask, ops.Threshold,
        ops.Route, ops.ExpertLinear, ops.ExpertSum, ops.SelectOutputs, ops.TransposedLinear, ops.Heads,
        ops.TransposedHeads, ops.ShortConv, ops.DeltaNet, ops.SelectiveScan, ops.ChannelScan, ops.Wkv,
        ops.HeadDot, ops.GaussianTopK, ops.AddStreams, ops.MatchMagnitude, ops.LowRank, ops.SimilarityGate,
    ),
    tensor_types=(
        T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K, T.MXFP4,
    ),
    kv_types=("f32", "f16", "q8_0"),
    adapters=True, speculation=True, prompt_cache=True, neuron_split=True, expert_cache=True,
    images=True, timings=True,
    state="tested on a software driver; an older version was measured on an NVIDIA H100; never run on AMD, "
    "Apple or Intel GPUs",
    determinism="the same bits for any batch, chunk and driver; quantised products, norms and attention have "
    "the CPU's bits",
)  # fmt: skip


def refused(where: str, what: str, *, or_auto: bool = False) -> UnsupportedModelError:
    """Return the error for a part of a model without a kernel. or_auto: --device auto computes the others."""
    auto = ", or use device='auto', and it computes these layers" if or_auto else ""
    return UnsupportedModelError(
        f"{where}: no Vulkan kernel computes {what} yet; leave `device` out, and the CPU computes this model"
        f"{auto}"
    )
