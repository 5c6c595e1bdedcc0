#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/files/file.h"
#include "checkpoint/safetensors.h"
#include "interop/dcp_directory.h"
#include "interop/exported_model.h"
#include "interop/pickle_writer.h"
#include "interop/python_optimizer.h"
#include "interop/torch_writer.h"

namespace tessera {
namespace {

constexpr const char* kMetadataModule = "torch.distributed.checkpoint.metadata";
constexpr const char* kFilesModule = "torch.distributed.checkpoint.filesystem";
constexpr const char* kOnlyFile = "__0_0.distcp";

// The keys of dicts and the indices of lists that lead to a value.
using DcpPath = std::vector<std::variant<std::string, int64_t>>;

// A value of the state dict, and its place in the file.
struct DcpEntry {
  DcpPath path;
  bool is_tensor = false;
  std::string dtype = {};  // as in safetensors
  std::vector<int64_t> shape = {};
  int64_t offset = 0, nbytes = 0;

  std::string name() const {
    std::string text;
    for (const auto& key : path) {
      if (!text.empty()) text += '.';
      const auto* const index = std::get_if<int64_t>(&key);
      text += index ? std::to_string(*index) : std::get<std::string>(key);
    }
    return text;
  }
};

// Writes one value after another into the only file of the directory. See [Note: Reading a DCP
// directory].
class DcpWriter {
 public:
  explicit DcpWriter(const std::filesystem::path& directory)
      : directory_(directory), file_(File::create(directory / kOnlyFile)) {}

  void add(DcpPath path, const at::Tensor& value) {
    DcpEntry entry{.path = std::move(path), .is_tensor = true};
    entry.dtype = safetensors_dtype(value.scalar_type());
    entry.shape = value.sizes().vec();
    const std::string name = entry.name();
    put(std::move(entry), [&](TorchWriter& writer) { return writer.add(name, value); });
  }
  void add(DcpPath path, const c10::IValue& value) {
    put({.path = std::move(path)}, [&](TorchWriter&) { return value; });
  }

  void finish() {
    const std::string text = metadata();
    File file = File::create(directory_ / kDcpMetadataFile);
    file.write(text.data(), text.size(), 0);
  }

 private:
  template <class Value>
  void put(DcpEntry entry, const Value& value) {
    entry.offset = end_;
    TorchWriter writer([&](const void* data, size_t nbytes) {
      file_.write(data, nbytes, end_);
      end_ += static_cast<int64_t>(nbytes);
    });
    writer.finish(value(writer));
    entry.nbytes = end_ - entry.offset;
    entries_.push_back(std::move(entry));
  }

  std::string metadata() const;
  static void write_tensor(const DcpEntry& entry, PickleWriter& pickle);
  static void write_place(const DcpEntry& entry, PickleWriter& pickle);

