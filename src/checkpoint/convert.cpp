#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint_files.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/chunk_reader.h"
#include "checkpoint/model_files.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/torch_file.h"
#include "checkpoint/untrusted.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

ExportFormat format_of(const fs::path& file, const ExportOptions& options) {
  if (options.format) return *options.format;
  const std::string extension = file.extension().string();
  if (extension == ".safetensors") return ExportFormat::kSafetensors;
  TORCH_CHECK_VALUE(extension == ".pt" || extension == ".pth" || extension == ".bin",
                    "[export_checkpoint] options.format must be given for a file that ends with "
                    "none of .safetensors, .pt, .pth and .bin; got '", file.string(), "'");
  return ExportFormat::kTorch;
}

// Returns the model's tensors in the order of the index.
std::vector<const TensorRecord*> model_of(const CheckpointIndex& index) {
  std::vector<const TensorRecord*> tensors;
  for (const TensorRecord& record : index.tensors) {
    if (is_of_model(record)) tensors.push_back(&record);
  }
  return tensors;
}

at::ScalarType dtype_of(const TensorRecord& record, const ExportOptions& options) {
  const at::ScalarType stored = scalar_type_of(record.dtype);
  return options.dtype && c10::isFloatingType(stored) ? *options.dtype : stored;
}

using ReadTensor = std::function<at::Tensor(const TensorRecord&)>;

void write_safetensors(const fs::path& file, const std::vector<const TensorRecord*>& records,
                       const ExportOptions& options, const ReadTensor& read) {
  std::vector<TensorHeader> headers;
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  for (const TensorRecord* record : records) {
    headers.push_back(
        {record->names.front(), safetensors_dtype(dtype_of(*record, options)), record->shape});
    add_other_names(*record, metadata);
  }
  SafetensorsWriter writer(File::create(file), std::move(headers), metadata);
  for (const TensorRecord* record : records) writer.write(record->names.front(), read(*record));
}

// Adds a tensor of a file that another program wrote. `read` returns it contiguous.
void add_source(std::vector<std::string> names, const std::string& dtype,
                std::vector<int64_t> shape, std::function<at::Tensor()> read,
                RankContents& contents) {
  const at::ScalarType type = scalar_type_of(dtype);
  TensorRecord record = contiguous_record("tensor", std::move(names), std::move(shape), type);
  if (const int64_t numel = record.numel(); numel > 0) {
    record.chunks = {{rank_file(0, 1), record.id(), Region{0, numel}}};
    contents.chunks.push_back(
        {record.id(), type, numel, [read = std::move(read)] { return read().view({-1}); }});
  }
  contents.index.tensors.push_back(std::move(record));
}

void add_torch(const fs::path& path, RankContents& contents) {
  const auto file = std::make_shared<TorchFile>(path);
  std::map<PickledTensor, size_t> seen;  // equal views of one storage are one tied tensor
  std::set<std::string> names;
  for (const auto& [name, tensor] : file->tensors()) {
    TORCH_CHECK_VALUE(names.insert(name).second, "[import_checkpoint] '", path.string(), "' has '",
                      shortened(name), "' twice");
    const auto [place, is_new] = seen.emplace(tensor, contents.index.tensors.size());
    if (is_new) {
      add_source(
          {name}, tensor.dtype, tensor.shape,
          [file, tensor = tensor] { return file->read(tensor); }, contents);
    } else {
      contents.index.tensors[place->second].names.push_back(name);
    }
  }
}

void add_model(const fs::path& path, RankContents& contents) {
  TORCH_CHECK_VALUE(!fs::exists(readable_checkpoint(path) / kIndexFile), "[import_checkpoint] '", path.string(),
                    "' is a checkpoint already: reshard_checkpoint() and export_checkpoint() "
                    "convert it");
  for (ModelTensor& tensor : open_model(path)) {
    add_source(
        tensor.names, tensor.header.dtype, tensor.header.shape, [tensor] { return tensor.read(); },
        contents);
  }
}

}  // namespace

void export_checkpoint(const fs::path& path, const fs::path& file, const ExportOptions& options) {
  at::NoGradGuard no_grad;
  const ExportFormat format = format_of(file, options);
  TORCH_CHECK_VALUE(!options.dtype || c10::isFloatingType(*options.dtype),
                    "[export_checkpoint] options.dtype must be a floating one; got ",
                    c10::toString(options.dtype.value_or(at::kFloat)));
  ChunkReader reader(path);
  TORCH_CHECK_VALUE(!fs::exists(file) || fs::is_regular_file(file), "[export_checkpoint] '",
                    file.string(), "' must be a file, which is replaced if it is there; got ",
                    fs::is_directory(file) ? "a directory" : "a device or a pipe");
  const std::vector<const TensorRecord*> records = model_of(reader.index());
  int64_t total = 0;
  for (const TensorRecord* record : records) {
    reader.check(*record);
    total += record->nbytes();
  }
  ProgressCount count(options.progress, total);
  const auto read = [&](const TensorRecord& record) {
    const at::Tensor value = reader.read_whole(record);
    count.add(record.nbytes());
    return value.to(dtype_of(record, options));
  };
  const fs::path draft = file.string() + ".tmp";
  File::create(draft);  // its error says why the file can't be created
  try {
    format == ExportFormat::kTorch ? write_torch_file(draft, records, read)
                                   : write_safetensors(draft, records, options, read);
    File::open_file(draft).sync();
    fs::rename(draft, file);
  } catch (...) {
    std::error_code ignored;
    fs::remove(draft, ignored);
    throw;
  }
}

void import_checkpoint(const fs::path& from, const fs::path& path,
                       const CheckpointProgress& progress) {
  at::NoGradGuard no_grad;
  std::vector<RankContents> contents(1);
  contents[0].index.plan = "imported";
  const bool is_model = fs::is_directory(from) || from.extension() == ".safetensors";
  is_model ? add_model(from, contents[0]) : add_torch(from, contents[0]);
  TORCH_CHECK_VALUE(!contents[0].index.tensors.empty(), "[import_checkpoint] '", from.string(),
                    "' has no tensors");
  write_for_all(path, contents, progress);
}

}  // namespace tessera
