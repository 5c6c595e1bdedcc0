#pragma once

#include <tessera/comm/process_group.h>

namespace tessera::testing {

/// Returns `process_group` behind a check that inputs of collectives in host memory stay as they
/// are until `wait_inputs()`, as peers may be reading them. That throws if they do not.
/// Returns `process_group` itself if its ranks share memory.
ProcessGroupPtr with_unchanged_inputs(const ProcessGroupPtr& process_group);

}  // namespace tessera::testing
