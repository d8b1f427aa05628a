# SPDX-License-Identifier: Apache-2.0
"""Generators of attention modules: built-in ones and user-defined variants."""

from . import variants as variants
from .customize import *
from .front_doors import *
from .modules import *
from .uri import *
