#pragma once

#include <tessera/comm/process_group.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// A backend for tensors on devices that `WorldOptions::backend` can name.
struct RegisteredBackend {
  c10::DeviceType device = c10::DeviceType::CPU;
  BackendFactory make;
};

std::optional<RegisteredBackend> find_backend(const std::string& name);
std::vector<std::string> backend_names();

/// Makes a process group of `host` and, for tensors on devices, of the backend. Collective.
ProcessGroupPtr with_backend(const RegisteredBackend& backend, const ProcessGroupPtr& host,
                             const c10::intrusive_ptr<c10d::Store>& store);

/// NCCL. Where LibTorch has no CUDA, its factory throws `c10::NotImplementedError`.
RegisteredBackend nccl_backend();

}  // namespace tessera
