# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the order of tokens by expert."""

from ..permute import moe_permute as moe_permute
from ..permute import moe_unpermute as moe_unpermute
from ..sort import get_max_num_permuted_tokens as get_max_num_permuted_tokens
from ..sort import get_max_num_tiles as get_max_num_tiles
from ..sort import moe_sort as moe_sort
