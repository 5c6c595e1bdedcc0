#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/child.h"
#include "launcher/host_list.h"
#include "launcher/rank_stream.h"
#include "launcher/uplink.h"

namespace tessera::tools {

/// The connection to the launcher of one host: a program (ssh) whose stdin carries signals there,
/// and whose stdout and stderr bring the output of the ranks and the launcher's news.
class HostConnection {
 public:
  struct Setup {
    Host host;
    int first_rank = 0;
    std::string job;
    std::vector<std::string> command;
  };
  HostConnection(Setup setup, Terminal& terminal,
                 std::function<void(HostConnection&, UplinkMessage)> on_message);
  ~HostConnection();
  HostConnection(const HostConnection&) = delete;
  HostConnection& operator=(const HostConnection&) = delete;

  const Setup& setup() const { return setup_; }
  RankStream& out() { return *out_; }
  RankStream& err() { return *err_; }

  void send_signal(int signal);
  /// Tells the launcher there to end its ranks.
  void close_input() { input_.reset(); }
  void kill();

  bool is_open() const { return pid_ > 0; }
  /// Returns true if the launcher there has reported the end of its ranks, or that it could not
  /// start them.
  bool has_reported() const { return has_reported_; }
  bool has_started() const { return has_started_; }

  /// Returns the exit status of the connection's program once it has ended; its output has then
  /// been read.
  std::optional<int> look_for_end();

  MergedFlight flight;  ///< records that came, until they are complete

 private:
  void on_error_line(std::string_view line);

  Setup setup_;
  Terminal& terminal_;
  std::function<void(HostConnection&, UplinkMessage)> on_message_;
  pid_t pid_ = -1;
  UniqueFd input_;
  std::unique_ptr<RankStream> out_;
  std::unique_ptr<RankStream> err_;
  bool has_started_ = false;
  bool has_reported_ = false;
};

}  // namespace tessera::tools
