"""Image encoders of checkpoints as llama.cpp's mmproj files: keys, names, types, and odd checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import inside
from safetensors.torch import load_file, save_file

from hotset.convert.hf import convert_hf
from hotset.convert.projector import convert_projector
from hotset.errors import FormatError, HotsetError, UnsupportedModelError
from hotset.formats.gguf import open_gguf

tiny_vision = pytest.importorskip("tiny_vision")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from tiny_vision import RECIPES, save_checkpoint  # noqa: E402


@pytest.fixture(params=RECIPES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_checkpoint(RECIPES[request.param], tmp_path / request.param)
    return tmp_path / str(request.param)


@pytest.fixture
def smol(tmp_path: Path) -> Path:
    save_checkpoint(RECIPES["idefics3"], tmp_path / "smol")
    return tmp_path / "smol"


def changed(folder: Path, name: str, **entries: Any) -> None:
    """Change entries of a JSON file of a checkpoint; None removes one."""
    path = folder / name
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_keys_and_names_are_llama_cpps(smol: Path, tmp_path: Path) -> None:
    """Compare with the file of llama.cpp's convert_hf_to_gguf.py --mmproj for the same checkpoint."""
    convert_projector(smol, tmp_path / "mmproj.gguf", "f16")
    with open_gguf(tmp_path / "mmproj.gguf") as gguf:
        keys = {
            key.removeprefix("clip."): value for key, value in gguf.metadata.items() if key[:5] == "clip."
        }
        arrays = {key: keys.pop(key).tolist() for key in ("vision.image_mean", "vision.image_std")}
        layer = {name[8:]: info for name, info in gguf.tensors.items() if name.startswith("v.blk.0.")}
        others = {name: info for name, info in gguf.tensors.items() if not name.startswith("v.blk.")}
        assert gguf.metadata["general.type"] == "mmproj"
        assert gguf.metadata["general.file_type"] == 1
    eps = keys.pop("vision.attention.layer_norm_epsilon")
    assert eps == pytest.approx(1e-6)
    assert keys == {
        "has_vision_encoder": True, "projector_type": "idefics3", "use_gelu": True,
        "vision.projection_dim": 24, "vision.image_size": 32, "vision.patch_size": 8,
        "vision.embedding_length": 48, "vision.feed_forward_length": 72, "vision.block_count": 2,
        "vision.attention.head_count": 3, "vision.projector.scale_factor": 2,
        "vision.preproc_image_size": 96,
    }  # fmt: skip
    assert arrays == {"vision.image_mean": [0.5] * 3, "vision.image_std": [0.5] * 3}
    assert {name: (info.shape, info.type.name) for name, info in others.items()} == {
        "v.patch_embd.weight": ((8, 8, 3, 48), "F32"), "v.patch_embd.bias": ((48,), "F32"),
        "v.position_embd.weight": ((48, 16), "F32"), "v.post_ln.weight": ((48,), "F32"),
        "v.post_ln.bias": ((48,), "F32"), "mm.model.fc.weight": ((192, 24), "F16"),
    }  # fmt: skip
    matrices = {name.removesuffix(".weight"): info for name, info in layer.items() if len(info.shape) == 2}
    assert {name: info.shape for name, info in matrices.items()} == {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (48, 48)),
        "ffn_up": (48, 72), "ffn_down": (72, 48),
    }  # fmt: skip
    assert {info.type.name for info in matrices.values()} == {"F16"}
    assert {name for name in layer if name.startswith("ln")} == {
        f"{norm}.{kind}" for norm in ("ln1", "ln2") for kind in ("weight", "bias")
    }


def test_older_names_give_the_same_file(folder: Path, tmp_path: Path) -> None:
    """Convert a checkpoint with the names of transformers 4, as most published ones have."""
    convert_projector(folder, tmp_path / "new.gguf", "f32")
    tensors = load_file(folder / "model.safetensors")
    old = {}
    for name, values in tensors.items():
        name = name.removeprefix("model.")
        if name.startswith("vision_tower.") and folder.name == "gemma3":
            name = name.replace("vision_tower.", "vision_tower.vision_model.").replace(
                "vision_model.vision_model", "vision_model"
            )
        old[name] = values
    save_file(old, folder / "model.safetensors")
    convert_projector(folder, tmp_path / "old.gguf", "f32")
    assert (tmp_path / "new.gguf").read_bytes() == (tmp_path / "old.gguf").read_bytes()


