# SPDX-License-Identifier: Apache-2.0
"""Attributes of tensors that stay with the tensor object."""

from __future__ import annotations

from typing import Any

__all__ = ["NotCopied"]


class NotCopied:
    """An attribute of a tensor that deep copies of the tensor, and files that it is saved to, do not have.

    torch copies and saves all attributes with a tensor. Of such a one it gets an empty set: a reader takes what is
    false for nothing. ``torch.load`` knows sets, and no class of ours, with ``weights_only=True``.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return set, ()
