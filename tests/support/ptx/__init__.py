"""An interpreter in NumPy of the PTX that Triton compiles for NVIDIA's GPUs.

program.py reads PTX. machine.py executes a grid. memory.py has the device's memories and detects wrong
accesses. arithmetic.py and tensor_cores.py have the instructions. kernels.py launches Triton's kernels.
docs/contributing/internals/gpu.md says which faults it finds and which it cannot.
"""
