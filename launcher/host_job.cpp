#include "launcher/host_job.h"

#include <signal.h>

#include <algorithm>

#include "launcher/last_words.h"

namespace tessera::tools {
namespace {

/// Between hosts: for the messages, and for a program like ssh to end.
constexpr std::chrono::milliseconds kHostSlack{3000};
/// A launcher waits two seconds for the records of its own ranks.
constexpr std::chrono::milliseconds kAnswerTime{4000};

}  // namespace

HostJob::HostJob(const HostsOptions& options, HostsStart start, Terminal& terminal,
                 SignalPipe& signals, JobReport& report)
    : options_(options),
      start_(std::move(start)),
      terminal_(terminal),
      signals_(signals),
      report_(report) {}

HostJobEnd HostJob::run() {
  start_connections();
  while (any_open()) {
    std::vector<RankStream*> streams;
    for (const auto& connection : connections_) {
      streams.push_back(&connection->out());
      streams.push_back(&connection->err());
    }
    const Events events =
        wait_for_events(signals_, terminal_, streams, std::min(deadline_, asked_until_));
    for (const int signal : events.signals) on_signal(signal);
    if (terminal_.broken() && end_.job.interrupted_by == 0) {
      end_.job.interrupted_by = SIGPIPE;  // as for any program whose reader has gone
      end_all_hosts();
    }
    extend_last_words();
    look_for_asked_flight();
    if (Clock::now() >= deadline_) on_deadline();
  }
  if (!asked_.empty()) report_.on_asked_flight(asked_);  // and then the ranks ended
  return std::move(end_);
}

void HostJob::start_connections() {
  int first_rank = 0;
  for (size_t node = 0; node < start_.hosts.size(); ++node) {
    const Host& host = start_.hosts[node];
    connections_.push_back(std::make_unique<HostConnection>(
        HostConnection::Setup{host, first_rank, start_.job,
                              remote_command(options_, start_, static_cast<int>(node))},
        terminal_, [this](HostConnection& connection, UplinkMessage message) {
          on_message(connection, std::move(message));
        }));
    first_rank += host.ranks;
  }
}

bool HostJob::any_open() const {
  return std::any_of(connections_.begin(), connections_.end(),
                     [](const auto& connection) { return connection->is_open(); });
}

void HostJob::on_signal(int signal) {
  if (signal == SIGCHLD) {
    look_for_ended_connections();
    return;
  }
  for (const auto& connection : connections_) connection->send_signal(signal);
  switch (signal) {
    case SIGTSTP:  // Ctrl-Z: the ranks stop and continue with this launcher
      ::raise(SIGSTOP);
      for (const auto& connection : connections_) connection->send_signal(SIGCONT);
      return;
    case SIGUSR1:
      asked_until_ = Clock::now() + kAnswerTime;
      answers_ = 0;
      return;
    case SIGUSR2:
      return;
    default:
      break;
  }
  if (end_.job.interrupted_by == 0) end_.job.interrupted_by = signal;
  if (signal == SIGINT && ++interrupts_ > 1) {
    enter(Phase::kEnding, time_to_end());
  } else if (phase_ == Phase::kRunning) {
    enter(Phase::kInterrupted, options_.launch.interrupt_grace + time_to_end());
  }
}

void HostJob::on_message(HostConnection& connection, UplinkMessage message) {
  switch (message.kind) {
    case UplinkMessage::Kind::kStart:
      return;
    case UplinkMessage::Kind::kError:
      if (end_.error.empty()) {
        end_.error = "host " + connection.setup().host.name + ": " + message.text;
        end_.error_status = message.status;
      }
      end_all_hosts();
      return;
    case UplinkMessage::Kind::kFailure:
      for (const RankEnd& rank : message.end.ranks) on_failure(rank);
      return;
    case UplinkMessage::Kind::kFlight:
      for (RankFlight& rank : message.flight.ranks) connection.flight.add(std::move(rank));
      for (std::string& line : message.flight.unreadable)
        connection.flight.unreadable.push_back(std::move(line));
      return;
    case UplinkMessage::Kind::kAskedFlightEnd:
      move_flight(connection.flight, asked_);
      ++answers_;
      return;
    case UplinkMessage::Kind::kEnd:
      on_host_end(connection, message);
      return;
  }
}

void HostJob::on_failure(const RankEnd& end) {
  // Clocks of hosts differ: the order is that in which the news comes here.
  end_.job.ranks.push_back(end);
  end_.job.ranks.back().seconds = seconds();
  report_.on_failure(end);
  on_failing();
}

void HostJob::on_host_end(HostConnection& connection, const UplinkMessage& message) {
  auto& ranks = end_.job.ranks;
  for (const RankEnd& end : message.end.ranks) {
    const auto known = std::find_if(ranks.begin(), ranks.end(),
                                    [&](const RankEnd& r) { return r.rank == end.rank; });
    if (known == ranks.end()) {
      ranks.push_back(end);
      ranks.back().seconds = seconds();
    } else {
      const double at = known->seconds;
      *known = end;
      known->seconds = at;
    }
  }
  const auto& immortal = message.end.immortal;
  end_.job.immortal.insert(end_.job.immortal.end(), immortal.begin(), immortal.end());
  move_flight(connection.flight, end_.flight);
}

/// Gives the ranks that have not failed a moment.
void HostJob::on_failing() {
  last_news_ = Clock::now();
  if (phase_ != Phase::kRunning) return;
  last_words_end_ = Clock::now() + std::min(kLastWords, options_.launch.grace);
  enter(Phase::kFailing, std::min(kSilence, options_.launch.grace));
}

void HostJob::extend_last_words() {
  size_t heard = 0;
  for (const auto& connection : connections_) heard += connection->err().bytes();
  if (heard != bytes_heard_) last_news_ = Clock::now();
  bytes_heard_ = heard;
  if (phase_ != Phase::kFailing) return;
  deadline_ = std::min(last_news_ + std::min(kSilence, options_.launch.grace), last_words_end_);
}

void HostJob::look_for_ended_connections() {
  for (const auto& connection : connections_) {
    const std::optional<int> status = connection->look_for_end();
    if (!status || connection->has_reported()) continue;
    const HostConnection::Setup& setup = connection->setup();
    end_.job.lost.push_back({.name = setup.host.name,
                             .first_rank = setup.first_rank,
                             .ranks = setup.host.ranks,
                             .status = *status,
                             .started = connection->has_started(),
                             .seconds = seconds()});
    on_failing();
  }
}

void HostJob::look_for_asked_flight() {
  if (asked_until_ == Clock::time_point::max()) return;
  const auto open = std::count_if(connections_.begin(), connections_.end(),
                                  [](const auto& connection) { return connection->is_open(); });
  if (answers_ < static_cast<size_t>(open) && Clock::now() < asked_until_) return;
  asked_until_ = Clock::time_point::max();
  report_.on_asked_flight(asked_);
  asked_ = {};
}

void HostJob::on_deadline() {
  if (phase_ == Phase::kEnding || phase_ == Phase::kKilled) {
    for (const auto& connection : connections_) connection->kill();
    enter(Phase::kKilled, kKillTime);
  } else {
    end_all_hosts();
  }
}

void HostJob::enter(Phase phase, std::chrono::milliseconds duration) {
  phase_ = phase;
  deadline_ = Clock::now() + duration;
}

void HostJob::end_all_hosts() {
  if (phase_ == Phase::kEnding || phase_ == Phase::kKilled) return;
  for (const auto& connection : connections_) connection->close_input();
  enter(Phase::kEnding, time_to_end());
}

std::chrono::milliseconds HostJob::time_to_end() const {
  // From SIGTERM to SIGKILL for the ranks, and once more for programs that they left behind.
  return 2 * (options_.launch.grace + kKillTime) + kHostSlack;
}

double HostJob::seconds() const {
  return std::chrono::duration<double>(Clock::now() - started_).count();
}

}  // namespace tessera::tools
