# SPDX-License-Identifier: Apache-2.0
"""Parts of a batch."""

from __future__ import annotations

from ..attention.inputs import Batch


def decode_part(device: str, layout: str):
    batch = Batch([1, 1, 1], [9, 130, 0], device=device)
    pages = batch.pages(8)
    return batch, pages, batch.cache(pages, layout, "combined")
