# SPDX-License-Identifier: Apache-2.0
"""Names that exist only so that published code can import them.

``unsupported*`` holds functions that need another GPU or package: a call raises an error that says so.
``backend_rules`` answers which published attention backend a call would get, ``installed`` which packages are present,
``tllm_enums`` holds enumerations of published MoE and GEMM calls.

``published/`` holds one file for each published module path that is no family, such as
``flashinfer.fp4_quantization``. :mod:`flashinfer` appends the folder to its ``__path__``: a file is imported under its
published path. It only re-exports; code of this package imports names from where they are defined.
"""
