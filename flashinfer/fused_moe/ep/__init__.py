# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel mixture-of-experts layers: the part that needs no other rank.

Here are the data classes, the options of transports, the weights of a rank and the checks. Transports need several GPUs
and packages of others: :func:`available_backends` lists those that are installed.
"""

from .algo_knobs import *
from .algo_knobs import __all__ as _knobs
from .availability import available_backends, have_nccl_ep, have_nixl_ep, supports_fault_tolerance
from .config import *
from .config import __all__ as _config
from .errors import *
from .errors import __all__ as _errors
from .validation import *
from .validation import __all__ as _validation
from .weights import *
from .weights import __all__ as _weights

__all__ = [
    *_knobs,
    *_config,
    *_errors,
    *_validation,
    *_weights,
    "available_backends",
    "have_nccl_ep",
    "have_nixl_ep",
    "supports_fault_tolerance",
]
