#include <nlohmann/json.hpp>

#include "support/sim_device/sim_device.h"

namespace tessera::testing::sim {

std::string chrome_trace(const std::vector<LoggedOperation>& operations) {
  nlohmann::json events = nlohmann::json::array();
  if (operations.empty()) return events.dump();
  const auto first = operations.front().issued;
  const auto microseconds = [](auto duration) {
    return std::chrono::duration<double, std::micro>(duration).count();
  };
  for (const LoggedOperation& operation : operations) {
    if (operation.end == decltype(operation.end)()) continue;
    events.push_back({{"ph", "X"},
                      {"name", operation.name},
                      {"pid", operation.device},
                      {"tid", operation.stream},
                      {"ts", microseconds(operation.begin - first)},
                      {"dur", microseconds(operation.end - operation.begin)},
                      {"args", {{"issued", microseconds(operation.issued - first)}}}});
  }
  return events.dump();
}

}  // namespace tessera::testing::sim
