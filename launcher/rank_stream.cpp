#include "launcher/rank_stream.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace tessera::tools {
namespace {

constexpr size_t kLinesKept = 10;
constexpr size_t kBytesKeptOfLine = 400;
constexpr int kReadsOfFullPipe = 64;
// LibTorch ends an error with stack frames. They would push the message out of the kept lines.
constexpr std::string_view kFrame = "frame #";

UniqueFd open_log(const std::string& path, bool append) {
  // A link in a directory that others may write to could lead to any of the user's files.
  UniqueFd log(::open(path.c_str(),
                      O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC | (append ? O_APPEND : O_TRUNC),
                      0666));
  if (!log.is_open()) {
    throw std::system_error(
        errno, std::generic_category(),
        fmt::format("cannot write '{}'{}", path, errno == ELOOP ? ", as it is a link" : ""));
  }
  return log;
}

}  // namespace

RankStream::RankStream(UniqueFd fd, StreamOptions options, Terminal& terminal)
    : fd_(std::move(fd)), options_(std::move(options)), terminal_(terminal) {
  ::fcntl(fd_.get(), F_SETFL, O_NONBLOCK);
  const bool shown_on_terminal = options_.terminal_fd >= 0 && ::isatty(options_.terminal_fd) == 1;
  line_ends_ = shown_on_terminal && !options_.on_line ? "\n\r" : "\n";
  if (!options_.log_path.empty()) {
    log_ = open_log(options_.log_path, !options_.log_header.empty());
    log(options_.log_header);
  }
}

void RankStream::read_some() {
  const ssize_t count = ::read(fd_.get(), buffer_.data(), buffer_.size());
  if (count > 0) {
    feed({buffer_.data(), static_cast<size_t>(count)});
  } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
    close();
  }
}

void RankStream::finish() {
  // No more than the largest pipe holds: an escaped process may go on writing for ever.
  for (int i = 0; is_open() && i < kReadsOfFullPipe; ++i) {
    const ssize_t count = ::read(fd_.get(), buffer_.data(), buffer_.size());
    if (count <= 0 && errno != EINTR) break;
    feed({buffer_.data(), static_cast<size_t>(std::max<ssize_t>(count, 0))});
  }
  close();
}

void RankStream::feed(std::string_view data) {
  bytes_ += data.size();
  log(data);
  while (!data.empty()) {
    const size_t end = data.find_first_of(line_ends_);
    partial_line_.append(data.substr(0, end));
    if (end == std::string_view::npos) {
      if (partial_line_.size() < kLongestLine) return;
      end_line(partial_line_, '\n');
      partial_line_.clear();
      return;
    }
    end_line(partial_line_, data[end]);
    partial_line_.clear();
    data.remove_prefix(end + 1);
  }
}

void RankStream::end_line(std::string_view line, char end) {
  after_frame_ = line.starts_with(kFrame);
  if (!after_frame_) last_lines_.emplace_back(line.substr(0, kBytesKeptOfLine));
  if (last_lines_.size() > kLinesKept) last_lines_.pop_front();
  if (options_.on_line) {
    options_.on_line(line);
  } else if (options_.terminal_fd >= 0) {
    // "\r\n" arrives as a line that ends with "\r" and an empty one.
    const bool second_half = after_return_ && line.empty() && end == '\n';
    terminal_.write_from(this, options_.terminal_fd,
                         fmt::format("{}{}{}", second_half ? "" : options_.prefix, line, end));
  }
  after_return_ = end == '\r';
}

void RankStream::close() {
  if (!partial_line_.empty()) end_line(partial_line_, '\n');
  partial_line_.clear();
  fd_.reset();
}

void RankStream::log(std::string_view data) {
  while (log_.is_open() && !data.empty()) {
    const ssize_t count = ::write(log_.get(), data.data(), data.size());
    if (count >= 0) {
      data.remove_prefix(count);
    } else if (errno != EINTR) {
      terminal_.write_from(nullptr, STDERR_FILENO,
                           fmt::format("tessera run: cannot write '{}': {}\n", options_.log_path,
                                       std::strerror(errno)));
      log_.reset();
    }
  }
}

}  // namespace tessera::tools
