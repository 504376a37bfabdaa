"""Compares logits with the hashes that were written down on another platform.

    python tests/platforms/hashes.py

Needs hotset and NumPy alone. Prints how many are the same, and each that is not, and exits with 1 if there is
one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from logit_bits import DENSE_CASES, N_VOCAB, RELU_CASES, bits_of, write_case, written_bits

import hotset


def main() -> None:
    platform, known = written_bits()
    cases = DENSE_CASES | RELU_CASES
    other = []
    for name, (_, settings) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_case(name, Path(folder))
            with hotset.load(path, n_ctx=128, n_threads=2, backend="cpu", **settings) as model:
                if bits_of(model, N_VOCAB) != known[name]:
                    other.append(name)
                    print(f"{name}: other bits than on {platform}")
    print(f"{len(cases) - len(other)} of {len(cases)} hashes are those of {platform}")
    sys.exit(bool(other))


if __name__ == "__main__":
    main()
