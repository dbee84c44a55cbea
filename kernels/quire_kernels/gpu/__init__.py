"""The ops of `quire_kernels` in the Triton language (Tillet et al. 2019, https://doi.org/10.1145/3315508.3329973).

The functions of the parent folder call these for tensors on a GPU, and have the docstrings. Triton is imported only
with a file of this folder.
"""
