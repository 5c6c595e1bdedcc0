#include "planner/command/step_table.h"

#include <fmt/format.h>

#include "planner/command/plan_table.h"

namespace tessera::tools {
namespace {

struct StepLine {
  const char* text;
  const char* key;
  double StepTime::*value;
  double scale;
};

constexpr StepLine kStepLines[] = {
    {"  forward (s)", "forward_seconds", &StepTime::forward, 1},
    {"  backward (s)", "backward_seconds", &StepTime::backward, 1},
    {"  optimizer (s)", "optimizer_seconds", &StepTime::optimizer, 1},
    {"  in all (s)", "seconds", &StepTime::seconds, 1},
    {"  one rank alone (s)", "compute_seconds", &StepTime::compute, 1},
    {"  the link, for its bytes (s)", "link_seconds", &StepTime::link, 1},
    {"  sent by each host (MB)", "link_nbytes", &StepTime::link_nbytes, 1e-6}};

std::string bandwidth_text(double bytes_per_second) {
  if (bytes_per_second == 0) return "without limit";
  return fmt::format("{:g} Mbit/s", bytes_per_second * 8 / 1e6);
}

std::string link_assumptions(const StepTimeOptions& options) {
  if (options.hosts == 1) return "- Nothing crosses a link: all ranks are on one host.\n";
  std::string text = fmt::format(
      "- A host's link, for all its ranks: {} in each direction, {:g} s until a message has "
      "arrived;\n"
      "  {:.2f} % of its bytes are payload (TCP over Ethernet).\n",
      bandwidth_text(options.link_bandwidth), options.link_latency, 100 * options.payload_share);
  text += fmt::format(
      "- A gather or a reduction of a unit of U bytes sends U x {}/{} from each host, and receives "
      "as much.\n",
      options.hosts - 1, options.hosts);
  text += options.ranks_per_host == 1
              ? "- Messages between hosts. A collective's bytes follow those of the one before.\n"
              : "- Shared memory inside a host, messages between hosts: gradients are summed "
                "inside the host first.\n"
                "  A collective's bytes follow those of the one before it on its channel "
                "(parameters, gradients).\n";
  return text;
}

}  // namespace

std::string step_table(const StepTimes& times, const StepTimeOptions& options) {
  std::string text = fmt::format("\ntime of a step on {} hosts with {} ranks each\n", options.hosts,
                                 options.ranks_per_host);
  for (const StepLine& line : kStepLines)
    text += line_of(line.text, times, [&](const auto& time) {
      return fmt::format("{:.4f}", time.second.*line.value * line.scale);
    });
  text += fmt::format(
      "\nassumed for the time:\n"
      "- Forward and backward take {:g} s on a rank alone, {:.0f} % of them backward, and each "
      "unit in\n"
      "  proportion to its elements; the optimizer takes {:g} s for the whole model.\n",
      options.compute_seconds, 100 * options.backward_share, options.optimizer_seconds);
  text += link_assumptions(options);
  text += fmt::format(
      "- A rank's share of its host's memory: {}; processor time for messages: {:g} s/GB.\n",
      bandwidth_text(options.host_bandwidth), options.processor_seconds_per_byte * 1e9);
  return text + "- All ranks are equal, and nothing else uses the links or the processors.\n";
}

nlohmann::ordered_json step_json(const StepTimes& times, const StepTimeOptions& options) {
  nlohmann::ordered_json levels = nlohmann::ordered_json::array();
  for (const auto& [level, time] : times) {
    nlohmann::ordered_json numbers = {{"level", level}};
    for (const StepLine& line : kStepLines) numbers[line.key] = time.*line.value;
    levels.push_back(numbers);
  }
  return {{"hosts", options.hosts},
          {"ranks_per_host", options.ranks_per_host},
          {"link_bandwidth", options.link_bandwidth},
          {"link_latency", options.link_latency},
          {"payload_share", options.payload_share},
          {"host_bandwidth", options.host_bandwidth},
          {"compute_seconds", options.compute_seconds},
          {"backward_share", options.backward_share},
          {"optimizer_seconds", options.optimizer_seconds},
          {"processor_seconds_per_byte", options.processor_seconds_per_byte},
          {"levels", levels}};
}

}  // namespace tessera::tools