def test_pixtral_has_the_embedding_of_its_break(tmp_path: Path) -> None:
    save_checkpoint(RECIPES["pixtral"], tmp_path / "model")
    convert_projector(tmp_path / "model", tmp_path / "mmproj.gguf", "q8_0")
    tensors = load_file(tmp_path / "model/model.safetensors")
    (embedding,) = (values for name, values in tensors.items() if name.endswith("embed_tokens.weight"))
    with open_gguf(tmp_path / "mmproj.gguf") as gguf:
        row = gguf.data("v.token_embd.img_break").view(np.float32)
        assert np.array_equal(row, embedding[7].numpy())
        assert gguf.tensors["mm.patch_merger.weight"].type.name == "F32"
        assert gguf.tensors["mm.2.weight"].type.name == "F16"  # its rows are not whole blocks


@pytest.mark.parametrize(
    ("file", "entries", "error"),
    [
        (
            "config.json",
            {"architectures": ["BlipModel"]},
            "architecture 'BlipModel' in config.json is not supported",
        ),
        ("config.json", {"architectures": None}, "architecture None in config.json is not supported"),
        ("config.json", {"vision_config": None}, "has no vision_config"),
        ("config.json", {"scale_factor": 3}, "no multiple of 24 pixels of a token"),
        ("config.json", {"scale_factor": "2"}, "scale_factor in config.json must be a number"),
        ("preprocessor_config.json", {"resample": 3}, "filter is BICUBIC, and only LANCZOS is supported"),
        ("preprocessor_config.json", {"do_normalize": False}, "with do_normalize off is not supported"),
        ("preprocessor_config.json", {"image_mean": [0.5]}, "image_mean of the image processor must hold"),
        (
            "preprocessor_config.json",
            {"max_image_size": {"longest_edge": 64}},
            "tiles of 64 pixels for an encoder",
        ),
    ],
)
def test_odd_settings_are_refused(
    file: str, entries: dict[str, Any], error: str, smol: Path, tmp_path: Path
) -> None:
    changed(smol, file, **entries)
    with pytest.raises(HotsetError, match=error):
        convert_projector(smol, tmp_path / "mmproj.gguf")
    assert not (tmp_path / "mmproj.gguf").exists()


@pytest.mark.parametrize(
    ("name", "file", "entries", "error"),
    [
        ("llava", "config.json", {"vision_feature_layer": [-2, -5]}, "the vision_feature_layer"),
        ("llava", "config.json", {"vision_feature_layer": -9}, "the vision_feature_layer -9"),
        ("llava", "config.json", {"projector_hidden_act": "relu"}, "projector_hidden_act is 'relu'"),
        ("llava", "preprocessor_config.json", {"do_pad": True}, "the image processor's do_pad is True"),
        ("llava-next", "config.json", {"image_grid_pinpoints": [[32, 40]]}, "multiples of 32"),
        ("internvl", "config.json", {"downsample_ratio": 0.25}, "downsample_ratio is 0.25, and only 0.5"),
    ],
)
def test_odd_settings_of_a_family_are_refused(
    name: str, file: str, entries: dict[str, Any], error: str, tmp_path: Path
) -> None:
    save_checkpoint(RECIPES[name], tmp_path / "model")
    changed(tmp_path / "model", file, **entries)
    with pytest.raises(HotsetError, match=error):
        convert_projector(tmp_path / "model", tmp_path / "mmproj.gguf")


def test_layers_after_the_features_are_left_out(tmp_path: Path) -> None:
    save_checkpoint(RECIPES["llava"], tmp_path / "model")
    convert_projector(tmp_path / "model", tmp_path / "mmproj.gguf")
    with open_gguf(tmp_path / "mmproj.gguf") as gguf:
        assert gguf.metadata["clip.vision.block_count"] == 2
        assert not any(name.startswith(("v.blk.2.", "v.post_ln.")) for name in gguf.tensors)


def test_layers_with_features_may_be_omitted(tmp_path: Path) -> None:
    """Omit them in config.json: the files of the text model and of the encoder have transformers' layers."""
    layers = list(transformers.Qwen3VLConfig().vision_config.deepstack_visual_indexes)
    tiny_vision.qwen3vl(depth=layers[-1] + 1, deepstack_visual_indexes=layers).save_pretrained(tmp_path)
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    vision.pop("deepstack_visual_indexes")
    changed(tmp_path, "config.json", vision_config=vision)
    convert_projector(tmp_path, tmp_path / "mmproj.gguf")
    with open_gguf(tmp_path / "mmproj.gguf") as gguf:
        assert np.flatnonzero(gguf.metadata["clip.vision.is_deepstack_layers"]).tolist() == layers
    convert_hf(tmp_path, tmp_path / "text.gguf")
    with open_gguf(tmp_path / "text.gguf") as gguf:
        assert gguf.metadata["qwen3vl.n_deepstack_layers"] == len(layers)