  std::filesystem::path directory_;
  File file_;
  int64_t end_ = 0;
  std::vector<DcpEntry> entries_;
};

// Writes an object with attributes.
void write_object(PickleWriter& pickle, const char* module, const char* name,
                  const PickleWriter::Write& attributes) {
  pickle.object(module, name, [&] { pickle.dict(attributes); });
}

void DcpWriter::write_tensor(const DcpEntry& entry, PickleWriter& pickle) {
  write_object(pickle, kMetadataModule, "TensorStorageMetadata", [&] {
    pickle.text("properties");
    pickle.object(kMetadataModule, "TensorProperties", [&] {
      pickle.tuple([&] {
        pickle.global("torch", torch_dtype_name(entry.dtype));
        pickle.call("torch.serialization", "_get_layout", [&] { pickle.text("torch.strided"); });
        pickle.flag(false);  // requires_grad
        pickle.call(kMetadataModule, "_MEM_FORMAT_ENCODING",
                    [&] { pickle.whole(0); });  // contiguous
        pickle.flag(false);                     // pin_memory
      });
    });
    pickle.text("size");
    pickle.size(entry.shape);
    pickle.text("chunks");
    pickle.list([&] {
      write_object(pickle, kMetadataModule, "ChunkStorageMetadata", [&] {
        pickle.text("offsets");
        pickle.size(std::vector<int64_t>(entry.shape.size(), 0));
        pickle.text("sizes");
        pickle.size(entry.shape);
      });
    });
  });
}

void DcpWriter::write_place(const DcpEntry& entry, PickleWriter& pickle) {
  write_object(pickle, kMetadataModule, "MetadataIndex", [&] {
    pickle.text("fqn");
    pickle.text(entry.name());
    pickle.text("index");
    entry.is_tensor ? pickle.whole(0) : pickle.none();
    if (!entry.is_tensor) return;
    pickle.text("offset");
    pickle.size(std::vector<int64_t>(entry.shape.size(), 0));
  });
  write_object(pickle, kFilesModule, "_StorageInfo", [&] {
    pickle.text("relative_path");
    pickle.text(kOnlyFile);
    pickle.text("offset");
    pickle.whole(entry.offset);
    pickle.text("length");
    pickle.whole(entry.nbytes);
  });
}

std::string DcpWriter::metadata() const {
  PickleWriter pickle;
  const auto write_all = [&](const auto& write) {
    pickle.dict([&] {
      for (const DcpEntry& entry : entries_) write(entry);
    });
  };
  write_object(pickle, kMetadataModule, "Metadata", [&] {
    pickle.text("state_dict_metadata");
    write_all([&](const DcpEntry& entry) {
      pickle.text(entry.name());
      if (entry.is_tensor) return write_tensor(entry, pickle);
      write_object(pickle, kMetadataModule, "BytesStorageMetadata", [] {});
    });
    pickle.text("planner_data");
    write_all([&](const DcpEntry& entry) {
      pickle.text(entry.name());
      pickle.tuple([&] {
        for (const auto& key : entry.path) {
          const auto* const index = std::get_if<int64_t>(&key);
          index ? pickle.whole(*index) : pickle.text(std::get<std::string>(key));
        }
      });
    });
    pickle.text("storage_data");
    write_all([&](const DcpEntry& entry) { write_place(entry, pickle); });
    pickle.text("storage_meta");
    pickle.none();
    pickle.text("version");
    pickle.text("1.0.0");
  });
  return std::move(pickle).take();
}

void add_state(const std::string& key, const std::string& param, ExportedModel& model,
               DcpWriter& writer) {
  for (const auto& [name, value] : python_counts(*model.optimizer(), param))
    writer.add({key, "state", param, name}, value);
  for (const TensorRecord* record : model.states_of(param))
    writer.add({key, "state", param, record->state}, model.read(*record));
}

// As `get_state_dict()` of Python's has them by default: param groups by their number.
void add_optimizer(ExportedModel& model, DcpWriter& writer) {
  const std::string& key = model.options().optimizer_key;
  const OptimizerRecord& optimizer = *model.optimizer();
  for (size_t i = 0; i < optimizer.param_groups.size(); ++i) {
    c10::impl::GenericList names(c10::AnyType::get());
    for (const std::string& param : optimizer.param_groups[i].params) {
      names.push_back(param);
      add_state(key, param, model, writer);
    }
    const auto number = static_cast<int64_t>(i);
    for (const auto& [name, value] : python_options(optimizer, i))
      writer.add({key, "param_groups", number, name}, value);
    writer.add({key, "param_groups", number, "params"}, c10::IValue(names));
  }
}

}  // namespace

void write_dcp(const std::filesystem::path& directory, ExportedModel& model) {
  DcpWriter writer(directory);
  const ExportOptions& options = model.options();
  const std::string model_key =
      options.model_key.empty() && model.optimizer() ? "model" : options.model_key;
  for (const TensorRecord* record : model.tensors()) {
    const at::Tensor value = model.read(*record);
    for (const std::string& name : record->names)
      writer.add(model_key.empty() ? DcpPath{name} : DcpPath{model_key, name}, value);
  }
  if (model.optimizer()) add_optimizer(model, writer);
  writer.finish();
}

}  // namespace tessera
