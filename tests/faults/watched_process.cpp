#include "watched_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace tessera {
namespace {

std::array<int, 2> make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("cannot make a pipe");
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return ends;
}

std::vector<std::string> environment_with(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!changes.contains(text.substr(0, text.find('=')))) result.push_back(text);
  }
  for (const auto& [name, value] : changes) {
    if (!value.empty()) result.push_back(name + "=" + value);
  }
  return result;
}

std::vector<char*> pointers_to(const std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (const std::string& text : texts) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

WatchedProcess::WatchedProcess(const std::vector<std::string>& command,
                               const std::map<std::string, std::string>& environment) {
  const auto out = make_pipe(), err = make_pipe();
  // All memory is allocated before the fork: a thread of the test program may hold the heap's lock.
  const auto variables = environment_with(environment);
  const auto arguments = pointers_to(command), entries = pointers_to(variables);
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("cannot fork");
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(err[1], STDERR_FILENO);
    ::execvpe(arguments[0], arguments.data(), entries.data());
    ::_exit(127);
  }
  ::close(out[1]);
  ::close(err[1]);
  out_.fd = out[0];
  err_.fd = err[0];
}

WatchedProcess::~WatchedProcess() {
  if (!has_ended()) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  for (const Stream* stream : {&out_, &err_}) {
    if (stream->fd >= 0) ::close(stream->fd);
  }
}

void WatchedProcess::signal(int number) const {
  if (!has_ended()) ::kill(pid_, number);
}

std::optional<double> WatchedProcess::announced(const std::string& key) const {
  for (const Line& line : out()) {
    if (line.text.starts_with(key + " ")) return std::atof(line.text.c_str() + key.size() + 1);
  }
  return std::nullopt;
}

void WatchedProcess::read_some(Stream& stream) {
  std::array<char, 1 << 14> buffer;
  while (stream.fd >= 0) {
    const ssize_t count = ::read(stream.fd, buffer.data(), buffer.size());
    if (count < 0) return;  // no more for now
    if (count == 0) {
      ::close(stream.fd);
      stream.fd = -1;
      return;
    }
    stream.rest.append(buffer.data(), count);
    for (size_t end; (end = stream.rest.find('\n')) != std::string::npos;) {
      stream.lines.push_back({now_seconds(), stream.rest.substr(0, end)});
      stream.rest.erase(0, end + 1);
    }
  }
}

// A child of the process may hold the pipes: their end does not tell that of the process.
void WatchedProcess::collect() {
  int status = 0;
  if (!has_ended() && ::waitpid(pid_, &status, WNOHANG) == pid_)
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  for (Stream* stream : {&out_, &err_}) {
    read_some(*stream);
    if (has_ended() && !stream->rest.empty())
      stream->lines.push_back({now_seconds(), std::exchange(stream->rest, {})});
  }
}

bool watch(const WatchedProcesses& processes, double until, const std::function<bool()>& is_done) {
  while (true) {
    std::vector<pollfd> polled;
    for (const auto& process : processes) {
      process->collect();
      for (const int fd : {process->out_.fd, process->err_.fd}) {
        if (fd >= 0) polled.push_back({fd, POLLIN, 0});
      }
    }
    if (is_done()) return true;
    const double left = until - now_seconds();
    if (left <= 0) return false;
    ::poll(polled.data(), polled.size(), left < 0.01 ? 1 : 10);
  }
}

}  // namespace tessera
