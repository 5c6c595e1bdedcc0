#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
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

/// A value that a pickle makes. Values may refer to each other in any way, in cycles and many
/// levels deep: code that follows them must limit its steps.
struct PickleValue {
  enum class Kind : uint8_t {
    kOther,  ///< not represented: `None`, a function's result, ...
    kMark,
    kInt,  ///< also a bool
    kText,
    kGlobal,
    kTuple,
    kList,
    kDict,
    kStorage,
    kTensor
  };
  Kind kind = Kind::kOther;
  int64_t number = 0;       ///< of an int; of a storage or a tensor: index for `Pickle::tensor()`
  std::string_view text;    ///< of a text; the name of a global
  std::string_view module;  ///< of a global
  std::vector<PickleValue*> items{};  ///< elements; keys and values of a dict alternate

  bool is(Kind other) const { return kind == other; }
  bool is_global(std::string_view in_module, std::string_view name) const {
    return is(Kind::kGlobal) && module == in_module && text == name;
  }
};

class PickleValues;

/// The values that a pickle makes. Nothing is executed: see [Note: Reading a pickle].
class Pickle {
 public:
  /// Throws `c10::ValueError` for operations that `torch.save` has no need for, and for a program
  /// that would take more memory or time than its files do.
  explicit Pickle(std::string program);
  ~Pickle();
  Pickle(const Pickle&) = delete;
  Pickle& operator=(const Pickle&) = delete;

  const PickleValue& root() const { return *root_; }
  const PickledTensor& tensor(const PickleValue& value) const;

 private:
  const std::string program_;  // the texts of the values are parts of it
  std::unique_ptr<PickleValues> values_;
  const PickleValue* root_;
};

}  // namespace tessera
