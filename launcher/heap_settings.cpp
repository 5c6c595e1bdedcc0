#include "launcher/heap_settings.h"

#include <cstdlib>
#include <string_view>

namespace tessera::tools {

std::vector<std::pair<std::string, std::string>> heap_settings() {
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  if (tunables != nullptr &&
      std::string_view(tunables).find("glibc.malloc.") != std::string::npos) {
    return {};  // the same settings under their other name
  }
  std::vector<std::pair<std::string, std::string>> settings = {
      {"MALLOC_MMAP_MAX_", "0"},
      {"MALLOC_TRIM_THRESHOLD_", "1099511627776"},
      {"MALLOC_TOP_PAD_", "16777216"},
  };
  std::erase_if(settings,
                [](const auto& setting) { return std::getenv(setting.first.c_str()) != nullptr; });
  return settings;
}

}  // namespace tessera::tools
