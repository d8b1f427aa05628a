// SPDX-License-Identifier: Apache-2.0
// The parameters of attention kernels under the path that the development guide names: common/params.h defines them.
#pragma once

#include "common/params.h"
