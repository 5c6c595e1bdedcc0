#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

/// A tensor of a file that Python's `torch.save` made.
struct PickledTensor {
  std::string storage;  ///< the record `data/STORAGE` has its bytes
  std::string dtype;    ///< as in safetensors
  int64_t offset = 0;   ///< elements from the beginning of the storage
  std::vector<int64_t> shape, strides;
};

/// True if `torch.save` has a storage class of that dtype (as in safetensors).
bool is_pickled_dtype(const std::string& dtype);

/// The tensors of a pickled dict by name, in its order; those of dicts in it as `OUTER.INNER`. What
/// is no tensor is left out. Nothing is executed: only what `torch.save` writes for dicts of
/// tensors is understood.
///
/// Throws `c10::ValueError` for anything else, and for a program that would take more memory or
/// time than a state dict does; see [Note: Reading a pickle].
std::vector<std::pair<std::string, PickledTensor>> unpickle_tensors(std::string_view bytes);

}  // namespace tessera
