#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/placement.h>
#include <tessera/process_group.h>

#include <cstdint>
#include <string_view>

namespace tessera {

/// The ranks along one mesh dim, this one among them.
struct Line {
  ProcessGroup& process_group;
  int rank() const { return process_group.rank(); }
  int size() const { return process_group.size(); }
};

/// This rank's part of a tensor of `sizes` after its placement along one mesh dim changes from
/// `from` to `to`. `local` is not changed; the result may share its memory. `sizes` are those of
/// the tensor that the line's ranks have together.
///
/// Collective over the line unless nothing is sent. `subject` names the tensor in errors.
at::Tensor convert_along(const Line& line, const at::Tensor& local, const Placement& from,
                         const Placement& to, at::IntArrayRef sizes, std::string_view subject);

/// What that sends and receives on each of `ranks` ranks, for a tensor of `nbytes` along the line,
/// or makes others send later; with a little on top for each message, so that of equal volumes the
/// fewer messages are cheaper.
double conversion_cost(const Placement& from, const Placement& to, double nbytes, int64_t ranks);

}  // namespace tessera
