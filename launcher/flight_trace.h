#pragma once

#include <string>

#include "launcher/flight_record.h"

namespace tessera::tools {

/// Returns the records as a Chrome trace: a process for each rank, a thread for each of its
/// channels.
std::string flight_trace(const MergedFlight& flight);

}  // namespace tessera::tools
