#pragma once

#include <tessera/process_group.h>

#include <functional>

namespace tessera {

/// Runs `work` on every rank; if it throws on any, for whatever reason, all ranks throw.
/// Collective: no rank returns before all are done.
void fail_together(ProcessGroup& process_group, const std::function<void()>& work);

}  // namespace tessera
