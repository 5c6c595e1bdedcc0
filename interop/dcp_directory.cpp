#include "interop/dcp_directory.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "base/files/json_text.h"
#include "base/files/untrusted.h"
#include "checkpoint/safetensors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// [Note: Reading a DCP directory]
//
// `.metadata` is a pickle of an object `Metadata`. Its `state_dict_metadata` has, by name, the
// dtype, size and chunks (boxes) of each tensor, or a `BytesStorageMetadata` for a value that is
// none. Its `storage_data` maps an object `MetadataIndex` (name, and offset of the box) to a
// `_StorageInfo`: a file, and the part of it in which `torch.save` wrote the chunk or the value.
//
// Each chunk takes a place out of the map, and places do not overlap: so a pickle whose values are
// shared can't make many large tensors of few bytes.
constexpr int64_t kMostMetadataBytes = int64_t{64} << 20;
constexpr size_t kMostAttributes = 64;
constexpr const char* kMustBeMetadata = "must be the metadata of torch.distributed.checkpoint";

constexpr std::array<std::pair<std::string_view, std::string_view>, 16> kTorchDtypes = {{
    {"float64", "F64"},
    {"float32", "F32"},
    {"float16", "F16"},
    {"bfloat16", "BF16"},
    {"float8_e5m2", "F8_E5M2"},
    {"float8_e4m3fn", "F8_E4M3"},
    {"complex64", "C64"},
    {"int64", "I64"},
    {"int32", "I32"},
    {"int16", "I16"},
    {"int8", "I8"},
    {"uint8", "U8"},
    {"uint16", "U16"},
    {"uint32", "U32"},
    {"uint64", "U64"},
    {"bool", "BOOL"},
}};

using Kind = PickleValue::Kind;

// Throws unless the value is an object of this class. Attributes are few, as each is searched for.
const PickleValue& object(const PickleValue& value, const char* name) {
  TORCH_CHECK_VALUE(value.is_object(name), "an object '", name,
                    "' is expected where it has another value");
  TORCH_CHECK_VALUE(value.items.empty() || value.items[0]->items.size() <= 2 * kMostAttributes,
                    "an object '", name, "' must have at most ", kMostAttributes, " attributes");
  return value;
}

std::string_view text_of(const PickleValue& value) {
  TORCH_CHECK_VALUE(value.is(Kind::kText), "a name is expected where it has another value");
  return value.text;
}

std::string chunk_key(std::string_view name, const std::vector<int64_t>& offset) {
  return fmt::format("{}[{}]", name, fmt::join(offset, ","));
}

// The places of chunks and values that are not used yet. The names are parts of the pickle.
using PlaceKey = std::pair<std::string_view, std::vector<int64_t>>;
using FreePlaces = std::map<PlaceKey, DcpDirectory::Place>;

DcpDirectory::Place place_of(const PickleValue& info) {
  object(info, "_StorageInfo");
  const std::string_view file = text_of(info.at("relative_path"));
  check_file_name(shortened(file, 300));
  const PickleValue* const transforms = info.find("transform_descriptors");
  TORCH_CHECK_VALUE(!transforms || transforms->is(Kind::kOther) || transforms->items.empty(),
                    "it was written with an extension that transforms its files (compression, "
                    "encryption): save it again without");
  DcpDirectory::Place place{
      std::string(file), info.at("offset").whole(), info.at("length").whole(), {}};
  TORCH_CHECK_VALUE(place.offset >= 0 && place.nbytes >= 0,
                    "a place must not be negative; got offset ", place.offset, " and length ",
                    place.nbytes);
  return place;
}

FreePlaces places_in(const PickleValue& storage) {
  TORCH_CHECK_VALUE(storage.is(Kind::kDict), "its storage_data must be a dict");
  FreePlaces places;
  for (size_t i = 0; i + 1 < storage.items.size(); i += 2) {
    const PickleValue& index = object(*storage.items[i], "MetadataIndex");
    const std::string_view name = text_of(index.at("fqn"));
    const PickleValue* const offset = index.find("offset");
    PlaceKey key{name, offset && offset->is_list() ? offset->sizes() : std::vector<int64_t>()};
    TORCH_CHECK_VALUE(places.emplace(std::move(key), place_of(*storage.items[i + 1])).second,
                      "it has '", shortened(name), "' twice");
  }
  return places;
}

