#include "interop/torch_file.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "base/files/json_text.h"
#include "base/files/untrusted.h"
#include "checkpoint/safetensors.h"

namespace tessera {
namespace {

// As in pickle.cpp: more than the names of a large model take.
constexpr int64_t kMostPickleBytes = int64_t{64} << 20;

// Limits of the tensors of one storage together: they may overlap, and repeat elements, but a small
// file must not make a large model.
constexpr int64_t kMostViews = 8, kMostSmallBytes = int64_t{16} << 20;

// [Note: Reading a zip file]
//
// LibTorch's own reader trusts the sizes that a file states, and allocates as much memory before it
// checks them. So the list of records is read here.
//
// A record at the end of the file says where the list of its records is; another one before it has
// the same in 64 bits, where 32 are too few. The list has, for each record, its name and the
// position of its header. Its bytes follow that. Everything is little endian.
constexpr uint32_t kEnd = 0x06054b50, kEnd64 = 0x06064b50, kEnd64Place = 0x07064b50,
                   kListed = 0x02014b50, kHeader = 0x04034b50;
constexpr int64_t kEndBytes = 22, kEnd64Bytes = 56, kEnd64PlaceBytes = 20, kHeaderBytes = 30;
constexpr int64_t kMostComment = 0xffff;
constexpr uint32_t kIn64 = 0xffffffff;  // the number is in the extra fields
constexpr uint16_t kSizes64 = 1;        // the extra field with numbers of 64 bits
// Enough for a million records with names of 200 bytes.
constexpr int64_t kMostListBytes = int64_t{256} << 20;

std::string read_bytes(const File& file, int64_t offset, int64_t nbytes) {
  const int64_t size = file.nbytes();
  TORCH_CHECK_VALUE(is_inside(offset, nbytes, size), "it must have ", nbytes, " bytes from byte ",
                    offset, " on; it has ", size);
  std::string bytes(static_cast<size_t>(nbytes), '\0');
  file.read(bytes.data(), bytes.size(), offset);
  return bytes;
}

// Reads a number of 64 bits that must fit into 63.
int64_t place(ByteReader& bytes) {
  const auto value = bytes.number<uint64_t>();
  TORCH_CHECK_VALUE(value <= static_cast<uint64_t>(INT64_MAX), "it refers to byte ", value,
                    ", which no file has");
  return static_cast<int64_t>(value);
}

std::optional<TorchFile::Record> find_list64(const File& file, int64_t end) {
  if (end < kEnd64PlaceBytes) return std::nullopt;
  const std::string text = read_bytes(file, end - kEnd64PlaceBytes, kEnd64PlaceBytes);
  ByteReader where(text);
  if (where.number<uint32_t>() != kEnd64Place) return std::nullopt;
  where.take(4);  // the disk
  const std::string record = read_bytes(file, place(where), kEnd64Bytes);
  ByteReader bytes(record);
  TORCH_CHECK_VALUE(bytes.number<uint32_t>() == kEnd64, "its end is not that of a zip file");
  bytes.take(36);  // sizes, versions, disks and numbers of records
  const int64_t nbytes = place(bytes);
  return TorchFile::Record{place(bytes), nbytes};
}

TorchFile::Record find_list(const File& file) {
  const int64_t nbytes = file.nbytes(), looked_at = std::min(nbytes, kEndBytes + kMostComment);
  const std::string tail = read_bytes(file, nbytes - looked_at, looked_at);
  for (int64_t begin = looked_at - kEndBytes; begin >= 0; --begin) {
    ByteReader bytes(std::string_view(tail).substr(static_cast<size_t>(begin)));
    if (bytes.number<uint32_t>() != kEnd) continue;
    bytes.take(8);  // disks and numbers of records
    const auto list_bytes = bytes.number<uint32_t>(), offset = bytes.number<uint32_t>();
    if (bytes.number<uint16_t>() != bytes.left()) continue;  // the comment
    const auto list = find_list64(file, nbytes - looked_at + begin);
    return list.value_or(TorchFile::Record{offset, list_bytes});
  }
  TORCH_CHECK_VALUE(false, "it is no zip file, or is cut off");
}

// A record's entry in the list.
struct Listed {
  std::string name;
  int64_t nbytes = 0, header = 0;
};

// Returns the numbers of 64 bits, in the order of the fields that they replace.
ByteReader sizes64(std::string_view extras) {
  ByteReader bytes(extras);
  while (bytes.left() >= 4) {
    const auto kind = bytes.number<uint16_t>(), nbytes = bytes.number<uint16_t>();
    const std::string_view extra = bytes.take(nbytes);
    if (kind == kSizes64) return ByteReader(extra);
  }
  return ByteReader({});
}

Listed read_listed(ByteReader& bytes) {
  TORCH_CHECK_VALUE(bytes.number<uint32_t>() == kListed, "its list of records is broken");
  bytes.take(4);  // versions
  const auto flags = bytes.number<uint16_t>(), method = bytes.number<uint16_t>();
  bytes.take(8);  // time, checksum
  const auto stored = bytes.number<uint32_t>(), nbytes = bytes.number<uint32_t>();
  const auto name = bytes.number<uint16_t>(), extras = bytes.number<uint16_t>(),
             comment = bytes.number<uint16_t>();
  bytes.take(8);  // disk, attributes
  const auto header = bytes.number<uint32_t>();
  Listed record{std::string(bytes.take(name)), nbytes, header};
  ByteReader wide = sizes64(bytes.take(extras));
  bytes.take(comment);
  if (nbytes == kIn64) record.nbytes = place(wide);
  const int64_t stored_bytes = stored == kIn64 ? place(wide) : stored;
  if (header == kIn64) record.header = place(wide);
  TORCH_CHECK_VALUE((flags & 1) == 0, "'", record.name, "' is encrypted");
  TORCH_CHECK_VALUE(method == 0 && stored_bytes == record.nbytes, "'", record.name,
                    "' is compressed, which torch.save does not do");
  return record;
}

TorchFile::Record find_bytes(const File& file, const Listed& listed) {
  const std::string header = read_bytes(file, listed.header, kHeaderBytes);
  ByteReader bytes(header);
  TORCH_CHECK_VALUE(bytes.number<uint32_t>() == kHeader, "'", listed.name, "' has no header");
  bytes.take(22);
  const int64_t name = bytes.number<uint16_t>(), extras = bytes.number<uint16_t>();
  const int64_t offset = listed.header + kHeaderBytes + name + extras;
  const int64_t size = file.nbytes();
  TORCH_CHECK_VALUE(is_inside(offset, listed.nbytes, size), "'", listed.name,
                    "' is cut off: it has ", listed.nbytes, " bytes at ", offset, " of ", size);
  return {offset, listed.nbytes};
}

// Throws `c10::ValueError`, without the file's name, if the file is no zip file, or if records are
// compressed or encrypted, overlap, or are not in the file. The names are without the folder that
// contains all records of a file that `torch.save` made.
std::map<std::string, TorchFile::Record> read_zip_list(const File& file) {
  const TorchFile::Record list = find_list(file);
  TORCH_CHECK_VALUE(list.nbytes <= kMostListBytes, "its list of records has ", list.nbytes,
                    " bytes; expected ", kMostListBytes, " at most");
  const std::string text = read_bytes(file, list.offset, list.nbytes);
  std::map<std::string, TorchFile::Record> records;
  int64_t total = 0;
  for (ByteReader bytes(text); bytes.left() > 0;) {
    const Listed listed = read_listed(bytes);
    const TorchFile::Record record = find_bytes(file, listed);
    total = checked_sum(total, record.nbytes);
    const std::string name = listed.name.substr(listed.name.find('/') + 1);  // npos + 1 is 0
    TORCH_CHECK_VALUE(records.emplace(name, record).second, "it has '", listed.name, "' twice");
  }
  const int64_t size = file.nbytes();
  TORCH_CHECK_VALUE(total <= size, "its records have ", total, " bytes, and it has ", size);
  return records;
}

std::string record_of(const PickledTensor& tensor) { return "data/" + tensor.storage; }

constexpr const char* kExpected = "must be a state dict as torch.save writes it since PyTorch 1.6";

}  // namespace

TorchFile::TorchFile(const std::filesystem::path& path) : file_(File::open_file(path)) {
  naming_file("import_checkpoint", path.string(), kExpected, [&] {
    records_ = read_zip_list(file_);
    const std::string order = read_record("byteorder", 16, "little");
    TORCH_CHECK_VALUE(order == "little", "it was written by a big-endian machine");
    tensors_ = named_tensors(Pickle(read_record("data.pkl", kMostPickleBytes)));
    std::set<PickledTensor> seen;         // equal views are one tensor
    std::map<std::string, int64_t> used;  // bytes of the tensors of a storage
    for (const auto& [name, tensor] : tensors_)
      naming_part("'" + name + "'", [&, &tensor = tensor] { count_bytes(tensor, seen, used); });
  });
}

std::string TorchFile::read_record(const std::string& name, int64_t most,
                                   const std::optional<std::string>& otherwise) const {
  const auto it = records_.find(name);
  if (it == records_.end() && otherwise) return *otherwise;
  TORCH_CHECK_VALUE(it != records_.end(), "it lacks '", name, "'");
  TORCH_CHECK_VALUE(it->second.nbytes <= most, "its '", name, "' must have at most ", most,
                    " bytes; it has ", it->second.nbytes);
  return read_bytes(file_, it->second.offset, it->second.nbytes);
}

const TorchFile::Record& TorchFile::storage_of(const PickledTensor& tensor) const {
  const auto it = records_.find(record_of(tensor));
  TORCH_CHECK_VALUE(it != records_.end(), "it lacks '", record_of(tensor), "'");
  const CheckedShape shape(tensor.shape, item_size(tensor.dtype));
  const int64_t end = checked_sum(tensor.offset, shape.reach(tensor.strides));
  TORCH_CHECK_VALUE(
      tensor.offset >= 0 && checked_product(end, item_size(tensor.dtype)) <= it->second.nbytes,
      "it does not fit into the ", it->second.nbytes, " bytes of its storage");
  return it->second;
}

void TorchFile::count_bytes(const PickledTensor& tensor, std::set<PickledTensor>& seen,
                            std::map<std::string, int64_t>& used) const {
  const int64_t stored = storage_of(tensor).nbytes;
  if (!seen.insert(tensor).second) return;
  int64_t& bytes = used[tensor.storage];
  bytes = checked_sum(bytes, CheckedShape(tensor.shape, item_size(tensor.dtype)).nbytes());
  TORCH_CHECK_VALUE(bytes <= std::max(kMostSmallBytes, kMostViews * stored),
                    "it and others repeat the ", stored,
                    " bytes of its storage; clone() the expanded tensors before torch.save");
}

void TorchFile::read_bytes_of(const PickledTensor& tensor, int64_t offset, size_t nbytes,
                              void* out) const {
  file_.read(out, nbytes,
             storage_of(tensor).offset + tensor.offset * item_size(tensor.dtype) + offset);
}

// Reads straight from the file, as torch.save does not compress, and only the tensor's elements.
at::Tensor TorchFile::read(const PickledTensor& tensor) const {
  const int64_t count = CheckedShape(tensor.shape).reach(tensor.strides);
  const auto dtype = scalar_type_of(tensor.dtype);
  if (count == 0) return at::empty(tensor.shape, dtype);
  const at::Tensor flat = at::empty({count}, dtype);
  read_bytes_of(tensor, 0, flat.nbytes(), flat.mutable_data_ptr());
  return at::as_strided(flat, tensor.shape, tensor.strides).contiguous();
}

}  // namespace tessera
