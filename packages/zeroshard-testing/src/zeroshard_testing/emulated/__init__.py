"""An accelerator that needs no hardware: device ``emu``, with streams, events and a process group, on host memory.

`build` compiles the C++ in ``csrc`` once, and `runtime` loads it in a worker, which has the device from then on. The
device computes at once by the CPU kernels; its checker finds what nothing orders, `order` what ranks issue differently,
and `runtime.finish_test` raises it. Data of collectives travel from `mover` to `mover`.
"""
