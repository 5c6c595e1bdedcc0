#include "checkpoint/safetensors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "checkpoint/checksum.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

// What is copied to the host or given to the disk at once.
constexpr int64_t kStagedBytes = 32 * kChecksumBlock;

constexpr std::array<std::pair<at::ScalarType, const char*>, 16> kDtypes = {{
    {at::kDouble, "F64"},
    {at::kFloat, "F32"},
    {at::kHalf, "F16"},
    {at::kBFloat16, "BF16"},
    {at::kFloat8_e5m2, "F8_E5M2"},
    {at::kFloat8_e4m3fn, "F8_E4M3"},
    {at::kComplexFloat, "C64"},
    {at::kLong, "I64"},
    {at::kInt, "I32"},
    {at::kShort, "I16"},
    {at::kChar, "I8"},
    {at::kByte, "U8"},
    {at::kUInt16, "U16"},
    {at::kUInt32, "U32"},
    {at::kUInt64, "U64"},
    {at::kBool, "BOOL"},
}};

int64_t item_size(const std::string& dtype) {
  return static_cast<int64_t>(c10::elementSize(scalar_type_of(dtype)));
}

int64_t numel_of(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

std::string safetensors_dtype(at::ScalarType dtype) {
  const auto it =
      std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& d) { return d.first == dtype; });
  TORCH_CHECK_NOT_IMPLEMENTED(it != kDtypes.end(), "[checkpoint] tensors of dtype ", dtype,
                              " can't be stored: the safetensors format has no such dtype");
  return it->second;
}

at::ScalarType scalar_type_of(const std::string& name) {
  const auto it =
      std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& d) { return d.second == name; });
  TORCH_CHECK_VALUE(it != kDtypes.end(), "[checkpoint] a tensor has the dtype '", name,
                    "', which is not known here");
  return it->first;
}

SafetensorsWriter::SafetensorsWriter(File file, std::vector<TensorHeader> tensors,
                                     const std::map<std::string, std::string>& metadata, Pace* pace)
    : file_(std::move(file)), pace_(pace) {
  // Wide elements first: then all of them are aligned, as some readers expect.
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return item_size(a.dtype) > item_size(b.dtype);
  });
  nlohmann::json header;
  header["__metadata__"] = metadata;
  int64_t end = 0;
  for (const TensorHeader& tensor : tensors) {
    const int64_t begin = end;
    end += numel_of(tensor.shape) * item_size(tensor.dtype);
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
    offsets_[tensor.name] = begin;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned
  const uint64_t length = text.size();
  file_.write(&length, sizeof(length), 0);
  file_.write(text.data(), length, sizeof(length));
  for (auto& [name, offset] : offsets_) offset += static_cast<int64_t>(sizeof(length) + length);
}

std::vector<uint64_t> SafetensorsWriter::write(const std::string& name, const at::Tensor& value) {
  const int64_t offset = offsets_.at(name), item = static_cast<int64_t>(value.element_size());
  if (value.is_cpu() && value.is_contiguous())
    return write_blocks(value.const_data_ptr(), value.numel() * item, offset);
  const at::Tensor flat = value.reshape({-1});
  std::vector<uint64_t> checksums;
  for (int64_t begin = 0; begin < flat.numel(); begin += kStagedBytes / item) {
    const int64_t count = std::min(kStagedBytes / item, flat.numel() - begin);
    const at::Tensor staged = flat.narrow(0, begin, count).cpu().contiguous();
    const auto more = write_blocks(staged.const_data_ptr(), count * item, offset + begin * item);
    checksums.insert(checksums.end(), more.begin(), more.end());
  }
  return checksums;
}

void SafetensorsWriter::write_part(const std::string& name, const void* data, size_t nbytes,
                                   int64_t offset) {
  put(data, nbytes, offsets_.at(name) + offset);
}