DcpDirectory::Place take_place(FreePlaces& places, std::string_view name,
                               const std::vector<int64_t>& offset) {
  const auto it = places.find({name, offset});
  TORCH_CHECK_VALUE(it != places.end(), "it has no place in a file for '",
                    shortened(chunk_key(name, offset)), "'");
  DcpDirectory::Place place = std::move(it->second);
  places.erase(it);
  return place;
}

std::string dtype_in(const PickleValue& properties) {
  object(properties, "TensorProperties");
  // The state is a tuple that begins with the dtype; or, in other versions, the attributes.
  const PickleValue* dtype = nullptr;
  if (!properties.items.empty() && properties.items[0]->is_list()) {
    if (!properties.items[0]->items.empty()) dtype = properties.items[0]->items[0];
  } else {
    dtype = properties.find("dtype");
  }
  TORCH_CHECK_VALUE(dtype, "it has no dtype");
  const std::string name = dtype->is(Kind::kGlobal) && dtype->module == "torch"
                               ? dtype_of_torch_name(dtype->text)
                               : std::string();
  TORCH_CHECK_VALUE(!name.empty(), "it has the dtype '", shortened(dtype->text),
                    "', which is not known here");
  return name;
}

// A file of a DCP directory, with its chunks by key.
class DcpSource final : public ChunkSource {
 public:
  using Places = std::map<std::string, DcpDirectory::Place>;

  DcpSource(const fs::path& path, std::shared_ptr<const Places> places)
      : file_(std::make_shared<const File>(File::open_file(path))), places_(std::move(places)) {}

  void check(const std::string& key, const std::string& dtype, int64_t numel) const override {
    const PickledTensor& tensor = open(key);
    const CheckedShape shape(tensor.shape, item_size(tensor.dtype));
    TORCH_CHECK_VALUE(
        tensor.dtype == dtype && shape.numel() == numel && tensor.shape == places_->at(key).sizes,
        "[checkpoint] '", shortened(key), "' of '", path(), "' must be ", numel, " elements of ",
        dtype, ", as the metadata has it; got ", shape.numel(), " of ", tensor.dtype);
    TORCH_CHECK_VALUE(shape.nbytes() <= places_->at(key).nbytes, "[checkpoint] '", shortened(key),
                      "' of '", path(), "' repeats its elements");
  }

  void read(const std::string& key, int64_t offset, size_t nbytes, void* out) const override {
    const PickledTensor& tensor = open(key);
    const int64_t size = CheckedShape(tensor.shape, item_size(tensor.dtype)).nbytes();
    TORCH_CHECK_VALUE(is_inside(offset, static_cast<int64_t>(nbytes), size), "[checkpoint] '",
                      shortened(key), "' of '", path(), "' has ", size, " bytes; expected ", nbytes,
                      " from ", offset, " on");
    if (is_same_order(tensor.shape, row_major(tensor.shape), tensor.strides))
      return held_->read_bytes_of(tensor, offset, nbytes, out);
    if (!value_.defined()) value_ = held_->read(tensor);
    std::memcpy(out, static_cast<const char*>(value_.const_data_ptr()) + offset, nbytes);
  }

  const std::string& path() const override { return file_->path(); }

 private:
  // Returns the tensor of the chunk, whose part of the file stays open until another is used.
  const PickledTensor& open(const std::string& key) const {
    if (!held_ || held_key_ != key) {
      held_.reset();
      value_ = at::Tensor();
      const DcpDirectory::Place& place = places_->at(key);
      held_.emplace(FileRange{file_, place.offset, place.nbytes});
      held_key_ = key;
    }
    const PickleValue& root = held_->pickle().root();
    TORCH_CHECK_VALUE(root.is(Kind::kTensor), "[checkpoint] '", shortened(key), "' of '", path(),
                      "' must be a tensor, as the metadata has it");
    held_->check(held_->pickle().tensor(root));
    return held_->pickle().tensor(root);
  }

  std::shared_ptr<const File> file_;
  std::shared_ptr<const Places> places_;
  mutable std::optional<TorchFile> held_;
  mutable std::string held_key_;
  mutable at::Tensor value_;  // if it is not contiguous
};

