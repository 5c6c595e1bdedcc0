#include "checkpoint/pickle.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "checkpoint/pickle_value.h"
#include "checkpoint/shortened.h"

namespace tessera {
namespace {

// See [Note: Reading a pickle].
constexpr size_t kMostProgramBytes = size_t{64} << 20, kMostNameBytes = 4096,
                 kMostNamed = size_t{1} << 20;
constexpr int kMostPickleDepth = 100;
// One dict of tensors may be in several dicts (`model` and `ema`, say).
constexpr int kMostPlaces = 8;

constexpr std::array<std::pair<std::string_view, std::string_view>, 11> kStorages = {{
    {"DoubleStorage", "F64"},
    {"FloatStorage", "F32"},
    {"HalfStorage", "F16"},
    {"BFloat16Storage", "BF16"},
    {"LongStorage", "I64"},
    {"IntStorage", "I32"},
    {"ShortStorage", "I16"},
    {"CharStorage", "I8"},
    {"ByteStorage", "U8"},
    {"BoolStorage", "BOOL"},
    {"ComplexFloatStorage", "C64"},
}};

// The index of a checkpoint accepts no other names.
void check_name(const std::string& name) {
  TORCH_CHECK_VALUE(name.size() <= kMostNameBytes, "the name '", shortened(name), "' must have ",
                    kMostNameBytes, " bytes at most; it has ", name.size());
  try {
    static_cast<void>(nlohmann::json(name).dump());
  } catch (const nlohmann::json::exception&) {
    TORCH_CHECK_VALUE(false, "the name of a tensor must be UTF-8; got other bytes");
  }
}

class Collector {
 public:
  explicit Collector(const PickleValues& values) : values_(values) {}

  // Returns whether the dict, or a dict in it, has a tensor.
  bool collect(const PickleValue& dict, const std::string& prefix, int depth) {
    Seen& seen = seen_[&dict];
    TORCH_CHECK_VALUE(!seen.is_open, "its dicts hold each other");
    TORCH_CHECK_VALUE(depth < kMostPickleDepth, "its dicts must nest at most ", kMostPickleDepth, " deep");
    if (seen.places > 0 && !seen.has_tensors) return false;
    TORCH_CHECK_VALUE(++seen.places <= kMostPlaces, "a dict with tensors must be in at most ",
                      kMostPlaces, " places");
    seen.is_open = true;
    for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
      const PickleValue &key = *dict.items[i], &value = *dict.items[i + 1];
      if (!value.is(PickleValue::Kind::kTensor) && !value.is(PickleValue::Kind::kDict)) continue;
      const std::string name = name_of(prefix, key);
      if (value.is(PickleValue::Kind::kDict)) {
        seen.has_tensors = collect(value, name + ".", depth + 1) || seen.has_tensors;
      } else {
        add(name, values_.tensor(value));
        seen.has_tensors = true;
      }
    }
    seen.is_open = false;
    return seen.has_tensors;
  }

  std::vector<std::pair<std::string, PickledTensor>> take() && { return std::move(tensors_); }

 private:
  struct Seen {
    int places = 0;
    bool has_tensors = false, is_open = false;
  };

  static std::string name_of(const std::string& prefix, const PickleValue& key) {
    std::string name = prefix;
    key.is(PickleValue::Kind::kInt) ? name += std::to_string(key.number) : name += key.text;
    check_name(name);
    return name;
  }

  void add(const std::string& name, const PickledTensor& tensor) {
    TORCH_CHECK_VALUE(tensors_.size() < kMostNamed, "it names more than ", kMostNamed, " tensors");
    tensors_.emplace_back(name, tensor);
  }

  const PickleValues& values_;
  std::unordered_map<const PickleValue*, Seen> seen_;
  std::vector<std::pair<std::string, PickledTensor>> tensors_;
};

}  // namespace

std::string_view storage_dtype(std::string_view storage_class) {
  const auto* const it = std::find_if(kStorages.begin(), kStorages.end(), [&](const auto& storage) {
    return storage.first == storage_class;
  });
  return it == kStorages.end() ? std::string_view() : it->second;
}

bool is_pickled_dtype(const std::string& dtype) {
  return std::any_of(kStorages.begin(), kStorages.end(),
                     [&](const auto& storage) { return storage.second == dtype; });
}

std::vector<std::pair<std::string, PickledTensor>> unpickle_tensors(std::string_view bytes) {
  TORCH_CHECK_VALUE(bytes.size() <= kMostProgramBytes, "its program must have ",
                    kMostProgramBytes, " bytes at most; it has ", bytes.size());
  PickleValues values;
  const PickleValue* const value = run_pickle(bytes, values);
  TORCH_CHECK_VALUE(value->is(PickleValue::Kind::kDict), "it must hold a dict of tensors");
  Collector collector(values);
  collector.collect(*value, "", 0);
  return std::move(collector).take();
}

}  // namespace tessera
