#include "group/check_arguments.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "group/local_sum.h"
#include "group/peer_message.h"

namespace tessera {
namespace {

void check_tensor(const char* function, const char* name, const at::Tensor& tensor,
                  const std::string& where) {
  TORCH_CHECK_VALUE(tensor.defined(), "[", function, "] `", name, "` must be defined", where);
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "[", function, "] `", name,
                    "` must be dense; got layout ", tensor.layout(), where);
  // A view with gaps would silently transfer the elements in the gaps.
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "[", function, "] `", name,
                    "` must be contiguous; got sizes ", tensor.sizes(), " with strides ",
                    tensor.strides(), where);
}

void check_bounds(const char* function, std::span<const int64_t> bounds, int size,
                  const std::string& where) {
  TORCH_CHECK_VALUE(bounds.size() == static_cast<size_t>(size) + 1, "[", function,
                    "] `bounds` must have an element more than there are ranks; expected ", size + 1,
                    ", got ", bounds.size(), where);
  TORCH_CHECK_VALUE(bounds[0] == 0, "[", function, "] `bounds` must begin with 0; got ", bounds[0],
                    where);
  for (int r = 0; r < size; ++r) {
    TORCH_CHECK_VALUE(bounds[r] <= bounds[r + 1], "[", function,
                      "] `bounds` must ascend; got ", bounds[r], " before ", bounds[r + 1], where);
  }
}

void check_shard(const char* function, const char* name, const at::Tensor& shard,
                 std::span<const int64_t> bounds, int rank, const std::string& where) {
  check_tensor(function, name, shard, where);
  TORCH_CHECK_VALUE(shard.numel() == bounds[rank + 1] - bounds[rank], "[", function, "] `", name,
                    "` must have the elements that `bounds` gives this rank; expected ",
                    bounds[rank + 1] - bounds[rank], ", got ", shard.numel(), where);
}

void check_piece(const Piece& piece, int64_t begin, int64_t end, at::ScalarType dtype,
                 const std::string& where) {
  TORCH_CHECK_VALUE(piece.numel >= 0 && piece.begin >= begin && piece.begin + piece.numel <= end,
                    "[reduce_scatter] `pieces` must ascend, be disjoint and lie inside `bounds`; got [",
                    piece.begin, ", ", piece.begin + piece.numel, ") where [", begin, ", ", end,
                    ") is left", where);
  if (piece.data.defined()) {
    check_tensor("reduce_scatter", "data", piece.data, where);
    TORCH_CHECK_VALUE(piece.data.numel() == piece.numel,
                      "[reduce_scatter] a piece's tensor must have `numel` elements; expected ",
                      piece.numel, ", got ", piece.data.numel(), where);
    TORCH_CHECK_VALUE(piece.data.scalar_type() == dtype,
                      "[reduce_scatter] pieces must have the dtype of `out`, or that of the options; expected ", dtype,
                      ", got ", piece.data.scalar_type(), where);
  }
}

void check_message(const char* name, size_t rank, const at::Tensor& message, at::ScalarType dtype,
                   const std::string& where) {
  TORCH_CHECK_VALUE(message.layout() == at::kStrided, "[all_to_all] `", name, "[", rank,
                    "]` must be dense; got layout ", message.layout(), where);
  TORCH_CHECK_VALUE(message.dim() == 1 && message.is_contiguous(), "[all_to_all] `", name, "[", rank,
                    "]` must be 1-D and contiguous; got sizes ", message.sizes(), " with strides ",
                    message.strides(), where);
  TORCH_CHECK_VALUE(message.scalar_type() == dtype, "[all_to_all] all messages must have one dtype; got ",
                    dtype, " and, as `", name, "[", rank, "]`, ", message.scalar_type(), where);
}

// The memory range of a message.
struct MessageMemory {
  const std::byte* begin;
  const std::byte* end;
  const char* name;
  size_t rank;
};

