#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <string_view>

namespace tessera {

/// Returns the CRC-32C of `bytes` (Castagnoli's polynomial, as in RFC 3720).
uint32_t crc32c(std::string_view bytes);

/// An event file of TensorBoard. Its records are frames of TFRecord: the length (8 bytes), its
/// masked CRC-32C, the data, its masked CRC-32C, all little-endian. The data are `Event` messages
/// in the encoding of protocol buffers; the numbers of their fields are those of TensorFlow's
/// event.proto and summary.proto.
class EventFile {
 public:
  /// Makes a new file in `directory`; its name has the time, the host and the process. If
  /// `first_step` is not negative, tells readers to drop the points of this and later steps in
  /// earlier files of the directory.
  EventFile(const std::filesystem::path& directory, int64_t first_step);

  /// Adds one scalar per name. Throws `c10::Error` if they can't be written.
  void write(double wall_time, int64_t step, const std::map<std::string, double>& values);

 private:
  void write_record(const std::string& event);

  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace tessera
