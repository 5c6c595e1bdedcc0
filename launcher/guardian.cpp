#include "launcher/guardian.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <vector>

namespace tessera::tools {
namespace {

struct Message {
  int rank = 0;
  pid_t process_group = 0;
};

/// Keeps nothing of the launcher's open, or a reader of its output would wait for the guardian.
void close_all_but(int fd) {
  const int null_device = ::open("/dev/null", O_RDWR);
  for (int standard = 0; standard < 3; ++standard) ::dup2(null_device, standard);
  ::dup2(fd, 3);
  if (::syscall(SYS_close_range, 4U, ~0U, 0U) != 0) {
    for (int other = 4; other < 4096; ++other) ::close(other);
  }
}

/// Only async-signal-safe calls: the launcher may have threads.
[[noreturn]] void guard(int from_launcher, std::vector<pid_t>& process_groups,
                        const std::string& folder) {
  ::setsid();  // the terminal's signals must not reach the guardian
  ::prctl(PR_SET_NAME, "tessera-guard");
  close_all_but(from_launcher);
  Message message;
  while (true) {
    const ssize_t count = ::read(3, &message, sizeof(message));
    if (count < 0 && errno == EINTR) continue;
    if (count != sizeof(message)) break;
    process_groups[message.rank] = message.process_group;
  }
  for (pid_t process_group : process_groups) {
    if (process_group > 0) ::kill(-process_group, SIGKILL);
  }
  if (!folder.empty()) ::rmdir(folder.c_str());  // records in it are kept
  ::_exit(0);
}

}  // namespace

Guardian::Guardian(int ranks, const std::string& folder) {
  std::vector<pid_t> process_groups(ranks, 0);
  Pipe pipe;
  sigset_t all_signals;
  sigset_t previous;
  ::sigfillset(&all_signals);
  ::pthread_sigmask(SIG_SETMASK, &all_signals, &previous);  // stays so in the guardian
  pid_ = ::fork();
  if (pid_ == 0) guard(pipe.read_end.get(), process_groups, folder);
  const int error = errno;
  ::pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  if (pid_ < 0) throw std::system_error(error, std::generic_category(), "fork");
  to_guardian_ = std::move(pipe.write_end);
}

Guardian::~Guardian() {
  to_guardian_.reset();
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Guardian::set(int rank, pid_t process_group) {
  const Message message{rank, process_group};
  // Less than PIPE_BUF: all or nothing. Without a guardian the job goes on, guarded by PDEATHSIG.
  [[maybe_unused]] const ssize_t written = ::write(to_guardian_.get(), &message, sizeof(message));
}

}  // namespace tessera::tools
