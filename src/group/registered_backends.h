#pragma once

#include <tessera/process_group.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// A backend for tensors on devices, which `WorldOptions::backend` can name.
struct RegisteredBackend {
  c10::DeviceType device = c10::DeviceType::CPU;
  BackendFactory make;
};

std::optional<RegisteredBackend> find_backend(const std::string& name);
std::vector<std::string> backend_names();

/// Makes a process group of the backend, for tensors on devices alone. Collective.
ProcessGroupPtr process_group_of(const RegisteredBackend& backend,
                                 const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                 std::chrono::milliseconds timeout);

/// NCCL. Where LibTorch has no CUDA, its factory throws `c10::NotImplementedError`.
RegisteredBackend nccl_backend();

}  // namespace tessera
