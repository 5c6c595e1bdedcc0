#pragma once

#include <ATen/core/Tensor.h>

namespace torch {
class Library;
}

namespace tessera::testing::sim {

/// Copies values between the host and devices, or within and between devices; `to` decides sizes
/// and dtype. The host returns at once, except that copies from or to the host wait for their end
/// unless the host's memory is pinned and `non_blocking`.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

/// As resize_(): contiguous, with more memory if needed.
void resize_tensor(const at::Tensor& tensor, at::IntArrayRef sizes);
/// Keeps the first bytes.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

/// Registers allocation, copies, views and changes of storages.
void register_copies(torch::Library& aten);

/// Registers the dtypes of operators under autocast, which are CUDA's.
void register_autocast();

}  // namespace tessera::testing::sim
