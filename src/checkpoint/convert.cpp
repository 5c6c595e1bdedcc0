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

void write_safetensors(const fs::path& file, ChunkReader& reader, const ExportOptions& options,
                       ProgressCount& count) {
  const auto records = model_of(reader.index());
  std::vector<TensorHeader> headers;
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  for (const TensorRecord* record : records) {
    headers.push_back(
        {record->names.front(), safetensors_dtype(dtype_of(*record, options)), record->shape});
    add_other_names(*record, metadata);
  }
  SafetensorsWriter writer(File::create(file), std::move(headers), metadata);
  for (const TensorRecord* record : records) {
    writer.write(record->names.front(), reader.read_whole(*record).to(dtype_of(*record, options)));
    count.add(record->nbytes());
  }
  writer.sync();
}

void write_torch(const fs::path& file, ChunkReader& reader, const ExportOptions& options,
                 ProgressCount& count) {
  TorchFileWriter writer(file);
  for (const TensorRecord* record : model_of(reader.index())) {
    writer.write(record->names, reader.read_whole(*record).to(dtype_of(*record, options)));
    count.add(record->nbytes());
  }
  writer.finish();
  File::open_file(file).sync();
}

// A tensor of a file that another program wrote.
struct Source {
  std::vector<std::string> names;
  std::string dtype;
  std::vector<int64_t> shape;
  std::function<at::Tensor()> read;  // contiguous
};

void add_torch(const fs::path& path, std::vector<Source>& sources) {
  const auto file = std::make_shared<TorchFile>(path);
  std::map<PickledTensor, size_t> seen;  // equal views of one storage are one tied tensor
  std::set<std::string> names;
  for (const auto& [name, tensor] : file->tensors()) {
    TORCH_CHECK_VALUE(names.insert(name).second, "[import_checkpoint] '", path.string(), "' has '",
                      shortened(name), "' twice");
    const auto [place, is_new] = seen.emplace(tensor, sources.size());
    if (is_new) {
      sources.push_back({{name}, tensor.dtype, tensor.shape, [file, tensor = tensor] {
                           return file->read(tensor);
                         }});
    } else {
      sources[place->second].names.push_back(name);
    }
  }
}

void add_model(const fs::path& path, std::vector<Source>& sources) {
  TORCH_CHECK_VALUE(!fs::exists(readable_checkpoint(path) / kIndexFile), "[import_checkpoint] '", path.string(),
                    "' is a checkpoint already: reshard_checkpoint() and export_checkpoint() make "
                    "something else of it");
  for (ModelTensor& tensor : open_model(path)) {
    sources.push_back({tensor.names, tensor.header.dtype, tensor.header.shape,
                       [tensor] { return tensor.read(); }});
  }
}

std::vector<Source> open_sources(const fs::path& path) {
  std::vector<Source> sources;
  const bool is_model = fs::is_directory(path) || path.extension() == ".safetensors";
  is_model ? add_model(path, sources) : add_torch(path, sources);
  TORCH_CHECK_VALUE(!sources.empty(), "[import_checkpoint] '", path.string(), "' has no tensors");
  return sources;
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
  int64_t total = 0;
  for (const TensorRecord* record : model_of(reader.index())) {
    reader.check(*record);
    total += record->nbytes();
  }
  ProgressCount count(options.progress, total);
  const fs::path draft = file.string() + ".tmp";
  File::create(draft);  // its error says why the file can't be created
  try {
    format == ExportFormat::kTorch ? write_torch(draft, reader, options, count)
                                   : write_safetensors(draft, reader, options, count);
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
  CheckpointIndex& index = contents[0].index;
  index.plan = "imported";
  for (Source& source : open_sources(from)) {
    TensorRecord record =
        contiguous_record("tensor", source.names, source.shape, scalar_type_of(source.dtype));
    if (const int64_t numel = record.numel(); numel > 0) {
      record.chunks = {{rank_file(0, 1), record.id(), Region{0, numel}}};
      contents[0].chunks.push_back({record.id(), scalar_type_of(source.dtype), numel,
                                    [read = std::move(source.read)] { return read().view({-1}); }});
    }
    index.tensors.push_back(std::move(record));
  }
  write_for_all(path, std::move(contents), progress);
}

}  // namespace tessera
