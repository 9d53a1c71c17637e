"""The Triton kernels, one role a file. Nothing here registers an op, allocates memory or chooses a configuration.

The bodies are plain `@triton.jit` functions over pointers and constexpr sizes. Launchers call them (`eager.py`,
`multiply.py`), and so can the text of an Inductor `TritonTemplate`: what stands in a template before
`{{def_kernel(...)}}` is module-level code of the generated file, so `from torch_nvfp4.lowering.kernels.… import …`
there brings the body in, and Triton hashes the sources of the functions a kernel calls, so an edit here reaches its
cache.
"""
