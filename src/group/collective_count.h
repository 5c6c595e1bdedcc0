#pragma once

#include <tessera/collective.h>

namespace tessera {

/// Counts a collective in all `CommDebug` scopes of this thread. They count it under the subject up
/// to " (": the shapes and placements after that serve only the comparison between ranks. Barriers,
/// which exchange no data, are not counted.
void count_collective(const Collective& collective);

}  // namespace tessera
