# SPDX-License-Identifier: Apache-2.0
"""Private machinery that every op uses. Published code imports none of it; :mod:`flashinfer.utils` exports a part.

Each module imports only modules above it; the last two compile a kernel with :mod:`flashinfer.jit`.

===============  ======================================================================================
errors           exceptions and the form of their texts
knobs            every environment variable, declared once
experimental     marks of functions and backends that may change
log              levels of the package's loggers, lines on stderr
integer_math     rounding of tile counts and paddings
enums            mask, position encoding and layout, as the kernels number them
cache_buffers    scratch memory that outlives a call
codegen_wrapper  wrapper functions with the signature of the function they wrap
probes           device probes of flashinfer.utils, where serving engines replace them
nvml             questions to the driver that do not initialise CUDA
arch             device probes and named sets of compute capabilities
allocation       allocation of results
checks           shape, dtype and device of tensors
explain_error    name the argument of a wrong type after a call has failed
torch_ops        registration of ops with torch, for torch.compile and torch.export
requirements     ``@backend_requirement``: backends and compute capabilities that an op supports
kept             choices kept between calls
not_copied       attributes of tensors that stay with the tensor object
dispatch         the native function for a tensor's device; PDL
describe         text of arguments and results, for the API log
globaltimer      the GPU's own clock
api_log_stats    statistics of tensors while a CUDA graph is captured, for the API log
===============  ======================================================================================
"""
