#include "benchmarks/worker_process.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <system_error>
#include <thread>

#include "launcher/child.h"

namespace tessera::tools {
namespace {

using Clock = std::chrono::steady_clock;

void check_system(bool ok, int error, const char* what) {
  if (!ok) throw std::system_error(error, std::generic_category(), what);
}

pid_t spawn(const std::vector<std::string>& command, const std::vector<std::string>& environment,
            int fd) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fd, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, fd, STDOUT_FILENO);
  pid_t pid = -1;
  const int error =
      ::posix_spawnp(&pid, command.front().c_str(), &actions, nullptr,
                     argument_pointers(command).data(), argument_pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  check_system(error == 0, error, ("cannot start '" + command.front() + "'").c_str());
  return pid;
}

}  // namespace

std::string this_program() { return std::filesystem::read_symlink("/proc/self/exe"); }

WorkerProcess::WorkerProcess(std::string name, const std::vector<std::string>& command,
                             const std::vector<std::string>& environment)
    : name_(std::move(name)) {
  int ends[2];
  check_system(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, errno,
               "cannot connect to a worker process");
  socket_ = UniqueFd(ends[0]);
  const UniqueFd theirs(ends[1]);
  pid_ = spawn(command, environment, theirs.get());
}

WorkerProcess::~WorkerProcess() {
  socket_.reset();
  const auto deadline = Clock::now() + std::chrono::seconds(10);
  while (!ended_) {
    ended_ = ::waitpid(pid_, nullptr, WNOHANG) != 0;
    if (!ended_ && Clock::now() > deadline) ::kill(pid_, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void WorkerProcess::send(const std::string& command) {
  const auto line = command + "\n";
  // A worker that has ended is reported by `receive()`.
  (void)::send(socket_.get(), line.data(), line.size(), MSG_NOSIGNAL);
}

bool WorkerProcess::receive() {
  char buffer[4096];
  const ssize_t size = ::recv(socket_.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  TORCH_CHECK(size > 0, "[tessera bench] ", name_, " must train until it is told to end; it ",
              how_it_ended());
  received_.append(buffer, size);
  return received_.find('\n') != std::string::npos;
}

std::string WorkerProcess::take_line() {
  const auto end = received_.find('\n');
  auto line = received_.substr(0, end);
  received_.erase(0, end + 1);
  return line;
}

std::string WorkerProcess::how_it_ended() {
  int status = 0;
  ended_ = ::waitpid(pid_, &status, 0) == pid_;
  return WIFSIGNALED(status) ? "was killed by signal " + std::to_string(WTERMSIG(status))
                             : "ended with status " + std::to_string(WEXITSTATUS(status));
}

std::vector<nlohmann::json> ask(WorkerProcesses& workers, const std::string& command,
                                std::chrono::seconds timeout) {
  for (auto& worker : workers) worker->send(command);
  const auto deadline = Clock::now() + timeout;
  std::vector<nlohmann::json> answers(workers.size());
  std::vector<pollfd> polled;
  for (auto& worker : workers) polled.push_back({.fd = worker->fd(), .events = POLLIN});
  for (auto waiting = workers.size(); waiting > 0;) {
    ::poll(polled.data(), polled.size(), 1000);
    for (size_t i = 0; i < workers.size(); ++i) {
      if (polled[i].fd < 0 || polled[i].revents == 0 || !workers[i]->receive()) continue;
      answers[i] = nlohmann::json::parse(workers[i]->take_line());
      polled[i].fd = -1;  // poll() skips it
      --waiting;
    }
    if (waiting == 0) break;
    const auto late = std::ranges::find_if(polled, [](const auto& entry) { return entry.fd >= 0; });
    TORCH_CHECK(Clock::now() < deadline, "[tessera bench] ", workers[late - polled.begin()]->name(),
                " must answer '", command, "' within ", timeout.count(), " s");
  }
  return answers;
}

int serve_commands(
    const std::function<nlohmann::json(const std::string& verb, int64_t number)>& answer) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int answers = ::dup(STDOUT_FILENO);
  ::dup2(STDERR_FILENO, STDOUT_FILENO);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb;
    int64_t number = 0;
    words >> verb >> number;
    const auto text = answer(verb, number).dump() + "\n";
    if (::write(answers, text.data(), text.size()) != static_cast<ssize_t>(text.size())) return 1;
  }
  return 0;
}

}  // namespace tessera::tools
