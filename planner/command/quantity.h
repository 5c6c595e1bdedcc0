#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tessera::tools {

/// Returns the bytes per second of a bandwidth such as `200Mbit`, `10Gbit`, `1.5GB` or `8Kbit`, per
/// second and with factors of 1000; 0 for `unlimited`. Throws `std::invalid_argument` for others.
double bandwidth_of(const std::string& text);

/// Returns the seconds of a time such as `0.1ms`, `50us`, `2s`, or of a number without a unit.
/// Throws `std::invalid_argument` for others, and for negative ones.
double seconds_of(const std::string& text);

/// Returns the bytes of a size such as `24GB` (1e9 bytes each), `24GiB` (2^30), `512MB`, or of a
/// number without a unit. Throws `std::invalid_argument` for others, for 0 and for more than 1e18.
int64_t bytes_of(const std::string& text);

/// Adds an option whose text `parse`, one of these functions, turns into a number.
template <class Value, class Number>
CLI::Option* add_quantity(CLI::App& app, const std::string& name, Value& value,
                          Number (*parse)(const std::string&), const std::string& type,
                          const std::string& description) {
  const auto take = [&value, parse, name](const CLI::results_t& texts) {
    try {
      value = parse(texts.back());
    } catch (const std::invalid_argument& error) {
      throw CLI::ValidationError(name, error.what());
    }
    return true;
  };
  return app.add_option(name, CLI::callback_t(take), description)->type_name(type)->expected(1);
}

}  // namespace tessera::tools
