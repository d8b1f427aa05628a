# SPDX-License-Identifier: Apache-2.0
"""Opcodes in compiled kernels."""

from __future__ import annotations

import struct
from typing import Iterator

#: Opcodes of a copy from global to shared memory (LDGSTS): the lowest 12 bits of an instruction.
COPY, COPY_UNIFORM = 0xFAE, 0xDAE


def operations(cubin: bytes) -> Iterator[int]:
    """Return the opcodes of all kernels: the text sections of an ELF file, 16 bytes per instruction."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    for name, _, _, _, begin, length in sections:
        if cubin[sections[names][4] + name :].startswith(b".text."):
            for at in range(begin, begin + length, 16):
                yield struct.unpack_from("<H", cubin, at)[0] & 0xFFF
