#pragma once

#include <tessera/comm/process_group.h>

#include <cstdint>
#include <vector>

namespace tessera {

/// Calls `visit(tensor, is_written)` for each tensor of a call: it is written to, or only read.
template <class Call, class Visit>
void for_each_tensor(Call& call, const Visit& visit) {
  if constexpr (requires { call.tensor; }) visit(call.tensor, true);
  if constexpr (requires { call.flat; }) visit(call.flat, true);
  if constexpr (requires { call.shard; }) visit(call.shard, false);
  if constexpr (requires { call.out; }) visit(call.out, true);
  if constexpr (requires { call.options; }) {
    if (call.options.gather_into.defined()) visit(call.options.gather_into, true);
  }
  if constexpr (requires { call.pieces; }) {
    for (auto& piece : call.pieces) visit(piece.data, false);
  }
  if constexpr (requires { call.from; }) {
    for (auto& message : call.from) visit(message, true);
    for (auto& message : call.to) visit(message, false);
  }
}

/// Returns the form of the messages of a call.
template <class Call>
Encoding encoding_of(const Call& call) {
  if constexpr (requires { call.encoding; }) return call.encoding;
  if constexpr (requires { call.options; }) return call.options.encoding;
  return Encoding::kPlain;
}

/// Throws `c10::ValueError` unless `process_group` can issue `collective`. Checks only this rank's
/// arguments: disagreements between ranks are reported when they wait.
void check_arguments(const ProcessGroup& process_group, const Collective& collective);

/// Throws `c10::ValueError` unless the shard of `call` is empty or is this rank's part of the
/// shared memory `flat`.
void check_in_place(const ProcessGroup& process_group, const AllGather& call,
                    const CollectiveTag& tag);

/// Returns bounds that split `numel` elements as evenly as possible over `size` ranks.
std::vector<int64_t> even_bounds(int64_t numel, int size);

}  // namespace tessera
