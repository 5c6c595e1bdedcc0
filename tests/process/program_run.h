#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace tessera {

using Command = std::vector<std::string>;

inline Command with(Command command, const Command& more) {
  command.insert(command.end(), more.begin(), more.end());
  return command;
}

/// The status and the output of a program that has ended.
struct ProgramEnd {
  int status = -1;  ///< exit status; 128 + N if signal N killed it
  std::string out;
  std::string err;
  double seconds = 0;
};

/// A program started by a test; its output is collected until it ends.
///
/// It is killed when the object is destroyed, and when it takes longer than `limit` to end: then
/// `wait()` returns status 137 and `err` says so.
class ProgramRun {
 public:
  struct Options {
    std::map<std::string, std::string> environment;  ///< set in addition; an empty value unsets
    std::string input;                               ///< for its stdin
    bool on_terminal = false;  ///< stdout and stderr are one terminal (in `out`)
    std::chrono::seconds limit{60};
  };
  explicit ProgramRun(Command command);
  ProgramRun(Command command, Options options);
  ~ProgramRun();
  ProgramRun(const ProgramRun&) = delete;
  ProgramRun& operator=(const ProgramRun&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;

  /// Collects output until `text` is in stdout; false if that takes longer than the limit.
  bool wait_for_output(const std::string& text, int times = 1);
  ProgramEnd wait();
  /// The text in stdout up to now.
  const std::string& output() const { return end_.out; }

 private:
  bool collect_some();
  bool read_from(int& fd, std::string& to);
  bool past_limit() const;

  Options options_;
  pid_t pid_ = -1;
  int out_fd_ = -1;
  int err_fd_ = -1;
  std::chrono::steady_clock::time_point started_;
  ProgramEnd end_;
};

/// Runs a program to its end.
ProgramEnd run_program(Command command, ProgramRun::Options options = {});

/// The state letter of /proc/PID/stat; 'X' if there is no such process.
char process_state(pid_t pid);

/// Whether a process of that number runs (a zombie does not).
bool is_running(pid_t pid);

/// Waits up to ten seconds until none of them runs.
bool all_end(const std::vector<pid_t>& pids);

/// A directory that is removed with the object.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  std::string path(const std::string& name = "") const { return path_ + "/" + name; }

 private:
  std::string path_;
};

std::string read_file(const std::string& path);

/// The numbers after "`key` " in `text`, one per line.
std::vector<pid_t> numbers_after(const std::string& text, const std::string& key);

}  // namespace tessera
