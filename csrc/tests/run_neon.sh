#!/bin/sh
# Compiles the kernel test for AArch64 and runs it under an emulator, so that the NEON kernels are compared with the
# reference bit for bit on any Linux machine: once on a processor with the dot product instructions, once on one
# without, which must choose the reference. Exit status 0 with a line "skipped: ..." where a tool is missing.
set -eu

csrc=$(cd "$(dirname "$0")/.." && pwd)
cxx=${CXX_AARCH64:-aarch64-linux-gnu-g++}
qemu=${QEMU_AARCH64:-qemu-aarch64}

command -v "$cxx" >/dev/null || { echo "skipped: $cxx is not installed (Debian: g++-aarch64-linux-gnu)"; exit 0; }
command -v "$qemu" >/dev/null || { echo "skipped: $qemu is not installed (Debian: qemu-user)"; exit 0; }

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

compile() {  # name, source, flags
    name=$1 source=$2
    shift 2
    "$cxx" -std=c++20 -O2 -ffp-contract=off -Wall -Wextra -DHOTSET_ARM64 "$@" -c "$csrc/$source" -o "$build/$name.o"
}
compile neon kernels/isa_neon.cpp -march=armv8.2-a+dotprod+fp16
compile scalar kernels/isa_scalar.cpp
compile select kernels/select.cpp
compile test tests/kernel_test.cpp
"$cxx" -static "$build/neon.o" "$build/scalar.o" "$build/select.o" "$build/test.o" -o "$build/kernel_test"

expect() {  # processor, instruction set that must be compared
    "$qemu" -cpu "$1" "$build/kernel_test" >"$build/log" || { cat "$build/log"; exit 1; }
    cat "$build/log"
    grep -q "^$2: compared" "$build/log" || { echo "FAIL $2 was not tested on $1"; exit 1; }
}
expect max neon
expect cortex-a57 scalar
