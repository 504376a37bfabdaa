"""The NEON kernels, compared with the reference under an emulator (csrc/tests/run_neon.sh).

It takes more than a minute, unless it has passed before with the same sources, compiler and emulator: passes
are recorded in build/neon. So it is in `make test-all`. `make test-neon` always runs it.
"""

import os
import subprocess

import cross
import pytest
from paths import ROOT

SCRIPT = ROOT / "csrc" / "tests" / "run_neon.sh"


@pytest.mark.slow
def test_neon_kernels_give_the_bits_of_the_reference() -> None:
    compiler, emulator = cross.compiler(), cross.emulator()
    if emulator is None:
        pytest.skip("no emulator of AArch64: `make test-deps` installs it (Debian: qemu-user)")
    if compiler is None:
        pytest.skip("no compiler for AArch64: `make test` fetches ziglang from PyPI")
    environment = os.environ | {"CXX_AARCH64": compiler, "QEMU_AARCH64": emulator}
    result = subprocess.run(["sh", str(SCRIPT), "--kept"], capture_output=True, text=True, env=environment)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "neon: compared with the scalar reference, 0 failures" in output
