// SPDX-License-Identifier: Apache-2.0
// Common includes of the attention kernels.
//   convert.cuh        pairs of 16 bits, fp8, NVFP4    kv_rows.cuh           rows in memory and in shared memory
//   work_items.cuh     where a block finds its work    query.cuh             the query of a tile
//   variant_hooks.cuh  what hooks of a variant change  device/occupancy.cuh  launching resident blocks
#pragma once
#include "../../ptx/atomic.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/pdl.cuh"
#include "variant_hooks.cuh"
#include "work_items.cuh"
#include "query.cuh"
#include "../../device/occupancy.cuh"
#include "kv_rows.cuh"
