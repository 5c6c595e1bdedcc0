#include "launcher/child.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "launcher/signal_pipe.h"

namespace tessera::tools {
namespace {

/// A set of cores, of the size that the largest id needs.
class CoreSet {
 public:
  explicit CoreSet(const std::vector<int>& ids) {
    if (ids.empty()) return;
    const int capacity = *std::max_element(ids.begin(), ids.end()) + 1;
    set_ = CPU_ALLOC(capacity);
    bytes_ = CPU_ALLOC_SIZE(capacity);
    CPU_ZERO_S(bytes_, set_);
    for (int id : ids) CPU_SET_S(id, bytes_, set_);
  }
  ~CoreSet() {
    if (set_ != nullptr) CPU_FREE(set_);
  }
  CoreSet(const CoreSet&) = delete;
  CoreSet& operator=(const CoreSet&) = delete;

  /// If a core went offline in the meantime, that is no reason to fail: the rank runs unbound.
  void bind() const {
    if (set_ != nullptr) ::sched_setaffinity(0, bytes_, set_);
  }

 private:
  cpu_set_t* set_ = nullptr;
  size_t bytes_ = 0;
};

/// Data for the new process, prepared before the fork: after it, nothing may allocate.
struct Prepared {
  std::vector<char*> arguments;
  std::vector<char*> environment;
  CoreSet cores;
  bool inherit_stdin;
  int input;
  pid_t launcher;
};

void reset_signals() {
  // Handlers are reset by exec; ignored signals are not: the launcher ignores SIGPIPE.
  ::signal(SIGPIPE, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::pthread_sigmask(SIG_SETMASK, &none, nullptr);
}

[[noreturn]] void become(const Prepared& prepared, int out, int err, int failure) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != prepared.launcher) ::_exit(1);  // the launcher died before prctl()
  prepared.cores.bind();
  if (prepared.input >= 0) {
    ::dup2(prepared.input, STDIN_FILENO);
  } else if (!prepared.inherit_stdin) {
    const int null_device = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null_device >= 0) ::dup2(null_device, STDIN_FILENO);
  }
  ::dup2(out, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
  reset_signals();
  ::execvpe(prepared.arguments[0], prepared.arguments.data(), prepared.environment.data());
  const int error = errno;
  [[maybe_unused]] const ssize_t written = ::write(failure, &error, sizeof(error));
  ::_exit(error == ENOENT ? 127 : 126);
}

}  // namespace

std::vector<char*> argument_pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

Child start_child(const ChildOptions& options) {
  const Prepared prepared{argument_pointers(options.command),
                          argument_pointers(options.environment),
                          CoreSet(options.cores),
                          options.inherit_stdin,
                          options.input,
                          ::getpid()};
  Pipe out;
  Pipe err;
  Pipe failure;
  const pid_t pid = ::fork();
  if (pid < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (pid == 0) {
    become(prepared, out.write_end.get(), err.write_end.get(), failure.write_end.get());
  }
  ::setpgid(pid, pid);  // here, too: from now on the group exists, whichever process was first
  failure.write_end.reset();
  int error = 0;
  ssize_t count = 0;
  do {  // end of file as soon as exec closes the other end
    count = ::read(failure.read_end.get(), &error, sizeof(error));
  } while (count < 0 && errno == EINTR);
  Child child{pid, std::move(out.read_end), std::move(err.read_end)};
  if (count != sizeof(error)) return child;
  ::waitpid(pid, nullptr, 0);
  throw ExecError(fmt::format("cannot execute '{}': {} (errno {})", options.command.front(),
                              std::strerror(error), error),
                  error);
}

}  // namespace tessera::tools
