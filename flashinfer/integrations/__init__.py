# SPDX-License-Identifier: Apache-2.0
"""Our kernels behind interfaces of other packages. Importing this needs none of them."""

from . import transformers as transformers
