#include "planner/command/quantity.h"

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <stdexcept>

namespace tessera::tools {
namespace {

using UnitFactors = std::map<std::string, double>;

// Returns a number times the factor of its unit, or -1 if it is not such a text.
double quantity_of(const std::string& text, const UnitFactors& units) {
  size_t length = 0;
  double number = -1;
  try {
    number = std::stod(text, &length);
  } catch (const std::logic_error&) {
    return -1;
  }
  const auto unit = units.find(text.substr(length));
  if (unit == units.end() || !std::isfinite(number) || number < 0) return -1;
  return number * unit->second;
}

}  // namespace

double bandwidth_of(const std::string& text) {
  static const UnitFactors units = {{"bit", 1.0 / 8},  {"Kbit", 1e3 / 8},  {"Mbit", 1e6 / 8},
                                    {"Gbit", 1e9 / 8}, {"Tbit", 1e12 / 8}, {"kB", 1e3},
                                    {"MB", 1e6},       {"GB", 1e9},        {"TB", 1e12}};
  if (text == "unlimited") return 0;
  const double bandwidth = quantity_of(text, units);
  if (!(bandwidth > 0))
    throw std::invalid_argument(fmt::format(
        "must be a bandwidth such as 200Mbit, 10Gbit, 1.5GB or unlimited; got '{}'", text));
  return bandwidth;
}

double seconds_of(const std::string& text) {
  static const UnitFactors units = {{"", 1},      {"s", 1},     {"ms", 1e-3},
                                    {"us", 1e-6}, {"ns", 1e-9}, {"min", 60}};
  const double seconds = quantity_of(text, units);
  if (seconds < 0)
    throw std::invalid_argument(
        fmt::format("must be a time such as 0.1ms, 50us or 2s; got '{}'", text));
  return seconds;
}

int64_t bytes_of(const std::string& text) {
  constexpr double kKi = 1024;
  static const UnitFactors units = {{"", 1},
                                    {"B", 1},
                                    {"kB", 1e3},
                                    {"MB", 1e6},
                                    {"GB", 1e9},
                                    {"TB", 1e12},
                                    {"KiB", kKi},
                                    {"MiB", kKi * kKi},
                                    {"GiB", kKi * kKi * kKi},
                                    {"TiB", kKi * kKi * kKi * kKi}};
  const double bytes = quantity_of(text, units);
  if (!(bytes >= 1) || bytes > 1e18)
    throw std::invalid_argument(
        fmt::format("must be a size such as 24GB, 80GiB or 512MB; got '{}'", text));
  return static_cast<int64_t>(bytes);
}

}  // namespace tessera::tools
