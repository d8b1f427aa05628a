# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel mixture-of-experts layers: data classes, options, weights, checks, layers, and exchanges of tokens.

:func:`create_communication` makes the exchange of a group of ranks of one host. Of the transports of
:func:`create_fleet` ``local`` (a single rank) is here; others need packages of others, and
:func:`available_backends` lists those installed.
"""

from .algo_knobs import *
from .algo_knobs import __all__ as _knobs
from .availability import available_backends, have_nccl_ep, have_nixl_ep, supports_fault_tolerance, warn_about_builds
from .communication import *
from .communication import __all__ as _communication
from .config import *
from .config import __all__ as _config
from .errors import *
from .errors import __all__ as _errors
from .fleet import *
from .fleet import __all__ as _fleet
from .fused import FusedMoeKernelConfig
from .kernels import IdentityConfig, SplitKernelContext, kernel_requires_weights, run_split_kernel
from .layers import *
from .layers import __all__ as _layers
from .mega import preprocess_sm90_push_fp8_mega_weights
from .mega_configs import *
from .mega_configs import __all__ as _mega
from .runtime import bootstrap_moe_ep_runtime, ensure_moe_ep_cuda_device, finalize_moe_ep_runtime
from .transports import *
from .transports import __all__ as _transports
from .validation import *
from .validation import __all__ as _validation
from .weights import *
from .weights import __all__ as _weights

__all__ = [
    *_knobs,
    *_communication,
    *_config,
    *_errors,
    *_fleet,
    *_layers,
    *_mega,
    *_transports,
    *_validation,
    *_weights,
    "FusedMoeKernelConfig",
    "IdentityConfig",
    "SplitKernelContext",
    "available_backends",
    "bootstrap_moe_ep_runtime",
    "ensure_moe_ep_cuda_device",
    "finalize_moe_ep_runtime",
    "have_nccl_ep",
    "have_nixl_ep",
    "kernel_requires_weights",
    "preprocess_sm90_push_fp8_mega_weights",
    "run_split_kernel",
    "supports_fault_tolerance",
]

warn_about_builds()

# Published module paths that only re-export, such as flashinfer.moe_ep.core.runtime, are files of this folder.
__path__.append(f"{__path__[0].removesuffix('moe_ep')}_compat/published/moe_ep")  # noqa: F405
