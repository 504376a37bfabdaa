"""Fuzzes the GGUF reader: mutated small files may only open or raise HotsetError.

usage: python tests/fuzz/fuzz_gguf.py [--seconds 60] [--seed 0] [--keep FOLDER]

A model is a set of files (name → bytes), so that split models are fuzzed too. Files that make
anything else happen (another exception, more than 2 s of processor time) are kept in a folder whose name is
printed; the exit status is 1.
"""

import argparse
import os
import struct
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hotset.errors import HotsetError
from hotset.formats.gguf import GGUFWriter, ValueType, open_gguf
from hotset.formats.quants import DECODABLE, GGMLType, dequantize

Model = dict[str, bytes]
SLOW_S = 20.0 if "HOTSET_SANITIZED" in os.environ else 2.0
MAX_MEMORY = 4 << 30  # address space of the process: a count that is believed fails here at once
NASTY = [0, 1, 2, 4, 5, 8, 9, 12, 13, 31, 33, 255, 256, 65535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
NASTY += [1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 64, (1 << 64) - 8, (1 << 64) - 1]


def seed_models(folder: Path) -> list[Model]:
    """Small valid models that between them use every feature of the reader."""
    rng = np.random.default_rng(0)
    names = ["plain.gguf", "dialect.gguf", "split-00001-of-00002.gguf", "split-00002-of-00002.gguf"]
    for name in names:
        writer = GGUFWriter(
            folder / name, "llama", dialect="powerinfer" if name == "dialect.gguf" else "gguf"
        )
        if name.startswith("split"):
            writer.add("split.count", 2, ValueType.UINT16)
            writer.add("split.no", int(name[10]) - 1, ValueType.UINT16)
            writer.add("split.tensors.count", 4, ValueType.INT32)
        writer.add("llama.block_count", 2)
        writer.add("llama.rope.freq_base", 1e4)
        writer.add("tokenizer.ggml.tokens", ["<s>", "a", "é", "🦊", ""])
        writer.add("tokenizer.ggml.scores", [0.0, -1.0, -2.0, -3.0, -4.0])
        writer.add("flags", [True, False, True])
        for i, type in enumerate(
            [GGMLType.F32, GGMLType.Q4_K] if name == names[2] else [GGMLType.Q8_0, GGMLType.Q6_K]
        ):
            data = rng.integers(0, 256, {0: 64 * 4, 8: 68, 12: 144, 14: 210}[type], dtype=np.uint8)
            writer.add_tensor(f"blk.{i}.{type.name}.weight", data, type)
        writer.write()
    files = {name: (folder / name).read_bytes() for name in names}
    return [
        {names[0]: files[names[0]]}, {names[1]: files[names[1]]}, {name: files[name] for name in names[2:]},
    ]  # fmt: skip


def mutate(model: Model, rng: np.random.Generator) -> Model:
    """Change one file of the model in one to four places."""
    name = list(model)[rng.integers(len(model))]
    data = bytearray(model[name])
    for _ in range(rng.integers(1, 5)):
        if not data:
            break
        at, length = int(rng.integers(len(data))), int(rng.integers(1, 64))
        match rng.integers(7):
            case 0:
                data[at] ^= 1 << rng.integers(8)
            case 1:
                data[at] = rng.integers(256)
            case 2:
                data[at : at + 4] = struct.pack("<I", NASTY[rng.integers(len(NASTY))] & 0xFFFFFFFF)
            case 3:
                data[at : at + 8] = struct.pack("<Q", NASTY[rng.integers(len(NASTY))])
            case 4:
                del data[at : at + length]
            case 5:
                data[at:at] = data[at : at + length]
            case 6:
                del data[at:]
    return {**model, name: bytes(data)}


def exercise(model: Model, folder: Path) -> bool:
    """Open the model and read all its data. Return whether it opened; any exception raised is a bug."""
    for name, data in model.items():
        (folder / name).write_bytes(data)
    try:
        with open_gguf(folder / next(iter(model))) as file:
            assert file.n_parameters >= 0
            assert 0 < file.nbytes <= sum(len(data) for data in model.values())
            for info in file.tensors.values():
                try:
                    data = file.data(info.name)
                    assert data.nbytes == info.nbytes
                    if info.type in DECODABLE:
                        assert dequantize(data, info.type, info.shape).size == info.n_elements
                except HotsetError as error:
                    _check_sentence(error)
            assert file.architecture is not None
    except HotsetError as error:
        _check_sentence(error)
        return False
    return True


def _check_sentence(error: HotsetError) -> None:
    message = str(error)
    assert message.endswith("."), message
    assert "\n" not in message, message
    assert len(message) < 4096, message


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for files that fail (default: a new temporary one)")
    args = parser.parse_args()
    import resource  # POSIX only, and only here: the tests import this module everywhere

    if "HOTSET_SANITIZED" not in os.environ:  # a sanitizer's shadow memory alone is larger
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    rng = np.random.default_rng(args.seed)
    n_cases = n_opened = n_failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = seed_models(folder)
        assert all(exercise(model, folder) for model in models), "the seeds themselves must open"
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            model = mutate(models[rng.integers(len(models))], rng)
            start = time.process_time()
            try:
                n_opened += exercise(model, folder)
                problem = "" if time.process_time() - start < SLOW_S else "slow"
            except Exception as error:
                problem = repr(error)
            if problem:
                args.keep = args.keep or Path(tempfile.mkdtemp(prefix="fuzz-gguf-"))
                case = args.keep / f"{args.seed}-{n_cases}"
                case.mkdir(parents=True, exist_ok=True)
                for name, data in model.items():
                    (case / name).write_bytes(data)
                print(f"{case}: {problem}", file=sys.stderr)
                n_failed += 1
            n_cases += 1
    print(f"{n_cases} files, {n_opened} opened, {n_failed} failed")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
