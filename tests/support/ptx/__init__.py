"""An interpreter of the PTX that Triton compiles for NVIDIA's GPUs, in NumPy.

program.py reads PTX, machine.py executes a grid, memory.py has the device's memories and what is wrong with
how a kernel uses them, arithmetic.py and tensor_cores.py the instructions, kernels.py launches Triton's
kernels so. docs/contributing/internals/gpu.md says what it finds and what it cannot.
"""
