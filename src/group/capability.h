#pragma once

#include <tessera/process_group.h>

namespace tessera {

/// The ability `T` of a transport, behind whatever decorators; null if it lacks it. `T` is an
/// interface that only some transports implement: `SharesMemory`, `Closable`, `MakesParts`,
/// `SendsMessages`.
template <class T>
T* capability(ProcessGroup& process_group) {
  return dynamic_cast<T*>(&process_group.transport());
}

}  // namespace tessera
