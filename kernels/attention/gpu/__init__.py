"""Triton kernels; each has its torch reference beside this folder."""
