// SPDX-License-Identifier: Apache-2.0
// What the attention kernels share.
//   numbers.cuh    pairs of 16 bits, fp8, NVFP4           rows.cuh       rows in memory and in shared memory
//   items.cuh      where a block finds its work           query.cuh      the query of a tile
//   hooks.cuh      what hooks of a variant change         residence.cuh  launching resident blocks
#pragma once
#include "../ptx/atomic.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/pdl.cuh"
#include "hooks.cuh"
#include "items.cuh"
#include "query.cuh"
#include "residence.cuh"
#include "rows.cuh"
