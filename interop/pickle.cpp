#include "interop/pickle.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "base/files/untrusted.h"

namespace tessera {
namespace {

constexpr size_t kMostNameBytes = 4096, kMostNamed = size_t{1} << 20;
constexpr int kMostPickleDepth = 100;
// One dict of tensors may be in several dicts (`model` and `ema`, say).
constexpr int kMostPlaces = 8;

// The index of a checkpoint accepts no other names.
void check_tensor_name(std::string_view name) {
  TORCH_CHECK_VALUE(name.size() <= kMostNameBytes, "the name '", shortened(name), "' must have ",
                    kMostNameBytes, " bytes at most; it has ", name.size());
  try {
    static_cast<void>(nlohmann::json(name).dump());
  } catch (const nlohmann::json::exception&) {
    TORCH_CHECK_VALUE(false, "the name of a tensor must be UTF-8; got other bytes");
  }
}

// Collects the tensors of a dict and of the dicts in it.
class DictWalk {
 public:
  using Kind = PickleValue::Kind;

  explicit DictWalk(const Pickle& values) : values_(values) {}

  // Returns whether the dict, or a dict in it, has a tensor.
  bool collect(const PickleValue& dict, const std::string& prefix, int depth) {
    Seen& seen = seen_[&dict];
    TORCH_CHECK_VALUE(!seen.is_open, "its dicts hold each other");
    TORCH_CHECK_VALUE(depth < kMostPickleDepth, "its dicts must nest at most ", kMostPickleDepth,
                      " deep");
    if (seen.places > 0 && !seen.has_tensors) return false;
    TORCH_CHECK_VALUE(++seen.places <= kMostPlaces, "a dict with tensors must be in at most ",
                      kMostPlaces, " places");
    seen.is_open = true;
    for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
      const PickleValue &key = *dict.items[i], &value = *dict.items[i + 1];
      if (!value.is(Kind::kTensor) && !value.is(Kind::kDict)) continue;
      const std::string name = name_of(prefix, key);
      if (value.is(Kind::kDict)) {
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
    key.is(Kind::kInt) ? name += std::to_string(key.number) : name += key.text;
    check_tensor_name(name);
    return name;
  }

  void add(const std::string& name, const PickledTensor& tensor) {
    TORCH_CHECK_VALUE(tensors_.size() < kMostNamed, "it names more than ", kMostNamed, " tensors");
    tensors_.emplace_back(name, tensor);
  }

  const Pickle& values_;
  std::unordered_map<const PickleValue*, Seen> seen_;
  std::vector<std::pair<std::string, PickledTensor>> tensors_;
};

}  // namespace

std::vector<std::pair<std::string, PickledTensor>> named_tensors(const Pickle& pickle) {
  TORCH_CHECK_VALUE(pickle.root().is(PickleValue::Kind::kDict), "it must hold a dict of tensors");
  DictWalk walk(pickle);
  walk.collect(pickle.root(), "", 0);
  return std::move(walk).take();
}

}  // namespace tessera
