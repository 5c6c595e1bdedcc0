#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// A table of numbers as comma-separated values (RFC 4180), one row per step. The first columns are
/// `step` and `wall_time`.
class CsvFile {
 public:
  /// Goes on with an existing file, without its rows of `first_step` and later. Throws
  /// `c10::ValueError` if it is not such a table.
  CsvFile(std::filesystem::path path, std::optional<int64_t> first_step);

  /// Adds a row. A new name gets a column: the file is then written anew. Throws `c10::Error` if it
  /// can't be written.
  void write(double wall_time, int64_t step, const std::map<std::string, double>& values);

 private:
  void rewrite(const std::vector<std::string>& names, std::optional<int64_t> first_step);
  void append(const std::string& line);

  std::filesystem::path path_;
  std::vector<std::string> names_;  // of the columns behind the first two
  std::ofstream file_;
};

}  // namespace tessera
