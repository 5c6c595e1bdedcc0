#pragma once

#include <string>

namespace tessera {

/// Writes `text` to a file. `function`: the public function that errors name.
/// Throws `c10::Error` with the reason if the file can't be written.
void write_text_file(const char* function, const std::string& path, const std::string& text);

}  // namespace tessera
