#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace tessera::tools {

/// The worker's side of `ask()`: reads commands from stdin, one a line, until its end, and writes
/// what `answer` returns for each to stdout, as a line of JSON. Other output goes to stderr. While
/// idle, it waits in `read()` and uses no processor time. The process ends with its parent.
///
/// Returns the exit status; errors of `answer` pass through.
int serve_commands(const std::function<nlohmann::json(const std::string&)>& answer);

}  // namespace tessera::tools
