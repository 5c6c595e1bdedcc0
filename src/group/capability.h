#pragma once

#include <tessera/process_group.h>

namespace tessera {

/// Returns the transport behind any decorators of `process_group` as a `T`, or null if it is none.
/// `T` is an interface that only some transports implement: `SharesMemory`, `Closable`,
/// `MakesParts`, `SendsMessages`.
template <class T>
T* capability(ProcessGroup& process_group) {
  return dynamic_cast<T*>(&process_group.transport());
}

}  // namespace tessera
