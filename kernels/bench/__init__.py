"""Times the candidates of an op for a model's sizes: `python -m mstar.kernels.bench decode_gemm --store DIR`.

`sizes` says what a model serves, `measure` checks and times on a GPU, `tune` runs the passes, `store` keeps the
figures; `mstar.kernels.promote` makes a table of them.
"""
