#pragma once

#include <string>
#include <vector>

#include "launcher/flight_record.h"

namespace tessera::tools {

/// Returns the lines of a table of the collectives in which the ranks differ or that are not
/// complete, at most 120 characters wide. Ranks with the same states share a column.
std::vector<std::string> flight_table(const MergedFlight& flight);

}  // namespace tessera::tools
