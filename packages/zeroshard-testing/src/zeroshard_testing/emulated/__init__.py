"""An accelerator that needs no hardware: device ``emu``, with streams, events and a process group, on host memory.

`build` compiles the C++ in ``csrc`` once, and `runtime` loads it in a worker, which then has the device. The device
computes at once with the CPU kernels. Its checker finds accesses that nothing orders, `order` finds operations in which
ranks differ, and `runtime.finish_test` raises the errors. Each rank's `mover` sends the data of collectives.
"""