std::vector<MessageMemory> memory_of(const char* name, std::span<const at::Tensor> messages) {
  std::vector<MessageMemory> memory;
  for (size_t r = 0; r < messages.size(); ++r) {
    if (message_numel(messages[r]) == 0) continue;
    const auto* const begin = static_cast<const std::byte*>(messages[r].const_data_ptr());
    memory.push_back({begin, begin + messages[r].nbytes(), name, r});
  }
  return memory;
}

// Checks that no message is received into the memory of another message. `rank`, the calling rank,
// may receive its own message in place.
void check_disjoint(std::span<const at::Tensor> from, std::span<const at::Tensor> to, size_t rank,
                    const std::string& where) {
  std::vector<MessageMemory> written = memory_of("from", from), read = memory_of("to", to);
  const bool in_place =
      message_numel(to[rank]) > 0 && from[rank].const_data_ptr() == to[rank].const_data_ptr();
  if (in_place)
    std::erase_if(written, [&](const MessageMemory& place) { return place.rank == rank; });
  const auto by_begin = [](const MessageMemory& a, const MessageMemory& b) {
    return a.begin < b.begin;
  };
  std::sort(written.begin(), written.end(), by_begin);
  const auto check = [&](const MessageMemory& a, const MessageMemory& b) {
    TORCH_CHECK_VALUE(a.end <= b.begin || b.end <= a.begin,
                      "[all_to_all] no `from` may overlap a `to` or another `from`, except that this "
                      "rank's own may be its `to` itself; got `", a.name, "[", a.rank, "]` over `",
                      b.name, "[", b.rank, "]`", where);
  };
  for (size_t i = 1; i < written.size(); ++i) check(written[i - 1], written[i]);
  // Written ranges are disjoint and sorted, so only the first that ends after `begin` can overlap.
  for (const MessageMemory& place : read) {
    const auto next =
        std::partition_point(written.begin(), written.end(),
                             [&](const MessageMemory& other) { return other.end <= place.begin; });
    if (next != written.end()) check(*next, place);
  }
}

// Checks that apply to every process group.
void check(const ProcessGroup& process_group, const AllGather& call, const std::string& where) {
  check_bounds("all_gather", call.bounds, process_group.size(), where);
  check_shard("all_gather", "shard", call.shard, call.bounds, process_group.rank(), where);
  check_tensor("all_gather", "flat", call.flat, where);
  TORCH_CHECK_VALUE(call.flat.numel() == call.bounds.back(),
                    "[all_gather] `flat` must have `bounds.back()` elements; expected ",
                    call.bounds.back(), ", got ", call.flat.numel(), where);
  TORCH_CHECK_VALUE(call.flat.scalar_type() == call.shard.scalar_type(),
                    "[all_gather] `flat` and `shard` must have one dtype; got ",
                    call.flat.scalar_type(), " and ", call.shard.scalar_type(), where);
}

void check(const ProcessGroup& process_group, const ReduceScatter& call, const std::string& where) {
  check_bounds("reduce_scatter", call.bounds, process_group.size(), where);
  check_shard("reduce_scatter", "out", call.out, call.bounds, process_group.rank(), where);
  int64_t begin = 0;
  for (const Piece& piece : call.pieces) {
    check_piece(piece, begin, call.bounds.back(), call.dtype(), where);
    begin = piece.begin + piece.numel;
  }
}

void check(const ProcessGroup& /*process_group*/, const AllReduce& call, const std::string& where) {
  check_tensor("all_reduce", "tensor", call.tensor, where);
}

void check(const ProcessGroup& process_group, const Broadcast& call, const std::string& where) {
  check_tensor("broadcast", "tensor", call.tensor, where);
  TORCH_CHECK_VALUE(call.root >= 0 && call.root < process_group.size(),
                    "[broadcast] `root` must be a rank; expected 0 to ", process_group.size() - 1,
                    ", got ", call.root, where);
}

