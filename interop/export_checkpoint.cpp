#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/interop/exchange.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/files/file.h"
#include "interop/exported_model.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

bool is_directory_format(ExportFormat format) {
  return format == ExportFormat::kHuggingFace || format == ExportFormat::kDcp;
}

ExportFormat format_of(const fs::path& to, const ExportOptions& options) {
  if (options.format) return *options.format;
  const std::string extension = to.extension().string();
  if (extension.empty()) return ExportFormat::kHuggingFace;  // `directory/` has none, either
  if (extension == ".safetensors") return ExportFormat::kSafetensors;
  TORCH_CHECK_VALUE(extension == ".pt" || extension == ".pth" || extension == ".bin",
                    "[export_checkpoint] options.format must be given for a path that ends with "
                    "none of .safetensors, .pt, .pth and .bin, and has no directory's name; got '",
                    to.string(), "'");
  return ExportFormat::kTorch;
}

void check_options(ExportFormat format, const ExportOptions& options) {
  TORCH_CHECK_VALUE(!options.dtype || c10::isFloatingType(*options.dtype),
                    "[export_checkpoint] options.dtype must be a floating one; got ",
                    c10::toString(options.dtype.value_or(at::kFloat)));
  const bool has_keys = format == ExportFormat::kTorch || format == ExportFormat::kDcp;
  TORCH_CHECK_VALUE(
      has_keys || (options.model_key.empty() && options.optimizer_key.empty()),
      "[export_checkpoint] options.model_key and options.optimizer_key are for files of torch.save "
      "and DCP directories; safetensors files hold a model's tensors alone");
  TORCH_CHECK_VALUE(
      options.optimizer_key.empty() || options.optimizer_key != options.model_key,
      "[export_checkpoint] options.model_key and options.optimizer_key must differ; got '",
      options.model_key, "' for both");
  TORCH_CHECK_VALUE(!options.max_shard_bytes || format == ExportFormat::kHuggingFace,
                    "[export_checkpoint] options.max_shard_bytes is for a Hugging Face directory");
  TORCH_CHECK_VALUE(options.max_shard_bytes.value_or(1) > 0,
                    "[export_checkpoint] options.max_shard_bytes must be 1 or more; got ",
                    options.max_shard_bytes.value_or(1));
}

bool is_model_file(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
}

// A directory that a model's files are added to may have others, such as `config.json`.
void check_target(const fs::path& to, ExportFormat format) {
  if (!is_directory_format(format)) {
    TORCH_CHECK_VALUE(!fs::exists(to) || fs::is_regular_file(to), "[export_checkpoint] '",
                      to.string(), "' must be a file, which is replaced if it is there; got ",
                      fs::is_directory(to) ? "a directory" : "a device or a pipe");
    return;
  }
  if (!fs::exists(to)) return;
  TORCH_CHECK_VALUE(fs::is_directory(to), "[export_checkpoint] '", to.string(),
                    "' must be a directory, or not be there");
  for (const auto& entry : fs::directory_iterator(to))
    TORCH_CHECK_VALUE(format == ExportFormat::kHuggingFace && !is_model_file(entry.path()),
                      "[export_checkpoint] '", to.string(), "' must have no ",
                      format == ExportFormat::kDcp ? "files" : "model's files", "; it has '",
                      entry.path().filename().string(), "'");
}

void write_files(const fs::path& draft, ExportFormat format, ExportedModel& model) {
  switch (format) {
    case ExportFormat::kSafetensors:
      return write_safetensors(draft, model);
    case ExportFormat::kTorch:
      return write_torch(draft, model);
    case ExportFormat::kHuggingFace:
      return write_hugging_face(draft, model);
    case ExportFormat::kDcp:
      return write_dcp(draft, model);
  }
}

// Moves the files of the draft, the one that names the others last.
void publish_directory(const fs::path& draft, const fs::path& to) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(draft)) {
    File::open_file(entry.path()).sync();
    files.push_back(entry.path().filename());
  }
  if (!fs::exists(to)) return fs::rename(draft, to);
  std::ranges::sort(files, {}, [](const fs::path& file) {
    return std::pair(file.extension() == ".json" || file == ".metadata", file);
  });
  for (const fs::path& file : files) fs::rename(draft / file, to / file);
  fs::remove(draft);
}

}  // namespace

void export_checkpoint(const fs::path& path, const fs::path& to, const ExportOptions& options) {
  at::NoGradGuard no_grad;
  const ExportFormat format = format_of(to, options);
  check_options(format, options);
  // `directory/` names the directory.
  const fs::path target = to.has_filename() ? to : to.parent_path();
  check_target(target, format);
  ExportedModel model(path, options);
  const fs::path draft = target.string() + ".tmp";
  if (is_directory_format(format)) {
    TORCH_CHECK_VALUE(!fs::exists(draft), "[export_checkpoint] '", draft.string(),
                      "' must not be there: remove it, if an export that was killed left it");
    fs::create_directories(draft);
  } else {
    File::create(draft);  // its error says why the file can't be created
  }
  try {
    write_files(draft, format, model);
    if (is_directory_format(format)) {
      publish_directory(draft, target);
    } else {
      File::open_file(draft).sync();
      fs::rename(draft, target);
    }
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(draft, ignored);
    throw;
  }
}

}  // namespace tessera
