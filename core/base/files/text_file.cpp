#include "base/files/text_file.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>
#include <fstream>

namespace tessera {

void write_text_file(const char* function, const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  TORCH_CHECK(file, "[", function, "] could not write '", path, "': ", std::strerror(errno));
}

}  // namespace tessera
