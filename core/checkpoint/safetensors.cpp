#include "checkpoint/safetensors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/dispatch/math_bits.h"
#include "base/files/json_text.h"
#include "base/files/untrusted.h"
#include "checkpoint/checksum.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

// Bytes that are copied to the host, or passed on to the disk, at once.
constexpr int64_t kStagedBytes = 32 * kChecksumBlock;

// Defined by the format.
constexpr uint64_t kMostHeaderBytes = 100'000'000;
constexpr const char* kMetadata = "__metadata__";

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
  TORCH_CHECK_VALUE(it != kDtypes.end(), "[checkpoint] a tensor has the dtype '", shortened(name),
                    "', which is not known here");
  return it->first;
}

int64_t item_size(const std::string& safetensors_dtype) {
  return static_cast<int64_t>(c10::elementSize(scalar_type_of(safetensors_dtype)));
}

SafetensorsWriter::SafetensorsWriter(File file, std::vector<TensorHeader> tensors,
                                     const std::map<std::string, std::string>& metadata,
                                     BeforeWrite before_write)
    : file_(std::move(file)), before_write_(std::move(before_write)) {
  // Wide elements first: that aligns all of them, as some readers expect.
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return item_size(a.dtype) > item_size(b.dtype);
  });
  nlohmann::json header;
  header[kMetadata] = metadata;
  int64_t end = 0;
  for (const TensorHeader& tensor : tensors) {
    const int64_t begin = end;
    end = checked_sum(end, CheckedShape(tensor.shape, item_size(tensor.dtype)).nbytes());
    TORCH_CHECK_VALUE(tensor.name != kMetadata && offsets_.emplace(tensor.name, begin).second,
                      "[checkpoint] '", tensor.name, "' can't be the name of a tensor in '",
                      file_.path(), "': it has that name already");
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned
  const uint64_t length = text.size();
  TORCH_CHECK_VALUE(length <= kMostHeaderBytes, "[checkpoint] the header of '", file_.path(),
                    "' must have at most ", kMostHeaderBytes, " bytes; it would have ", length);
  file_.write(&length, sizeof(length), 0);
  file_.write(text.data(), length, sizeof(length));
  for (auto& [name, offset] : offsets_) offset += static_cast<int64_t>(sizeof(length) + length);
}

std::vector<uint64_t> SafetensorsWriter::write(const std::string& name, const at::Tensor& given) {
  const at::Tensor value = with_plain_memory(given);
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

// Writes a block at a time, while it is in the processor's cache.
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
  if (before_write_) before_write_(nbytes);
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
  TORCH_CHECK_VALUE(nbytes >= 8 && length <= static_cast<uint64_t>(nbytes - 8), "[checkpoint] '",
                    file_.path(), "' must be a safetensors file; its ", nbytes,
                    " bytes are too few for a header of ", length);
  TORCH_CHECK_VALUE(length <= kMostHeaderBytes, "[checkpoint] '", file_.path(),
                    "' must have a safetensors header of at most ", kMostHeaderBytes,
                    " bytes; it has one of ", length);
  std::string header(length, '\0');
  file_.read(header.data(), length, 8);
  naming_file("checkpoint", file_.path(), "must have a safetensors header", [&] {
    parse(header, 8 + static_cast<int64_t>(length));
    check_apart();
  });
}

void SafetensorsFile::parse(const std::string& header, int64_t data_offset) {
  const nlohmann::json json = parse_json(header);
  TORCH_CHECK_VALUE(json.is_object(), "it is ", json.type_name(), ", not an object");
  for (const auto& item : json.items()) {
    if (item.key() == kMetadata) {
      metadata_ = item.value().get<std::map<std::string, std::string>>();
      continue;
    }
    naming_part("'" + shortened(item.key()) + "'",
                [&] { entries_[item.key()] = parse_entry(item.value(), data_offset); });
  }
}

SafetensorsFile::Entry SafetensorsFile::parse_entry(const nlohmann::json& value,
                                                    int64_t data_offset) const {
  Entry result{.dtype = value.at("dtype"), .shape = whole_numbers(value.at("shape"), "a size")};
  result.numel = CheckedShape(result.shape).numel();
  const std::vector<int64_t> offsets = whole_numbers(value.at("data_offsets"), "an offset");
  TORCH_CHECK_VALUE(offsets.size() == 2 && offsets[0] <= offsets[1],
                    "its data_offsets must be two places, the second not before the first");
  const int64_t data_bytes = file_.nbytes() - data_offset;
  TORCH_CHECK_VALUE(offsets[1] <= data_bytes, "it is cut off: it ends at byte ", offsets[1], " of ",
                    data_bytes);
  result.offset = data_offset + offsets[0];
  result.nbytes = offsets[1] - offsets[0];
  return result;
}

std::vector<const SafetensorsFile::Named*> SafetensorsFile::placed() const {
  std::vector<const Named*> items;
  for (const Named& item : entries_) items.push_back(&item);
  std::stable_sort(items.begin(), items.end(), [](const Named* a, const Named* b) {
    return a->second.offset < b->second.offset;
  });
  return items;
}

// If tensors overlapped, a small file could make a large model.
void SafetensorsFile::check_apart() const {
  const Named* before = nullptr;
  for (const Named* item : placed()) {
    if (item->second.nbytes == 0) continue;
    TORCH_CHECK_VALUE(
        !before || before->second.offset + before->second.nbytes <= item->second.offset, "'",
        shortened(before ? before->first : ""), "' and '", shortened(item->first),
        "' lie over each other");
    before = item;
  }
}

std::map<std::string, std::vector<std::string>> SafetensorsFile::other_names() const {
  std::map<std::string, std::vector<std::string>> names;
  for (const auto& [other, kept] : metadata_)
    if (other != kept) names[kept].push_back(other);
  return names;
}

const SafetensorsFile::Entry& SafetensorsFile::entry(const std::string& key) const {
  const auto it = entries_.find(key);
  TORCH_CHECK_VALUE(it != entries_.end(), "[checkpoint] '", file_.path(), "' lacks '",
                    shortened(key), "', which the index names");
  return it->second;
}

std::vector<TensorHeader> SafetensorsFile::tensors() const {
  std::vector<TensorHeader> tensors;
  for (const Named* item : placed())
    tensors.push_back({item->first, item->second.dtype, item->second.shape});
  return tensors;
}

void SafetensorsFile::check(const std::string& key, const std::string& dtype, int64_t numel) const {
  const Entry& found = entry(key);
  const int64_t nbytes = checked_product(numel, item_size(dtype));
  TORCH_CHECK_VALUE(found.dtype == dtype && found.numel == numel && found.nbytes == nbytes,
                    "[checkpoint] '", shortened(key), "' of '", file_.path(), "' must be ", numel,
                    " elements of ", dtype, "; got ", found.numel, " of ", found.dtype, " in ",
                    found.nbytes, " bytes");
}

void SafetensorsFile::read(const std::string& key, int64_t offset, size_t nbytes, void* out) const {
  const Entry& found = entry(key);
  TORCH_CHECK_VALUE(is_inside(offset, static_cast<int64_t>(nbytes), found.nbytes), "[checkpoint] '",
                    shortened(key), "' of '", file_.path(), "' has ", found.nbytes,
                    " bytes; expected ", nbytes, " from ", offset, " on");
  file_.read(out, nbytes, found.offset + offset);
}

}  // namespace tessera
