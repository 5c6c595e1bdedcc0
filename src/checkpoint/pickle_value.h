#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/pickle.h"

namespace tessera {

/// A value that a pickle makes; see [Note: Reading a pickle].
struct PickleValue {
  enum class Kind : uint8_t {
    kOther,  ///< left out of the result
    kMark,
    kInt,
    kText,
    kGlobal,
    kTuple,
    kList,
    kDict,
    kStorage,
    kTensor
  };
  Kind kind = Kind::kOther;
  int64_t number = 0;     ///< of an int; of a storage or a tensor: index in `PickleValues::tensors`
  std::string_view text;  ///< of a text, or a global's name
  std::string_view module;            ///< of a global
  std::vector<PickleValue*> items{};  ///< elements; keys and values of a dict alternate

  bool is(Kind other) const { return kind == other; }
  bool is_global(std::string_view in_module, std::string_view name) const {
    return is(Kind::kGlobal) && module == in_module && text == name;
  }
};

/// The values of one pickle. They may refer to each other in any way, in cycles and many levels
/// deep, and are freed all at once. Their texts are parts of the program, which must outlive them.
class PickleValues {
 public:
  /// All marks share one value, and so do all values that are left out. Throws `c10::ValueError` if
  /// there are too many values.
  PickleValue* make(PickleValue::Kind kind);
  PickleValue* empty_tuple() { return &empty_tuple_; }
  PickleValue* make_int(int64_t number);
  PickleValue* make_text(std::string_view text);
  /// `kind`: a storage, or a tensor.
  PickleValue* make_tensor(PickleValue::Kind kind, PickledTensor tensor);
  const PickledTensor& tensor(const PickleValue& value) const { return tensors_[value.number]; }

 private:
  PickleValue mark_{.kind = PickleValue::Kind::kMark}, other_,
      empty_tuple_{.kind = PickleValue::Kind::kTuple};
  std::deque<PickleValue> values_;
  std::deque<PickledTensor> tensors_;
};

/// Returns the value that the program of a pickle makes. Throws `c10::ValueError`.
const PickleValue* run_pickle(std::string_view program, PickleValues& values);

/// Returns the dtype (as in safetensors) of a storage class of the module `torch`; empty if
/// unknown.
std::string_view storage_dtype(std::string_view storage_class);

}  // namespace tessera
