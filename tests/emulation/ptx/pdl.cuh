// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/pdl.cuh: grids run one after another.
#pragma once

namespace flashinfer {
namespace ptx {

inline void GridDependencyWait() {}
inline void LaunchDependents() {}
inline void LaunchDependentsOfFew() {}

}  // namespace ptx
}  // namespace flashinfer
