"""The operations of a step: each one a torch reference and faster kernels beside it.

`select_ops(device, dtype)` picks what runs here; layers call the `Ops` interface and nothing below it.
"""
