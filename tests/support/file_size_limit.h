#pragma once

#include <sys/resource.h>

#include <csignal>

namespace tessera::testing {

/// While it lives, no file of this process can grow above `nbytes`: as if the disk were full.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t nbytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{nbytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  void (*handler_)(int);
  rlimit before_;
};

}  // namespace tessera::testing
