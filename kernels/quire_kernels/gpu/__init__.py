"""The ops of `quire_kernels` in the Triton language (Tillet et al. 2019, https://doi.org/10.1145/3315508.3329973).

One op per file, as in the folder above, whose functions come here for tensors on a GPU, and have the docstrings. Only
importing a file of this folder imports triton.
"""
