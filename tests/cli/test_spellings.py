"""Options with the spelling of other programs: they mean the same as there, and help does not show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_runs import answer, command_of, inside, options_of

from hotset.backends.registry import device_names, device_words
from hotset.cli.main import SUBCOMMANDS
from hotset.cli.options import ModelOptions
from hotset.cli.spellings import FLAGS, MEANT, WITHOUT_EFFECT


def parsed(subcommand: str, *words: object) -> dict[str, Any]:
    """Return the parameters that a command line gives to a subcommand."""
    params: dict[str, Any] = command_of(subcommand).make_context(subcommand, list(map(str, words))).params
    return params


@pytest.mark.parametrize(
    ("subcommand", "words", "own"),
    [
        ("run", ("m", "hi", "--temperature", "0.5"), ("m", "hi", "--temp", "0.5")),
        ("run", ("m", "hi", "-no-cnv"), ("m", "hi", "--raw")),
        ("run", ("m", "hi", "-md", "small", "--max-tokens=9"), ("m", "hi", "--draft", "small", "-n", "9")),
        ("run", ("hi there", "-m", "m"), ("m", "hi there")),
        ("run", ("-p", "hi", "--model", "m", "--ngl", "9"), ("m", "-p", "hi", "-ngl", "9")),
        ("run", ("-hf", "o/r", "hi"), ("hf:o/r", "hi")),
        ("run", ("--hf-repo", "o/r:Q4_K_M", "hi"), ("hf:o/r:Q4_K_M", "hi")),
        ("run", ("-hf", "hf:o/r", "-hff", "a/m.gguf", "hi"), ("hf:o/r:a/m.gguf", "hi")),
        ("run", ("-hfr", "o/r:Q8_0", "--hf-file", "m.gguf"), ("hf:o/r:m.gguf",)),
        ("serve", ("-m", "a", "--port", "0"), ("a", "--port", "0")),
        ("serve", ("-m", "a", "-m", "b"), ("a", "b")),
        ("serve", ("m", "--max-tokens", "9", "--num-ctx", "64"), ("m", "--max-tokens", "9", "-c", "64")),
        ("embed", ("a text", "-m", "m"), ("m", "a text")),
        ("bench", ("-m", "a,b", "-b", "8"), ("a,b", "--batch-size", "8")),
        ("plan", ("-m", "m", "-b", "8"), ("m", "--batch-size", "8")),
        ("run", ("m", "--no-gpu"), ("m", "--device", "cpu")),
        ("embed", ("m", "a", "--backend", "reference"), ("m", "a", "--device", "reference")),
        ("plan", ("m", "--disable-gpu-index"), ("m", "--split", "layers")),
        ("run", ("m", "--kv-type", "q8_0"), ("m", "-ctk", "q8_0")),
        ("run", ("m", "-dev", "Vulkan0"), ("m", "--device", "Vulkan0")),
    ],
)
def test_a_spelling_means_an_option(subcommand: str, words: tuple[str, ...], own: tuple[str, ...]) -> None:
    assert parsed(subcommand, *words) == parsed(subcommand, *own)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("none", "cpu"), ("CUDA0", "cuda:0"), ("CUDA0,CUDA1", "cuda:0,cuda:1"), ("Vulkan1", "vulkan:1"),
        ("ROCm0", "rocm:0"), ("Metal", "mps"), ("MTL0", "mps"), ("SYCL2", "xpu:2"), ("cuda:1", "cuda:1"),
        ("cuda:0, vulkan:1", "cuda:0, vulkan:1"), ("CPU", "cpu"), ("simulated", "simulated"),
    ],
)  # fmt: skip
def test_devices_of_other_programs(given: str, meant: str) -> None:
    assert device_names(given) == meant


@pytest.mark.parametrize("words", [("--device", "list"), ("--list-devices",)])
@pytest.mark.parametrize("subcommand", ["run", "bench", "plan", "imatrix"])
def test_devices_are_listed_without_a_model(subcommand: str, words: tuple[str, ...]) -> None:
    done = inside(subcommand, *words)
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.split()]
    assert {"cpu", "simulated"}.intersection(device_words()) <= {*listed}


def test_device_option_is_the_same_in_all_commands() -> None:
    """Check that `--device` has one help text, with the words of the registry, in all commands."""
    found = {}
    for subcommand in SUBCOMMANDS:
        for one in command_of(subcommand).params:
            if "--device" in one.opts:
                found[subcommand] = one.help
    assert len(found) > 8
    assert len({*found.values()}) == 1
    assert all(word in found["run"] for word in device_words())


def test_every_spelling_is_accepted_and_not_shown() -> None:
    spelled = {name for table in (MEANT, FLAGS) for names in table.values() for name in names}
    for subcommand in SUBCOMMANDS:
        command = command_of(subcommand)
        own = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        shown = inside(*subcommand.split(), "--help-all").stdout.split()
        assert not (spelled - own) & set(shown), subcommand
        if "--ctx-size" in own or subcommand == "bench":
            assert options_of(subcommand) >= {name for one in WITHOUT_EFFECT for name in one.names}
    taken = [options_of(subcommand) for subcommand in SUBCOMMANDS]
    for option, names in (*MEANT.items(), *FLAGS.items()):
        for name in names:
            assert any({option, name} <= known for known in taken), name


def test_an_option_without_effect_changes_nothing_and_is_reported(model: Path) -> None:
    plain = answer(model, "Hello", "--temp", 0, "-n", 4)
    words = ["-fa", "on", "--jinja", "--mlock", "--no-mmap", "-b", 64, "-ub", 32, "-tb", 1, "-cnv"]
    done = inside(
        "run", "-m", model, "-p", "Hello", "-n", 4, "--temp", 0, *words, "--device", "reference", returns=None
    )
    assert (done.returncode, done.stdout.rstrip("\n")) == (0, plain["text"]), done.stderr
    assert "--mlock has no effect: memory is never locked" in done.stderr
    assert "-ub has no effect" in done.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("-fa", "off"), "attention is always fused; 'off' is not one of on"),
        (("-ctv", "q5_1"), "--cache-type-v must be one of f16, q8_0, q4_0, not 'q5_1'"),
        (("-ot", "attn=CPU"), "--n-gpu-layers"),
        (("-ot", "exps=CUDA0"), "--n-gpu-layers"),
        (("-ot", "(=CPU"), "does not compile"),
        (("-hff", "x.gguf"), "--hf-file requires --hf-repo"),
        (("-hf", "owner/repo"), "the model is given twice"),
        (("-m", "other.gguf"), "the model is given twice"),
    ],
)
def test_unsupported_values_of_a_spelling_are_refused(
    model: Path, options: tuple[str, ...], named: str
) -> None:
    done = inside("run", "-m", model, "-p", "Hello", *options, returns=2)
    assert named in " ".join(done.stderr.replace("│", " ").split())


def test_two_models_are_refused(model: Path) -> None:
    done = inside("run", model, "Hello", "-m", model, returns=None)
    assert (done.returncode, "the model is given twice" in done.stderr) == (2, True)


def test_types_of_keys_and_values(model: Path) -> None:
    """Use one type for both, and one type each."""
    for apart, together in (
        (("-ctk", "q8_0", "-ctv", "q8_0"), ("-ctk", "q8_0")),
        (("-ctk", "q8_0", "-ctv", "q4_0"), ("-ctk", "q8_0/q4_0")),
    ):
        found = [answer(model, "Hello", "--temp", 0, *given)["tokens"] for given in (apart, together)]
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ()),
        ({"n_cpu_moe": 0}, ()),
        ({"cpu_moe": True}, range(1024)),
        ({"n_cpu_moe": 3}, range(3)),
        ({"override_tensor": ["exps=CPU"]}, range(1024)),
        (
            {"override_tensor": [r"blk\.(2|1[0-2])\.ffn_.*_exps=CPU,blk.5.ffn_up_exps=CPU"]},
            (2, 5, 10, 11, 12),
        ),
        ({"override_tensor": [r"\.ffn_(up|down)_exps\.=CPU"], "n_cpu_moe": 2}, range(1024)),
    ],
)
def test_experts_on_the_cpu_as_in_llama_cpp(options: dict[str, Any], expected: Any):
    assert ModelOptions(**options).settings().cpu_experts == expected
