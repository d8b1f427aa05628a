# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.moe_ep.mega_configs`."""

from flashinfer.moe_ep.mega_configs import (
    Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig as Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig,
)
