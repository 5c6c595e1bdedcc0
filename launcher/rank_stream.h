#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/terminal.h"
#include "launcher/unique_fd.h"

namespace tessera::tools {

/// The destinations of a rank's output.
struct StreamOptions {
  int terminal_fd = -1;    ///< -1: not shown
  std::string prefix;      ///< put before each line that is shown
  std::string log_path;    ///< gets every byte unchanged; empty: none
  std::string log_header;  ///< not empty: the log is continued, after this line
  std::function<void(std::string_view line)> on_line;  ///< takes the lines in place of the terminal
};

/// The stdout or stderr of one rank.
///
/// Bytes are passed on unchanged; lines are shown whole, up to `kLongestLine`, even if other ranks
/// write at the same time. On a terminal a carriage return ends a line, too (progress bars).
class RankStream {
 public:
  static constexpr size_t kLongestLine = 16 << 20;

  /// Throws `std::system_error` if the log can't be opened.
  RankStream(UniqueFd fd, StreamOptions options, Terminal& terminal);
  RankStream(const RankStream&) = delete;
  RankStream& operator=(const RankStream&) = delete;

  int fd() const { return fd_.get(); }
  bool is_open() const { return fd_.is_open(); }
  /// Returns how many bytes have come.
  size_t bytes() const { return bytes_; }

  /// Reads once; to be called when `fd()` is readable. Closes at end of file.
  void read_some();
  /// Reads all available data, then closes.
  void finish();

  /// Returns the last lines, oldest first, without stack frames.
  const std::deque<std::string>& last_lines() const { return last_lines_; }
  /// Returns true if nothing was shown after the last of them.
  bool ends_the_output() const { return terminal_.last_source() == this && !after_frame_; }

 private:
  void feed(std::string_view data);
  void end_line(std::string_view line, char end);
  void close();
  void log(std::string_view data);

  UniqueFd fd_;
  UniqueFd log_;
  StreamOptions options_;
  Terminal& terminal_;
  std::string_view line_ends_;
  std::vector<char> buffer_ = std::vector<char>(64 << 10);
  std::string partial_line_;
  size_t bytes_ = 0;
  bool after_return_ = false, after_frame_ = false;
  std::deque<std::string> last_lines_;
};

}  // namespace tessera::tools
