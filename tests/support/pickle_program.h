#pragma once

#include <caffe2/serialize/inline_container.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing {

/// Pieces of pickles as `torch.save` writes them, each of which leaves one value on the stack.
namespace pickle {

inline std::string text(const std::string& value) {
  const auto size = static_cast<uint32_t>(value.size());
  return "X" + std::string(reinterpret_cast<const char*>(&size), 4) + value;
}
inline std::string number(int64_t value) {
  return "\x8a\x08" + std::string(reinterpret_cast<const char*>(&value), 8);
}
inline std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
inline std::string tuple(const std::vector<std::string>& items) {
  std::string result = "(";
  for (const std::string& item : items) result += item;
  return result + "t";
}
inline std::string numbers(const std::vector<int64_t>& values) {
  std::vector<std::string> items;
  for (const int64_t value : values) items.push_back(number(value));
  return tuple(items);
}
inline std::string dict(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string result = "}(";
  for (const auto& [name, value] : items) result += text(name) + value;
  return result + "u";
}
inline std::string put(uint8_t place) { return {'q', static_cast<char>(place)}; }
inline std::string get(uint8_t place) { return {'h', static_cast<char>(place)}; }

/// A tensor in the storage `key`, a record `data/KEY`, which says that it has `numel` elements.
inline std::string tensor(const std::string& key, int64_t numel, int64_t offset,
                          const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                          const std::string& storage_class = "FloatStorage") {
  const std::string storage = tuple({text("storage"), global("torch", storage_class), text(key),
                                     text("cpu"), number(numel)}) +
                              "Q";
  const std::string hooks = global("collections", "OrderedDict") + ")R";
  return global("torch._utils", "_rebuild_tensor_v2") +
         tuple({storage, number(offset), numbers(shape), numbers(strides), "\x89", hooks}) + "R";
}
/// Four floats in one dim, of the storage "0".
inline std::string four_floats() { return tensor("0", 4, 0, {4}, {1}); }

inline std::string program(const std::string& value) { return "\x80\x02" + value + "."; }

}  // namespace pickle

/// Writes a file as `torch.save` does, with any pickle and any records beside it.
inline void write_torch_file(const std::filesystem::path& path, const std::string& program,
                             const std::map<std::string, std::string>& records) {
  caffe2::serialize::PyTorchStreamWriter writer(path.string());
  writer.writeRecord("data.pkl", program.data(), program.size());
  writer.writeRecord("byteorder", "little", 6);
  for (const auto& [name, bytes] : records) writer.writeRecord(name, bytes.data(), bytes.size());
  writer.writeEndOfFile();
}

/// Writes tensors of floats and longs as `torch.save` writes a state dict.
inline void write_torch_state(const std::filesystem::path& path,
                              const std::vector<std::pair<std::string, torch::Tensor>>& state) {
  std::vector<std::pair<std::string, std::string>> items;
  std::map<std::string, std::string> records;
  for (const auto& [name, value] : state) {
    const torch::Tensor ordered = value.detach().cpu().contiguous();
    const std::string key = std::to_string(items.size());
    const bool is_long = value.scalar_type() == torch::kLong;
    items.emplace_back(
        name, pickle::tensor(key, value.numel(), 0, ordered.sizes().vec(), ordered.strides().vec(),
                             is_long ? "LongStorage" : "FloatStorage"));
    records["data/" + key].assign(static_cast<const char*>(ordered.data_ptr()), ordered.nbytes());
  }
  write_torch_file(path, pickle::program(pickle::dict(items)), records);
}

}  // namespace tessera::testing