// Adds a tensor and the places of its chunks.
void add_tensor(std::string_view name, const PickleValue& entry, FreePlaces& places,
                CheckpointIndex& index, DcpSource::Places& chunks) {
  const std::vector<int64_t> shape = entry.at("size").sizes();
  const std::string dtype = dtype_in(entry.at("properties"));
  const CheckedShape checked(shape, item_size(dtype));
  TensorRecord record =
      contiguous_record("tensor", {std::string(name)}, shape, scalar_type_of(dtype));
  const PickleValue& listed = entry.at("chunks");
  TORCH_CHECK_VALUE(listed.is_list(), "its chunks must be a list");
  for (const PickleValue* item : listed.items) {
    const PickleValue& chunk = object(*item, "ChunkStorageMetadata");
    Box box{shape, chunk.at("offsets").sizes(), chunk.at("sizes").sizes()};
    DcpDirectory::Place place = take_place(places, name, box.offset);
    if (checked.numel() == 0) continue;
    TORCH_CHECK_VALUE(checked.has_box(box.offset, box.sizes), "a chunk does not lie in it");
    place.sizes = box.sizes;
    const std::string key = chunk_key(name, box.offset);
    Region region{0, box.numel(), box.sizes == shape ? std::nullopt : std::optional(box)};
    record.chunks.push_back({place.file, key, std::move(region)});
    chunks.emplace(key, std::move(place));
  }
  index.tensors.push_back(std::move(record));
}

}  // namespace

std::string torch_dtype_name(const std::string& dtype) {
  for (const auto& [name, known] : kTorchDtypes)
    if (known == dtype) return std::string(name);
  return "";
}

std::string dtype_of_torch_name(std::string_view name) {
  for (const auto& [known, dtype] : kTorchDtypes)
    if (known == name) return std::string(dtype);
  return "";
}

bool is_dcp(const fs::path& path) { return fs::exists(path / kDcpMetadataFile); }

DcpDirectory::DcpDirectory(const fs::path& directory) : path_(directory) {
  const fs::path file = directory / kDcpMetadataFile;
  naming_file("import_checkpoint", file.string(), kMustBeMetadata, [&] {
    parse(Pickle(File::open_file(file).read_all(kMostMetadataBytes)));
    check_apart();
  });
}

void DcpDirectory::parse(const Pickle& pickle) {
  const PickleValue& metadata = object(pickle.root(), "Metadata");
  FreePlaces places = places_in(metadata.at("storage_data"));
  const PickleValue& entries = metadata.at("state_dict_metadata");
  TORCH_CHECK_VALUE(entries.is(Kind::kDict), "its state_dict_metadata must be a dict");
  for (size_t i = 0; i + 1 < entries.items.size(); i += 2) {
    const std::string_view name = text_of(*entries.items[i]);
    const PickleValue& entry = *entries.items[i + 1];
    check_tensor_name(name);
    naming_part("'" + shortened(name) + "'", [&] {
      if (entry.is_object("BytesStorageMetadata")) {
        values_[std::string(name)] = take_place(places, name, {});
      } else {
        add_tensor(name, object(entry, "TensorStorageMetadata"), places, index_, *chunks_);
      }
    });
  }
}

void DcpDirectory::check_apart() const {
  std::map<std::string, std::vector<std::pair<int64_t, int64_t>>> files;
  const auto add = [&](const Place& place) {
    files[place.file].emplace_back(place.offset, place.nbytes);
  };
  for (const auto& [name, place] : values_) add(place);
  for (const auto& [key, place] : *chunks_) add(place);
  for (auto& [name, parts] : files) {
    std::sort(parts.begin(), parts.end());
    const int64_t nbytes = File::open_file(path_ / name).nbytes();
    int64_t end = 0;
    for (const auto& [offset, size] : parts) {
      TORCH_CHECK_VALUE(is_inside(offset, size, nbytes), "'", name, "' is cut off: a value has ",
                        size, " bytes at ", offset, " of ", nbytes);
      TORCH_CHECK_VALUE(offset >= end, "two values lie over each other in '", name, "'");
      end = offset + size;
    }
  }
}

TorchFile DcpDirectory::read(const Place& place) const {
  return TorchFile(FileRange{std::make_shared<const File>(File::open_file(path_ / place.file)),
                             place.offset, place.nbytes});
}

OpenSource DcpDirectory::opener() const {
  return [directory = path_, places = chunks_](const std::string& file) {
    return std::make_shared<DcpSource>(directory / file, places);
  };
}

ForeignFiles open_dcp(const fs::path& directory) {
  const DcpDirectory dcp(directory);
  return {.path = directory.string(), .index = dcp.index(), .open = dcp.opener()};
}

}  // namespace tessera
