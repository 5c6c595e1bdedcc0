#pragma once

#include <filesystem>
#include <string>

namespace tessera {

inline constexpr const char* kConfigFile = "config.json";
inline constexpr const char* kUsualIndex = "model.safetensors.index.json";

/// Returns true for the name of an index of safetensors files.
inline bool is_model_index(const std::filesystem::path& path) {
  return path.string().ends_with(".safetensors.index.json");
}

/// Returns true if `path` has no tensors of a model, and may have its description: a JSON file, or
/// a directory with a `config.json` or an index, and no safetensors file.
inline bool is_described(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  if (!fs::is_directory(path)) return path.extension() == ".json";
  for (const auto& entry : fs::directory_iterator(path))
    if (entry.path().extension() == ".safetensors") return false;
  return fs::exists(path / kConfigFile) || fs::exists(path / kUsualIndex);
}

}  // namespace tessera
