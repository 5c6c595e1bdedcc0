#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Writes a pickle of plain values and of objects of Python's classes, which `pickle.load` reads.
/// The calls are nested as the values are.
class PickleWriter {
 public:
  using Write = std::function<void()>;  ///< writes one value, or those of a container

  PickleWriter();
  void none() { program_ += 'N'; }
  void flag(bool value) { program_ += value ? '\x88' : '\x89'; }
  void whole(int64_t value);
  void text(std::string_view value);
  void global(std::string_view module, std::string_view name);
  void tuple(const Write& items);
  void list(const Write& items);
  /// `items` writes keys and values in turns.
  void dict(const Write& items);
  /// The result of a call.
  void call(std::string_view module, std::string_view name, const Write& arguments);
  /// An object whose attributes, or other state, `state` writes as one value.
  void object(std::string_view module, std::string_view name, const Write& state);
  /// A `torch.Size`.
  void size(const std::vector<int64_t>& sizes);

  /// Ends the pickle, and returns it.
  std::string take() &&;

 private:
  std::string program_;
};

}  // namespace tessera