void check(const ProcessGroup& process_group, const AllToAll& call, const std::string& where) {
  const auto& [from, to] = call;
  const auto size = static_cast<size_t>(process_group.size());
  TORCH_CHECK_VALUE(from.size() == size && to.size() == size,
                    "[all_to_all] `from` and `to` must have an entry for each rank; expected ", size,
                    ", got ", from.size(), " and ", to.size(), where);
  std::optional<at::ScalarType> dtype;
  for (size_t r = 0; r < size; ++r) {
    for (const bool is_sent : {true, false}) {
      const at::Tensor& message = is_sent ? to[r] : from[r];
      if (message_numel(message) == 0) continue;
      if (!dtype) dtype = message.scalar_type();
      check_message(is_sent ? "to" : "from", r, message, *dtype, where);
    }
  }
  const auto rank = static_cast<size_t>(process_group.rank());
  TORCH_CHECK_VALUE(message_numel(from[rank]) == message_numel(to[rank]),
                    "[all_to_all] a rank's message to itself must fit; expected ",
                    message_numel(from[rank]), " elements in `to[", rank, "]`, got ",
                    message_numel(to[rank]), where);
  check_disjoint(from, to, rank, where);
}

void check(const ProcessGroup& /*process_group*/, const Barrier& /*call*/,
           const std::string& /*where*/) {}

// Additional checks for process groups whose tensors must be in host memory.
void check_on_host(const AllGather& call, const CollectiveTag& tag) {
  check_on_cpu("all_gather", call.flat, tag);
  check_on_cpu("all_gather", call.shard, tag);
}

void check_on_host(const ReduceScatter& call, const CollectiveTag& tag) {
  check_on_cpu("reduce_scatter", call.out, tag);
  check_reducible("reduce_scatter", call.dtype(), ReduceOp::kSum, call.out.scalar_type());
  for (const Piece& piece : call.pieces) {
    if (piece.data.defined()) check_on_cpu("reduce_scatter", piece.data, tag);
  }
}

void check_on_host(const AllReduce& call, const CollectiveTag& tag) {
  check_on_cpu("all_reduce", call.tensor, tag);
  check_reducible("all_reduce", call.tensor.scalar_type(), call.op);
}

void check_on_host(const Broadcast& call, const CollectiveTag& tag) {
  check_on_cpu("broadcast", call.tensor, tag);
}

void check_on_host(const AllToAll& call, const CollectiveTag& tag) {
  for (const auto& messages : {call.from, call.to}) {
    for (const at::Tensor& message : messages) {
      if (message_numel(message) > 0) check_on_cpu("all_to_all", message, tag);
    }
  }
}

void check_on_host(const Barrier& /*call*/, const CollectiveTag& /*tag*/) {}

}  // namespace

void check_arguments(const ProcessGroup& process_group, const Collective& collective) {
  // The end of every error message: names the unit and the rank.
  const std::string where = fmt::format(" (unit '{}', rank {} of {})", collective.tag.subject,
                                        process_group.rank(), process_group.size());
  std::visit(
      [&](const auto& call) {
        check(process_group, call, where);
        if (process_group.needs_host_memory()) check_on_host(call, collective.tag);
      },
      collective.call);
}

void check_on_cpu(const char* function, const at::Tensor& tensor, const CollectiveTag& tag) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "[", function,
                    "] the tensors of this process group must lie in host memory; got device ", tensor.device(),
                    " (unit '", tag.subject, "')");
}

void check_in_place(const ProcessGroup& process_group, const AllGather& call,
                    const CollectiveTag& tag) {
  const auto* const own =
      static_cast<const std::byte*>(call.flat.const_data_ptr()) +
      call.bounds[process_group.rank()] * static_cast<int64_t>(call.flat.element_size());
  TORCH_CHECK_VALUE(call.shard.numel() == 0 || own == call.shard.const_data_ptr(), "[all_gather] unit '",
                    tag.subject, "': `shard` must lie at its place in `flat`, which is shared memory");
}

}  // namespace tessera
