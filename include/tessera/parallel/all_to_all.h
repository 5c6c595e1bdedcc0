#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/process_group.h>
#include <tessera/export.h>

#include <cstdint>
#include <vector>

namespace tessera {

/// Tells each rank how many rows this rank will send it, and returns how many rows each rank will
/// send this one: the two lists that `all_to_all_single()` takes.
///
/// Collective; blocks. `input_split_sizes`: one number for each rank. Throws `c10::ValueError` on
/// every rank if one of them gives another number of sizes or a negative one.
TESSERA_API std::vector<int64_t> exchange_split_sizes(const std::vector<int64_t>& input_split_sizes,
                                                      const ProcessGroupPtr& process_group);

/// Sends the rows of `input`, slices of its first dim, to the ranks of a process group: the first
/// `input_split_sizes[0]` to rank 0, the next ones to rank 1, and so on; returns the rows that
/// ranks have sent to this one, those of rank 0 first, `output_split_sizes[r]` of rank `r`. With
/// these, the experts of a mixture get their tokens from all ranks, and send them back.
///
/// Differentiable, as often as wanted: the gradient of a row is sent back to the rank that the row
/// came from. So all ranks must run the same backwards; a rank that gets no rows has a result of no
/// rows, which must be part of its loss like those of others.
///
/// Collective, with equal dtypes and row shapes on all ranks. Waits for the rows. Throws
/// `c10::ValueError` on every rank if a rank's sizes don't fit its rows or those that other ranks
/// send, and for a DistTensor.
TESSERA_API at::Tensor all_to_all_single(const at::Tensor& input,
                                         std::vector<int64_t> output_split_sizes,
                                         std::vector<int64_t> input_split_sizes,
                                         const ProcessGroupPtr& process_group);

}  // namespace tessera
