#pragma once

#include <tessera/collective.h>

namespace tessera {

/// Tells the `CommDebug` scopes of this thread that a collective is issued. They count it by the
/// subject up to " (": the shapes and placements behind are for ranks to compare. Barriers, which
/// exchange nothing, are not counted.
void count_collective(const Collective& collective);

}  // namespace tessera
