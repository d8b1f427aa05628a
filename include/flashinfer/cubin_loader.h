// SPDX-License-Identifier: Apache-2.0
// Kernel binaries by name and SHA-256, for a library that launches kernels it was not compiled with.
//
// Include this file in one unit of a library, open the library with flashinfer.jit.cubin_loader.setup_cubin_loader(path),
// and call GetCubin: Python looks in FLASHINFER_CUBIN_DIR, in the package flashinfer-cubin and in the repository. What it
// returns is for cuModuleLoadData. Test: tests/jit/test_cubin_callback.py.
#pragma once

#include <stdexcept>
#include <string>

namespace flashinfer {

using CubinCallback = void (*)(const char* path, const char* sha256);

inline CubinCallback cubin_callback = nullptr;
inline thread_local std::string current_cubin;  // the callback runs on the thread that asks

/// Returns the bytes of a kernel binary; throws if the loader is not set up or has no such file with this SHA-256.
inline std::string GetCubin(const std::string& path, const std::string& sha256) {
  if (cubin_callback == nullptr) {
    throw std::runtime_error("GetCubin: setup_cubin_loader must be called with this library before " + path);
  }
  current_cubin.clear();
  cubin_callback(path.c_str(), sha256.c_str());
  if (current_cubin.empty()) throw std::runtime_error("GetCubin: " + path + " with SHA-256 " + sha256 + " is not here");
  return current_cubin;
}

}  // namespace flashinfer

extern "C" {

__attribute__((visibility("default"))) void FlashInferSetCubinCallback(flashinfer::CubinCallback callback) {
  flashinfer::cubin_callback = callback;
}

__attribute__((visibility("default"))) void FlashInferSetCurrentCubin(const char* bytes, int size) {
  flashinfer::current_cubin.assign(bytes, size);
}

}  // extern "C"
