#include "launcher/host_list.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <sstream>
#include <stdexcept>

namespace tessera::tools {
namespace {

constexpr int kMostRanksOfHost = 65536;
constexpr int kHighestPort = 65535;

/// "name:number", or "name" alone; the colons of an address in brackets belong to the name.
std::pair<std::string, std::optional<std::string>> split_number(const std::string& text) {
  if (text.starts_with('[')) {
    const size_t close = text.find(']');
    if (close == std::string::npos)
      throw std::invalid_argument(fmt::format("expected ']' in '{}'", text));
    const std::string name = text.substr(1, close - 1);
    if (close + 1 == text.size()) return {name, std::nullopt};
    if (text[close + 1] != ':')
      throw std::invalid_argument(fmt::format("expected ':' after ']' in '{}'", text));
    return {name, text.substr(close + 2)};
  }
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return {text, std::nullopt};
  if (text.find(':', colon + 1) != std::string::npos)
    throw std::invalid_argument(fmt::format("expected brackets around the address in '{}'", text));
  return {text.substr(0, colon), text.substr(colon + 1)};
}

int number_between_one_and(int most, const std::string& number, const std::string& text) {
  int value = 0;
  const char* end = number.data() + number.size();
  const auto result = std::from_chars(number.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end || value < 1 || value > most)
    throw std::invalid_argument(
        fmt::format("expected a number from 1 to {} in '{}', got '{}'", most, text, number));
  return value;
}

void require_name(const std::string& name, const std::string& text) {
  // A name that begins with '-' would be an option of mpirun.
  if (name.empty() || name.starts_with('-'))
    throw std::invalid_argument(fmt::format("expected the name of a host in '{}'", text));
}

}  // namespace

std::vector<Host> parse_hosts(const std::string& text, int default_ranks) {
  std::vector<Host> hosts;
  bool any_without_number = false;
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    const auto [name, number] = split_number(item);
    require_name(name, text);
    any_without_number = any_without_number || !number;
    if (!number && default_ranks == 0)
      throw std::invalid_argument(fmt::format("expected {}:RANKS, or -n for all hosts", name));
    const int ranks =
        number ? number_between_one_and(kMostRanksOfHost, *number, item) : default_ranks;
    if (std::any_of(hosts.begin(), hosts.end(), [&](const Host& h) { return h.name == name; }))
      throw std::invalid_argument(fmt::format("host {} is named twice", name));
    hosts.push_back({name, ranks});
  }
  if (hosts.empty()) throw std::invalid_argument("expected the names of hosts");
  if (default_ranks > 0 && !any_without_number)
    throw std::invalid_argument(
        fmt::format("all hosts of '{}' have numbers; expected no -n", text));
  return hosts;
}

std::pair<std::string, int> parse_master(const std::string& text, int default_port) {
  const auto [name, number] = split_number(text);
  require_name(name, text);
  return {name, number ? number_between_one_and(kHighestPort, *number, text) : default_port};
}

}  // namespace tessera::tools
