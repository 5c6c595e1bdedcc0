#pragma once

#include <c10/core/StorageImpl.h>

#include <string>
#include <utility>

namespace tessera {

/// Takes the memory of `storage` away: a raw `data_ptr()` then throws `why`. The size stays, as
/// views must pass LibTorch's bounds checks.
inline void take_memory(c10::StorageImpl& storage, const std::string& why) {
  const auto device = storage._mutable_data_ptr_no_checks().device();
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, device));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}

/// Gives the storage memory again.
inline void give_memory(c10::StorageImpl& storage, at::DataPtr memory) {
  storage.clear_data_ptr_access_error_msg_();
  storage.set_data_ptr_noswap(std::move(memory));
}

}  // namespace tessera
