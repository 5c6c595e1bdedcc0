#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// The steady clock in seconds. Workers print it, too: it is the same in all processes.
double now_seconds();

/// A line of output with the time at which it arrived.
struct Line {
  double at = 0;
  std::string text;
};

/// A started process whose output is kept line by line. It is killed with the object.
class WatchedProcess {
 public:
  WatchedProcess(const std::vector<std::string>& command,
                 const std::map<std::string, std::string>& environment);
  ~WatchedProcess();
  WatchedProcess(const WatchedProcess&) = delete;
  WatchedProcess& operator=(const WatchedProcess&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  bool has_ended() const { return status_.has_value(); }
  /// The exit status, or 128 + N after signal N; only after the end.
  int status() const { return status_.value(); }

  const std::vector<Line>& out() const { return out_.lines; }
  const std::vector<Line>& err() const { return err_.lines; }
  /// The number after "`key` " in the first line of stdout that begins so.
  std::optional<double> announced(const std::string& key) const;

 private:
  friend bool watch(const std::vector<std::unique_ptr<WatchedProcess>>& processes, double until,
                    const std::function<bool()>& is_done);

  struct Stream {
    int fd = -1;
    std::string rest;  // the begin of a line
    std::vector<Line> lines;
  };
  static void read_some(Stream& stream);
  void collect();

  pid_t pid_ = -1;
  std::optional<int> status_;
  Stream out_, err_;
};

using WatchedProcesses = std::vector<std::unique_ptr<WatchedProcess>>;

/// Collects output until `is_done()`, which is asked again and again, or until the time `until`:
/// then false.
bool watch(const WatchedProcesses& processes, double until, const std::function<bool()>& is_done);

}  // namespace tessera
