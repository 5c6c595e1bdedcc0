#include "program_run.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace tessera {
namespace {

struct Channels {
  int in[2];
  int out[2];
  int err[2];
};

void require(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(std::string("cannot set up a test program: ") + what);
}

Channels make_channels(bool on_terminal) {
  Channels channels;
  require(::pipe2(channels.in, O_CLOEXEC) == 0, "pipe");
  if (on_terminal) {
    require(::openpty(&channels.out[0], &channels.out[1], nullptr, nullptr, nullptr) == 0,
            "openpty");
    channels.err[0] = -1;
    channels.err[1] = ::dup(channels.out[1]);
    for (int fd : {channels.out[0], channels.out[1], channels.err[1]}) {
      ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
  } else {
    require(::pipe2(channels.out, O_CLOEXEC) == 0, "pipe");
    require(::pipe2(channels.err, O_CLOEXEC) == 0, "pipe");
  }
  return channels;
}

[[noreturn]] void become(const Command& command, const ProgramRun::Options& options,
                         const Channels& channels) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // A shell starts its background jobs with SIGINT ignored, and ignored signals are inherited.
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGTSTP, SIGPIPE}) ::signal(number, SIG_DFL);
  ::dup2(channels.in[0], STDIN_FILENO);
  ::dup2(channels.out[1], STDOUT_FILENO);
  ::dup2(channels.err[1], STDERR_FILENO);
  for (const auto& [name, value] : options.environment) {
    value.empty() ? ::unsetenv(name.c_str()) : ::setenv(name.c_str(), value.c_str(), 1);
  }
  std::vector<char*> arguments;
  for (const std::string& argument : command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  ::_exit(127);
}

}  // namespace

ProgramRun::ProgramRun(Command command) : ProgramRun(std::move(command), Options()) {}

ProgramRun::ProgramRun(Command command, Options options)
    : options_(std::move(options)), started_(std::chrono::steady_clock::now()) {
  const Channels channels = make_channels(options_.on_terminal);
  pid_ = ::fork();
  require(pid_ >= 0, "fork");
  if (pid_ == 0) become(command, options_, channels);
  ::close(channels.in[0]);
  ::close(channels.out[1]);
  ::close(channels.err[1]);
  [[maybe_unused]] const ssize_t written =
      ::write(channels.in[1], options_.input.data(), options_.input.size());
  ::close(channels.in[1]);
  out_fd_ = channels.out[0];
  err_fd_ = channels.err[0];
}

ProgramRun::~ProgramRun() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  for (int fd : {out_fd_, err_fd_}) {
    if (fd >= 0) ::close(fd);
  }
}

void ProgramRun::signal(int number) const { ::kill(pid_, number); }

bool ProgramRun::past_limit() const {
  return std::chrono::steady_clock::now() - started_ > options_.limit;
}

bool ProgramRun::read_from(int& fd, std::string& to) {
  char buffer[1 << 16];
  const ssize_t count = ::read(fd, buffer, sizeof(buffer));
  if (count > 0) {
    to.append(buffer, count);
    return true;
  }
  ::close(fd);  // a terminal whose other end was closed gives EIO
  fd = -1;
  return false;
}

/// Waits for output, for a while at most; false when there will be no more.
bool ProgramRun::collect_some() {
  if (out_fd_ < 0 && err_fd_ < 0) return false;
  pollfd polled[] = {{out_fd_, POLLIN, 0}, {err_fd_, POLLIN, 0}};
  ::poll(polled, 2, 50);
  if (out_fd_ >= 0 && polled[0].revents != 0) read_from(out_fd_, end_.out);
  if (err_fd_ >= 0 && polled[1].revents != 0) read_from(err_fd_, end_.err);
  return true;
}

bool ProgramRun::wait_for_output(const std::string& text, int times) {
  const auto count = [&] {
    int found = 0;
    for (size_t at = 0; (at = end_.out.find(text, at)) != std::string::npos; at += text.size())
      ++found;
    return found;
  };
  while (count() < times) {
    if (past_limit() || !collect_some()) return count() >= times;
  }
  return true;
}

ProgramEnd ProgramRun::wait() {
  int status = 0;
  pid_t ended = 0;
  while (ended == 0 && !past_limit()) {
    const bool more = collect_some();
    ended = ::waitpid(pid_, &status, WNOHANG);
    if (!more && ended == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (ended == 0) {
    end_.err += "\n[the test killed it: it took too long]\n";
    ::kill(pid_, SIGKILL);
    ended = ::waitpid(pid_, &status, 0);
  }
  pid_ = -1;
  end_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  while (!past_limit() && collect_some()) {
  }
  end_.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return end_;
}

ProgramEnd run_program(Command command, ProgramRun::Options options) {
  return ProgramRun(std::move(command), std::move(options)).wait();
}

char process_state(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return 'X';
  return text[text.rfind(')') + 2];  // the name before it may hold anything
}

bool is_running(pid_t pid) {
  const char state = process_state(pid);
  return state != 'Z' && state != 'X';
}

bool all_end(const std::vector<pid_t>& pids) {
  for (int i = 0; i < 1000; ++i) {
    bool any = false;
    for (pid_t pid : pids) any = any || is_running(pid);
    if (!any) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

TemporaryDirectory::TemporaryDirectory() {
  std::string pattern = std::filesystem::temp_directory_path() / "tessera_test_XXXXXX";
  require(::mkdtemp(pattern.data()) != nullptr, "mkdtemp");
  path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<pid_t> numbers_after(const std::string& text, const std::string& key) {
  std::vector<pid_t> numbers;
  const std::string marker = key + " ";
  for (size_t at = 0; (at = text.find(marker, at)) != std::string::npos; at += marker.size()) {
    numbers.push_back(std::atoi(text.c_str() + at + marker.size()));
  }
  return numbers;
}

}  // namespace tessera
