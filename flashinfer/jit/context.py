# SPDX-License-Identifier: Apache-2.0
"""The CompilationContext of the process. It looks for GPUs when its targets are first read."""

from ..compilation_context import CompilationContext

current_compilation_context = CompilationContext()
