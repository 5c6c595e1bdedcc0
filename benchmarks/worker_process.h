#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "launcher/unique_fd.h"

namespace tessera::tools {

/// A child process that reads commands from its stdin and answers on its stdout, one line each.
class WorkerProcess {
 public:
  /// Runs `command`, the program first. `name` identifies the process in errors. Throws
  /// `std::system_error`.
  WorkerProcess(std::string name, const std::vector<std::string>& command,
                const std::vector<std::string>& environment);

  /// Closes the connection and waits for the process to end; kills it after 10 seconds.
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  void send(const std::string& command);

  const std::string& name() const { return name_; }
  int fd() const { return socket_.get(); }

  /// Reads the available bytes. Returns true when there is a whole line. Throws `c10::Error` if the
  /// process has ended.
  bool receive();
  std::string take_line();

 private:
  std::string how_it_ended();

  std::string name_;
  UniqueFd socket_;
  pid_t pid_ = -1;
  bool ended_ = false;
  std::string received_;
};

/// Returns the path of this program, for workers that run it.
std::string this_program();

using WorkerProcesses = std::vector<std::unique_ptr<WorkerProcess>>;

/// Sends `command` to all of `workers` and returns their answers. Throws `c10::Error`, naming the
/// worker, if one ends, or if an answer does not arrive within `timeout`.
std::vector<nlohmann::json> ask(WorkerProcesses& workers, const std::string& command,
                                std::chrono::seconds timeout);

/// The worker's side of `ask()`: reads commands ("train 3") from stdin, one a line, until its end,
/// and writes what `answer` returns for each to stdout, as a line of JSON. Other output goes to
/// stderr. While idle, it waits in `read()` and uses no processor time. The process ends with its
/// parent.
///
/// Returns the exit status; errors of `answer` pass through.
int serve_commands(
    const std::function<nlohmann::json(const std::string& verb, int64_t number)>& answer);

}  // namespace tessera::tools
