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
    kReal,
    kText,
    kGlobal,
    kTuple,
    kList,
    kDict,
    kObject,  ///< of a class of the list in pickle_machine.cpp
    kStorage,
    kTensor
  };
  Kind kind = Kind::kOther;
  int64_t number = 0;       ///< of an int; of a storage or a tensor: index for `Pickle::tensor()`
  double real = 0;          ///< of a real
  std::string_view text;    ///< of a text; the name of a global, or of an object's class
  std::string_view module;  ///< of a global, or of an object's class
  std::vector<PickleValue*>
      items{};  ///< elements; keys and values of a dict alternate; an object's state

  bool is(Kind other) const { return kind == other; }
  bool is_list() const { return is(Kind::kList) || is(Kind::kTuple); }
  bool is_global(std::string_view in_module, std::string_view name) const {
    return is(Kind::kGlobal) && module == in_module && text == name;
  }
  bool is_object(std::string_view name) const { return is(Kind::kObject) && text == name; }

  /// Returns the value of a dict for a key that is a text, or an object's attribute; null if there
  /// is none.
  const PickleValue* find(std::string_view key) const;
  /// The same; throws `c10::ValueError`, which names the key, if there is none.
  const PickleValue& at(std::string_view key) const;
  /// Throw `c10::ValueError` for a value of another kind.
  std::string string() const;
  int64_t whole() const;
  /// Returns the elements of a tuple or a list, which must be numbers of sizes or offsets.
  std::vector<int64_t> sizes() const;
  /// Returns an int, a bool or a real; nothing for other values.
  std::optional<double> as_number() const;
};

class PickleValues;

/// The values that a pickle makes. Nothing is executed: see [Note: Reading a pickle].
class Pickle {
 public:
  /// Throws `c10::ValueError` for operations that `torch.save`, or the metadata of
  /// `torch.distributed.checkpoint`, has no need for, and for a program that would take more memory
  /// or time than those do.
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

/// Returns true if `torch.save` has a storage class of that dtype (as in safetensors).
bool is_pickled_dtype(const std::string& dtype);
/// Returns the storage class of such a dtype, as `FloatStorage`.
std::string storage_class_of(const std::string& dtype);

}  // namespace tessera
