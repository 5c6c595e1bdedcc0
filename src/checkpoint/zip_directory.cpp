#include "checkpoint/zip_directory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "checkpoint/byte_reader.h"
#include "checkpoint/checked_shape.h"

namespace tessera {
namespace {

// [Note: Reading a zip file]
//
// A record at the end of the file says where the list of its records is; another one before it has
// the same in 64 bits, where 32 are too few. The list has, for each record, its name and the
// position of its header, which its bytes follow. Everything is little endian.
constexpr uint32_t kEnd = 0x06054b50, kEnd64 = 0x06064b50, kEnd64Place = 0x07064b50,
                   kListed = 0x02014b50, kHeader = 0x04034b50;
constexpr int64_t kEndBytes = 22, kEnd64Bytes = 56, kEnd64PlaceBytes = 20, kHeaderBytes = 30;
constexpr int64_t kMostComment = 0xffff;
constexpr uint32_t kIn64 = 0xffffffff;  // the number is in the extra fields
constexpr uint16_t kSizes64 = 1;        // the extra field with numbers of 64 bits
// Enough for a million records with names of 200 bytes.
constexpr int64_t kMostListBytes = int64_t{256} << 20;

std::string read(const File& file, int64_t offset, int64_t nbytes) {
  TORCH_CHECK_VALUE(is_inside(offset, nbytes, file.nbytes()), "bytes ", offset, " and ", nbytes,
                    " from there on are expected in a file of ", file.nbytes());
  std::string bytes(static_cast<size_t>(nbytes), '\0');
  file.read(bytes.data(), bytes.size(), offset);
  return bytes;
}

struct List {
  int64_t offset = 0, nbytes = 0;
};

// Reads a number of 64 bits that must fit into 63.
int64_t place(ByteReader& bytes) {
  const auto value = bytes.number<uint64_t>();
  TORCH_CHECK_VALUE(value <= static_cast<uint64_t>(INT64_MAX), "a place in it is ", value);
  return static_cast<int64_t>(value);
}

std::optional<List> find_list64(const File& file, int64_t end) {
  if (end < kEnd64PlaceBytes) return std::nullopt;
  const std::string text = read(file, end - kEnd64PlaceBytes, kEnd64PlaceBytes);
  ByteReader where(text);
  if (where.number<uint32_t>() != kEnd64Place) return std::nullopt;
  where.take(4);  // the disk
  const std::string record = read(file, place(where), kEnd64Bytes);
  ByteReader bytes(record);
  TORCH_CHECK_VALUE(bytes.number<uint32_t>() == kEnd64, "its end is not that of a zip file");
  bytes.take(36);  // sizes, versions, disks and numbers of records
  const int64_t nbytes = place(bytes);
  return List{place(bytes), nbytes};
}

List find_list(const File& file) {
  const int64_t nbytes = file.nbytes(), looked_at = std::min(nbytes, kEndBytes + kMostComment);
  const std::string tail = read(file, nbytes - looked_at, looked_at);
  for (int64_t begin = looked_at - kEndBytes; begin >= 0; --begin) {
    ByteReader bytes(std::string_view(tail).substr(static_cast<size_t>(begin)));
    if (bytes.number<uint32_t>() != kEnd) continue;
    bytes.take(8);  // disks and numbers of records
    const auto list_bytes = bytes.number<uint32_t>(), offset = bytes.number<uint32_t>();
    if (bytes.number<uint16_t>() != bytes.left()) continue;  // the comment
    const auto list = find_list64(file, nbytes - looked_at + begin);
    return list ? *list : List{offset, list_bytes};
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

ZipDirectory::Record find_bytes(const File& file, const Listed& listed) {
  const std::string header = read(file, listed.header, kHeaderBytes);
  ByteReader bytes(header);
  TORCH_CHECK_VALUE(bytes.number<uint32_t>() == kHeader, "'", listed.name, "' has no header");
  bytes.take(22);
  const int64_t name = bytes.number<uint16_t>(), extras = bytes.number<uint16_t>();
  const int64_t offset = listed.header + kHeaderBytes + name + extras;
  TORCH_CHECK_VALUE(is_inside(offset, listed.nbytes, file.nbytes()), "'", listed.name,
                    "' is cut off: it has ", listed.nbytes, " bytes at ", offset, " of ",
                    file.nbytes());
  return {offset, listed.nbytes};
}

}  // namespace

ZipDirectory::ZipDirectory(const File& file) {
  const List list = find_list(file);
  TORCH_CHECK_VALUE(list.nbytes <= kMostListBytes, "its list of records has ", list.nbytes,
                    " bytes; expected ", kMostListBytes, " at most");
  const std::string text = read(file, list.offset, list.nbytes);
  int64_t total = 0;
  for (ByteReader bytes(text); !bytes.done();) {
    const Listed listed = read_listed(bytes);
    const Record record = find_bytes(file, listed);
    total = checked_sum(total, record.nbytes);
    const size_t slash = listed.name.find('/');
    const std::string name = listed.name.substr(slash == std::string::npos ? 0 : slash + 1);
    TORCH_CHECK_VALUE(records_.emplace(name, record).second, "it has '", listed.name, "' twice");
  }
  TORCH_CHECK_VALUE(total <= file.nbytes(), "its records have ", total, " bytes, and it has ",
                    file.nbytes());
}

const ZipDirectory::Record* ZipDirectory::find(const std::string& name) const {
  const auto it = records_.find(name);
  return it == records_.end() ? nullptr : &it->second;
}

}  // namespace tessera
