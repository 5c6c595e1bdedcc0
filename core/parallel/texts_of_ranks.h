#pragma once

#include <tessera/comm/process_group.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera {

/// Returns the texts of all ranks; `own` makes this rank's. If it throws on any rank, all throw:
/// the others `c10::ValueError` if that one does, else `c10::Error`, with its message. Collective.
std::vector<std::string> texts_of_ranks(ProcessGroup& process_group, const CollectiveTag& tag,
                                        const std::function<std::string()>& own);

}  // namespace tessera
