"""PTX, which Triton makes for a GPU, executed on the CPU: `parse`, `translate` to NumPy, run by the `machine`.

Triton's interpreter runs a kernel's source; this runs what its compiler made of it for one kind of GPU, with that one's
layouts, exchanges of registers, shared memory and barriers, vectors of 16 bytes and approximate instructions. `driver`
gives it to Triton in the place of a GPU, on tensors of the CPU; the null GPU has it behind its driver.
"""