CHAT_NAMES = {  # names in -hf checkpoints → the authors'
    r"^(model\.)?vision_tower\.": "vision_model.",
    r"\.cls_token": ".class_embedding",
    r"\.patch_embeddings\.projection": ".patch_embedding",
    r"\.position_embeddings": ".position_embedding",
    r"\.encoder\.layer\.": ".encoder.layers.",
    r"^(model\.)?multi_modal_projector\.layer_norm": "mlp1.0",
    r"^(model\.)?multi_modal_projector\.linear_1": "mlp1.1",
    r"^(model\.)?multi_modal_projector\.linear_2": "mlp1.3",
    r"^model\.language_model\.": "language_model.model.",
    r"^lm_head": "language_model.lm_head",
    r"\.attention\.projection_layer": ".attn.proj",
    r"\.attention\.([qkv])_(proj|norm)": r".attn.\1_\2",
    r"\.lambda_([12])": r".ls\1",
    r"\.layernorm_before": ".norm1",
    r"\.layernorm_after": ".norm2",
}


@pytest.mark.parametrize("name", ["internvl", "internvl-6b"])
def test_internvl_as_its_authors_publish_it_gives_the_same_files(name: str, tmp_path: Path) -> None:
    folder, paths = tmp_path / "model", [tmp_path / f"{i}.gguf" for i in range(4)]
    save_checkpoint(RECIPES[name], folder)
    convert_projector(folder, paths[0])
    convert_hf(folder, paths[1])
    found: dict[str, Any] = {}
    for old, values in load_file(folder / "model.safetensors").items():
        new = old
        for pattern, target in CHAT_NAMES.items():
            new = re.sub(pattern, target, new)
        found[new] = values
    for q in [one for one in found if re.search(r"vision_model\..*\.attn\.q_proj\.", one)]:
        parts = [found.pop(q.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        found[q.replace("q_proj", "qkv")] = torch.cat(parts)
    save_file(found, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"] | {"image_size": 32, "patch_size": 8}
    config |= {"architectures": ["InternVLChatModel"], "llm_config": config.pop("text_config")}
    config |= {"vision_config": vision, "max_dynamic_patch": 6, "ps_version": "v2", "use_thumbnail": True}
    (folder / "config.json").write_text(json.dumps(config))
    convert_projector(folder, paths[2])
    convert_hf(folder, paths[3])
    for theirs, ours in ((paths[0], paths[2]), (paths[1], paths[3])):
        with open_gguf(theirs) as one, open_gguf(ours) as other:
            assert str(one.metadata) == str(other.metadata)
            assert one.tensors.keys() == other.tensors.keys()
            for tensor, info in one.tensors.items():
                assert (info.type, info.shape) == (other.tensors[tensor].type, other.tensors[tensor].shape)
                assert np.array_equal(one.data(tensor), other.data(tensor))


def test_odd_tensors_are_refused(smol: Path, tmp_path: Path) -> None:
    path = smol / "model.safetensors"
    tensors = load_file(path)
    norm = "model.vision_model.post_layernorm.weight"
    for change, kind, error in (
        (
            {"model.vision_model.odd.weight": tensors[norm].clone()},
            UnsupportedModelError,
            r"not known: odd\.weight",
        ),
        (
            {norm.removeprefix("model."): tensors[norm].clone()},
            FormatError,
            r"two tensors for v\.post_ln\.weight",
        ),
        (
            {norm: None},
            UnsupportedModelError,
            r"does not load: the file lacks the tensor output_norm\.weight",
        ),
        ({norm: tensors[norm][:5].clone()}, UnsupportedModelError, r"has the shape \[5\]"),
    ):
        found = {name: values for name, values in (tensors | change).items() if values is not None}
        save_file(found, path)
        with pytest.raises(kind, match=error):
            convert_projector(smol, tmp_path / "mmproj.gguf")


def test_command_converts_an_encoder(smol: Path, tmp_path: Path) -> None:
    target = tmp_path / "mmproj.gguf"
    done = inside("convert", smol, target, "--mmproj", "--type", "q8_0")
    assert "--mmproj" in done.stdout + done.stderr
    done = inside("convert", smol, target, "--mmproj", "--json")
    assert json.loads(done.stdout) == {"path": str(target), "size": target.stat().st_size, "type": "f16"}
    refused = inside("convert", smol, target, "--mmproj", "--activation", "relu", returns=2)
    assert "--mmproj cannot be combined with --activation" in " ".join(refused.stderr.split())
