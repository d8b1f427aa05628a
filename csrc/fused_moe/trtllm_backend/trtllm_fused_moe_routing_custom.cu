// SPDX-License-Identifier: Apache-2.0
// The path that the guide names beside FLASHINFER_ROUTING_FORCE_BLOCK_PER_TOKEN: the launcher of routing that reads the
// choice is csrc/moe_routing.cu.
#include "../../moe_routing.cu"