// A block at a time, while it is in the processor's cache.
std::vector<uint64_t> SafetensorsWriter::write_blocks(const void* data, int64_t nbytes,
                                                      int64_t offset) {
  std::vector<uint64_t> checksums;
  for (int64_t begin = 0; begin < nbytes; begin += kChecksumBlock) {
    const auto count = static_cast<size_t>(std::min(kChecksumBlock, nbytes - begin));
    const char* block = static_cast<const char*>(data) + begin;
    checksums.push_back(checksum(block, count));
    put(block, count, offset + begin);
  }
  return checksums;
}

void SafetensorsWriter::put(const void* data, size_t nbytes, int64_t offset) {
  if (pace_) pace_->wait_for(nbytes);
  file_.write(data, nbytes, offset);
  unsynced_ += static_cast<int64_t>(nbytes);
  if (unsynced_ < kStagedBytes) return;
  const int64_t end = offset + static_cast<int64_t>(nbytes);
  file_.start_sync(std::max<int64_t>(0, end - unsynced_), static_cast<size_t>(unsynced_));
  unsynced_ = 0;
}

SafetensorsFile::SafetensorsFile(File file) : file_(std::move(file)) {
  uint64_t length = 0;
  const int64_t nbytes = file_.nbytes();
  if (nbytes >= 8) file_.read(&length, sizeof(length), 0);
  TORCH_CHECK_VALUE(nbytes >= 8 && length <= static_cast<uint64_t>(nbytes - 8),
                    "[checkpoint] '", file_.path(), "' must be a safetensors file; its ",
                    nbytes, " bytes are too few for a header of ", length);
  std::string header(length, '\0');
  file_.read(header.data(), length, 8);
  try {
    parse(header, 8 + static_cast<int64_t>(length));
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, "[checkpoint] '", file_.path(),
                      "' must have a safetensors header: ", error.what());
  }
}

void SafetensorsFile::parse(const std::string& header, int64_t data_offset) {
  const nlohmann::json json = nlohmann::json::parse(header);
  for (const auto& [key, value] : json.items()) {
    if (key == "__metadata__") {
      metadata_ = value.get<std::map<std::string, std::string>>();
      continue;
    }
    Entry entry{.dtype = value.at("dtype"), .shape = value.at("shape")};
    entry.numel = numel_of(entry.shape);
    const int64_t begin = value.at("data_offsets").at(0), end = value.at("data_offsets").at(1);
    entry.offset = data_offset + begin;
    entry.nbytes = end - begin;
    TORCH_CHECK_VALUE(0 <= begin && begin <= end && data_offset + end <= file_.nbytes(),
                      "[checkpoint] '", file_.path(), "' is cut off: '", key,
                      "' ends at byte ", data_offset + end, " of ", file_.nbytes());
    entries_[key] = std::move(entry);
  }
}

std::vector<TensorHeader> SafetensorsFile::tensors() const {
  std::vector<std::pair<int64_t, TensorHeader>> placed;
  for (const auto& [name, entry] : entries_)
    placed.push_back({entry.offset, {name, entry.dtype, entry.shape}});
  std::stable_sort(placed.begin(), placed.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<TensorHeader> tensors;
  for (auto& [offset, tensor] : placed) tensors.push_back(std::move(tensor));
  return tensors;
}

void SafetensorsFile::check(const std::string& key, const std::string& dtype, int64_t numel) const {
  const auto it = entries_.find(key);
  TORCH_CHECK_VALUE(it != entries_.end(), "[checkpoint] '", file_.path(), "' lacks '", key,
                    "', which the index names");
  const Entry& entry = it->second;
  const int64_t item = item_size(dtype);
  TORCH_CHECK_VALUE(entry.dtype == dtype && entry.numel == numel && entry.nbytes == numel * item,
                    "[checkpoint] '", key, "' of '", file_.path(), "' must be ", numel,
                    " elements of ", dtype, "; got ", entry.numel, " of ", entry.dtype, " in ",
                    entry.nbytes, " bytes");
}

void SafetensorsFile::read(const std::string& key, int64_t offset, size_t nbytes, void* out) const {
  file_.read(out, nbytes, entries_.at(key).offset + offset);
}

}  // namespace tessera
