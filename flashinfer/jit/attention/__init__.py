# SPDX-License-Identifier: Apache-2.0
"""Attention modules: generators of the built-in ones and of users' own variants."""

from . import variants as variants
from .customize import *
from .front_doors import *
from .modules import *
from .uri import *
