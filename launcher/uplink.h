#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "launcher/job_report.h"

namespace tessera::tools {

/// News from a launcher to the one that started it on another host: lines on stderr, each with a
/// mark that the ranks' own lines do not have. The ranks' output is passed on between them.
class Uplink final : public JobReport {
 public:
  Uplink(Terminal& terminal, const std::string& job) : terminal_(terminal), job_(job) {}

  void on_start();
  void on_error(const std::string& text, int status);
  void on_failure(const RankEnd& end) override;
  void on_asked_flight(const MergedFlight& flight) override;
  int on_end(const JobEnd& end, const MergedFlight& flight) override;

 private:
  void send(const std::string& json);
  void send(const MergedFlight& flight);

  Terminal& terminal_;
  std::string job_;
};

/// A line of an `Uplink`.
struct UplinkMessage {
  enum class Kind { kStart, kError, kFailure, kFlight, kAskedFlightEnd, kEnd };
  Kind kind = Kind::kStart;
  std::string text;     ///< of `kError`
  int status = 0;       ///< of `kError`
  JobEnd end;           ///< of `kEnd`; of `kFailure`: one rank
  MergedFlight flight;  ///< of `kFlight`: a part of the records
};

/// Returns nothing if `line` is one of a rank.
std::optional<UplinkMessage> parse_uplink(std::string_view line, const std::string& job);

}  // namespace tessera::tools
