#!/bin/sh
# Compiles the kernel test for AArch64 and runs it under an emulator, so that any Linux machine compares the NEON
# kernels with the reference bit for bit. A processor without the dot product instructions must select the reference.
# CXX_AARCH64 and QEMU_AARCH64 name the compiler (a command, which may have arguments) and the emulator.
#
# This takes more than a minute, so build/neon caches results by hash: objects by their sources, flags and compiler;
# and with --kept the output of a passing program by the program, the emulator and this script. Nothing else
# influences them: the test uses fixed seeds and no clock.
set -eu

csrc=$(cd "$(dirname "$0")/.." && pwd)
cxx=${CXX_AARCH64:-aarch64-linux-gnu-g++}
qemu=${QEMU_AARCH64:-qemu-aarch64}
kept=${HOTSET_NEON_BUILD:-$csrc/../build/neon}
with_results=no
[ "${1:-}" = --kept ] && with_results=yes

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
mkdir -p "$kept" 2>/dev/null && [ -w "$kept" ] || { kept=$build/kept && mkdir "$kept"; }
# Delete results that were not used for a month. Another run may be using newer ones.
find "$kept" -type f -mtime +30 -exec rm -f {} +

digest() { sha256sum | cut -c1-32; }

keep() {  # file, name: store it atomically
    cp "$1" "$kept/$2.$$" && mv "$kept/$2.$$" "$kept/$2"
}

# All headers: changing one rebuilds all objects.
headers=$({ $cxx --version; find "$csrc" -name '*.h' | LC_ALL=C sort | xargs cat; } | digest)

compile() {  # name, source, flags
    name=$1 source=$2
    shift 2
    set -- -std=c++20 -O2 -ffp-contract=off -Wall -Wextra -DHOTSET_ARM64 "$@"
    object=$name-$({ echo "$headers $cxx $*"; cat "$csrc/$source"; } | digest).o
    if [ -e "$kept/$object" ]; then
        touch -c "$kept/$object"
        cp "$kept/$object" "$build/$name.o"
    else
        $cxx "$@" -c "$csrc/$source" -o "$build/$name.o"
        keep "$build/$name.o" "$object"
    fi
}
case $cxx in
*zig*) dotprod=-mcpu=generic+v8_2a+dotprod+fullfp16 ;;  # zig has its own names for these
*) dotprod=-march=armv8.2-a+dotprod+fp16 ;;
esac
compile neon kernels/isa_neon.cpp "$dotprod"
compile i8mm kernels/isa_i8mm.cpp "$dotprod+i8mm"
compile scalar kernels/isa_scalar.cpp
compile select kernels/select.cpp
compile test tests/kernel_test.cpp
$cxx -static "$build/neon.o" "$build/i8mm.o" "$build/scalar.o" "$build/select.o" "$build/test.o" -o "$build/kernel_test"

expect() {  # expected output, processor, arguments
    line=$1
    shift
    log=passed-$1-$({ echo "$line $*"; "$qemu" --version; cat "$build/kernel_test" "$csrc/tests/run_neon.sh"; } | digest)
    if [ $with_results = yes ] && [ -e "$kept/$log" ]; then
        touch -c "$kept/$log"
        cat "$kept/$log"
        return
    fi
    cpu=$1
    shift
    "$qemu" -cpu "$cpu" "$build/kernel_test" "$@" >"$build/log" || { cat "$build/log"; exit 1; }
    cat "$build/log"
    grep -q "^$line" "$build/log" || { echo "FAIL: $cpu did not print '$line'"; exit 1; }
    keep "$build/log" "$log"
}
expect "i8mm: compared" max
expect "neon: selected" cortex-a76 --selected
expect "scalar: selected" cortex-a57 --selected
[ $with_results = yes ] || expect "scalar: compared" cortex-a57  # the same code as on any other processor
