#include "launcher/host_connection.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

namespace tessera::tools {
namespace {

std::vector<std::string> inherited_environment() {
  std::vector<std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) variables.emplace_back(*entry);
  return variables;
}

}  // namespace

HostConnection::HostConnection(Setup setup, Terminal& terminal,
                               std::function<void(HostConnection&, UplinkMessage)> on_message)
    : setup_(std::move(setup)), terminal_(terminal), on_message_(std::move(on_message)) {
  Pipe input;
  Child child = start_child({.command = setup_.command,
                             .environment = inherited_environment(),
                             .input = input.read_end.get()});
  pid_ = child.pid;
  ::fcntl(input.write_end.get(), F_SETFL, O_NONBLOCK);
  input_ = std::move(input.write_end);
  // The launcher there has put the prefixes.
  out_ = std::make_unique<RankStream>(std::move(child.out),
                                      StreamOptions{.terminal_fd = STDOUT_FILENO}, terminal_);
  err_ = std::make_unique<RankStream>(
      std::move(child.err),
      StreamOptions{.on_line = [this](std::string_view line) { on_error_line(line); }}, terminal_);
}

HostConnection::~HostConnection() {
  if (pid_ <= 0) return;
  kill();
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void HostConnection::send_signal(int signal) {
  const auto byte = static_cast<unsigned char>(signal);
  if (!input_.is_open()) return;
  // If nobody reads, the end of the connection says so.
  [[maybe_unused]] const ssize_t written = ::write(input_.get(), &byte, 1);
}

void HostConnection::kill() {
  if (pid_ > 0) ::kill(-pid_, SIGKILL);
}

std::optional<int> HostConnection::look_for_end() {
  int status = 0;
  if (pid_ <= 0 || ::waitpid(pid_, &status, WNOHANG) != pid_) return std::nullopt;
  pid_ = -1;
  input_.reset();
  out_->finish();
  err_->finish();
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void HostConnection::on_error_line(std::string_view line) {
  std::optional<UplinkMessage> message = parse_uplink(line, setup_.job);
  if (!message) {
    terminal_.write_from(this, STDERR_FILENO, std::string(line) + "\n");
    return;
  }
  using Kind = UplinkMessage::Kind;
  has_started_ = true;
  if (message->kind == Kind::kError || message->kind == Kind::kEnd) has_reported_ = true;
  on_message_(*this, std::move(*message));
}

}  // namespace tessera::tools
