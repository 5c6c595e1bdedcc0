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

ExportFormat format_of(const fs::path& to, const ExportOptions& options) {
  if (options.format) return *options.format;
  const std::string extension = to.extension().string();
  if (extension.empty()) return ExportFormat::kHuggingFace;  // `directory/` has none, either
  if (extension == ".safetensors") return ExportFormat::kSafetensors;
  TORCH_CHECK_VALUE(extension != ".pt" && extension != ".pth" && extension != ".bin",
                    "[export_checkpoint] files of torch.save are written by Python: run `python -m "
                    "tessera.exchange export CKPT '",
                    to.string(), "'`");
  TORCH_CHECK_VALUE(false,
                    "[export_checkpoint] options.format must be given for a path that does not end "
                    "with .safetensors, and has no directory's name; got '",
                    to.string(), "'");
}

void check_options(ExportFormat format, const ExportOptions& options) {
  TORCH_CHECK_VALUE(!options.dtype || c10::isFloatingType(*options.dtype),
                    "[export_checkpoint] options.dtype must be a floating one; got ",
                    c10::toString(options.dtype.value_or(at::kFloat)));
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
  if (format == ExportFormat::kSafetensors) {
    TORCH_CHECK_VALUE(!fs::exists(to) || fs::is_regular_file(to), "[export_checkpoint] '",
                      to.string(), "' must be a file, which is replaced if it is there; got ",
                      fs::is_directory(to) ? "a directory" : "a device or a pipe");
    return;
  }
  if (!fs::exists(to)) return;
  TORCH_CHECK_VALUE(fs::is_directory(to), "[export_checkpoint] '", to.string(),
                    "' must be a directory, or not be there");
  for (const auto& entry : fs::directory_iterator(to))
    TORCH_CHECK_VALUE(!is_model_file(entry.path()), "[export_checkpoint] '", to.string(),
                      "' must have no model's files; it has '", entry.path().filename().string(),
                      "'");
}

// Gives a file or a directory that is on the disk its name.
void publish_file(const fs::path& draft, const fs::path& to) {
  fs::rename(draft, to);
  File::open_directory(fs::absolute(to).parent_path()).sync();
}

// Moves the files of the draft, the one that names the others last.
void publish_directory(const fs::path& draft, const fs::path& to) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(draft)) {
    File::open_file(entry.path()).sync();
    files.push_back(entry.path().filename());
  }
  File::open_directory(draft).sync();
  if (!fs::exists(to)) return publish_file(draft, to);
  std::ranges::sort(
      files, {}, [](const fs::path& file) { return std::pair(file.extension() == ".json", file); });
  for (const fs::path& file : files) {
    if (file.extension() == ".json") File::open_directory(to).sync();
    fs::rename(draft / file, to / file);
  }
  File::open_directory(to).sync();
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
  const bool is_directory = format == ExportFormat::kHuggingFace;
  if (is_directory) {
    TORCH_CHECK_VALUE(!fs::exists(draft), "[export_checkpoint] '", draft.string(),
                      "' must not be there: remove it, if an export that was killed left it");
    fs::create_directories(draft);
  } else {
    File::create(draft);  // its error says why the file can't be created
  }
  try {
    is_directory ? write_hugging_face(draft, model) : write_safetensors(draft, model);
    if (is_directory) {
      publish_directory(draft, target);
    } else {
      File::open_file(draft).sync();
      publish_file(draft, target);
    }
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(draft, ignored);
    throw;
  }
}

}  // namespace tessera
