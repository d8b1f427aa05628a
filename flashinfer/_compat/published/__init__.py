# SPDX-License-Identifier: Apache-2.0
"""Published module paths: ``flashinfer.__path__`` has this folder, so ``msa_ops.py`` is ``flashinfer.msa_ops``."""
