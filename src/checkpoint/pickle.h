#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

/// A tensor of a file that Python's `torch.save` made.
struct PickledTensor {
  std::string storage;  ///< its bytes are the record `data/STORAGE`
  std::string dtype;    ///< as in safetensors
  int64_t offset = 0;   ///< elements from the beginning of the storage
  std::vector<int64_t> shape, strides;

  auto operator<=>(const PickledTensor&) const = default;
};

/// Returns true if `torch.save` has a storage class of that dtype (as in safetensors).
bool is_pickled_dtype(const std::string& dtype);

/// Returns the tensors of a pickled dict by name, in its order; those of dicts in it as
/// `OUTER.INNER`. Leaves out values that are no tensors. Nothing is executed: only the operations
/// that `torch.save` writes for dicts of tensors are understood.
///
/// Throws `c10::ValueError` for anything else, and for a program that would take more memory or
/// time than a state dict does; see [Note: Reading a pickle].
std::vector<std::pair<std::string, PickledTensor>> unpickle_tensors(std::string_view bytes);

}  // namespace tessera
