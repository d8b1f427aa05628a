# SPDX-License-Identifier: Apache-2.0
"""Numbers of the layouts of scales, as published kernels take them."""

from ..layout import SfLayout

__all__ = ["SF_LAYOUT_128x4", "SF_LAYOUT_8x4", "SF_LAYOUT_LINEAR"]

SF_LAYOUT_128x4 = int(SfLayout.layout_128x4)
SF_LAYOUT_8x4 = int(SfLayout.layout_8x4)
SF_LAYOUT_LINEAR = int(SfLayout.layout_linear)
