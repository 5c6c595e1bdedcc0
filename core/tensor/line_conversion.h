#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/process_group.h>
#include <tessera/tensor/placement.h>

#include <cstdint>

namespace tessera {

/// Returns this rank's part of a tensor of `sizes` after its placement along one mesh dim changes
/// from `from` to `to`. `local` is not changed; the result may share its memory. `sizes` are those
/// of the tensor that the ranks of the line have together; `line` is their process group.
///
/// Collective over the line unless nothing is sent. `tag` names the tensor in errors.
at::Tensor convert_along(ProcessGroup& line, const at::Tensor& local, const Placement& from,
                         const Placement& to, at::IntArrayRef sizes, const CollectiveTag& tag);

/// Returns the bytes that this conversion of a tensor of `nbytes` along the line makes each of
/// `ranks` ranks send and receive, now or later, plus a little for each message, so that of equal
/// volumes the one with fewer messages is cheaper.
double conversion_cost(const Placement& from, const Placement& to, double nbytes, int64_t ranks);

}  // namespace tessera
