#pragma once

#include <tessera/comm/process_group.h>

namespace tessera::testing {

/// Returns `process_group` behind a check that the inputs of collectives stay as they are until
/// `wait_inputs()`, as peers may be reading them. That throws if they do not.
ProcessGroupPtr with_unchanged_inputs(const ProcessGroupPtr& process_group);

}  // namespace tessera::testing
