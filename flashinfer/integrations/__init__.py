# SPDX-License-Identifier: Apache-2.0
"""Adapters of our kernels to interfaces of other packages. Importing this module needs none of those packages."""

from . import transformers as transformers
