#include "group/check_arguments.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "group/collective_count.h"
#include "group/local_sum.h"
#include "group/peer_message.h"

namespace tessera {
namespace {

// Ends every message: which unit, which rank.
std::string where(const ProcessGroup& process_group, const CollectiveTag& tag) {
  return fmt::format(" (unit '{}', rank {} of {})", tag.subject, process_group.rank(),
                     process_group.size());
}

void check_tensor(const char* function, const char* name, const at::Tensor& tensor,
                  const std::string& where) {
  TORCH_CHECK_VALUE(tensor.defined(), "[", function, "] `", name, "` must be defined", where);
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "[", function, "] `", name,
                    "` must be dense; got layout ", tensor.layout(), where);
  // A view with gaps would silently move what lies in the gaps.
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

// Where a message lies.
struct MessagePlace {
  const std::byte* begin;
  const std::byte* end;
  const char* name;
  size_t rank;
};

std::vector<MessagePlace> places_of(const char* name, std::span<const at::Tensor> messages) {
  std::vector<MessagePlace> places;
  for (size_t r = 0; r < messages.size(); ++r) {
    if (message_numel(messages[r]) == 0) continue;
    const auto* const begin = static_cast<const std::byte*>(messages[r].const_data_ptr());
    places.push_back({begin, begin + messages[r].nbytes(), name, r});
  }
  return places;
}

// What is received must not lie where something else is received or sent. `rank` may receive its
// own message in place.
void check_disjoint(std::span<const at::Tensor> from, std::span<const at::Tensor> to, size_t rank,
                    const std::string& where) {
  std::vector<MessagePlace> written = places_of("from", from), read = places_of("to", to);
  const bool in_place =
      message_numel(to[rank]) > 0 && from[rank].const_data_ptr() == to[rank].const_data_ptr();
  if (in_place)
    std::erase_if(written, [&](const MessagePlace& place) { return place.rank == rank; });
  const auto by_begin = [](const MessagePlace& a, const MessagePlace& b) {
    return a.begin < b.begin;
  };
  std::sort(written.begin(), written.end(), by_begin);
  const auto check = [&](const MessagePlace& a, const MessagePlace& b) {
    TORCH_CHECK_VALUE(a.end <= b.begin || b.end <= a.begin,
                      "[all_to_all] no `from` may overlap a `to` or another `from`, except that this "
                      "rank's own may be its `to` itself; got `", a.name, "[", a.rank, "]` over `",
                      b.name, "[", b.rank, "]`", where);
  };
  for (size_t i = 1; i < written.size(); ++i) check(written[i - 1], written[i]);
  // Those that are written are disjoint: the first that ends behind `begin` tells.
  for (const MessagePlace& place : read) {
    const auto next =
        std::partition_point(written.begin(), written.end(),
                             [&](const MessagePlace& other) { return other.end <= place.begin; });
    if (next != written.end()) check(*next, place);
  }
}

}  // namespace

void check_all_gather(const ProcessGroup& process_group, const at::Tensor& flat,
                      const at::Tensor& shard, std::span<const int64_t> bounds,
                      const CollectiveTag& tag) {
  const std::string place = where(process_group, tag);
  check_bounds("all_gather", bounds, process_group.size(), place);
  check_shard("all_gather", "shard", shard, bounds, process_group.rank(), place);
  check_tensor("all_gather", "flat", flat, place);
  TORCH_CHECK_VALUE(flat.numel() == bounds.back(),
                    "[all_gather] `flat` must have `bounds.back()` elements; expected ",
                    bounds.back(), ", got ", flat.numel(), place);
  TORCH_CHECK_VALUE(flat.scalar_type() == shard.scalar_type(),
                    "[all_gather] `flat` and `shard` must have one dtype; got ", flat.scalar_type(),
                    " and ", shard.scalar_type(), place);
  count_collective("all_gather", static_cast<int64_t>(flat.nbytes()), tag.subject);
}

void check_reduce_scatter(const ProcessGroup& process_group, const at::Tensor& out,
                          std::span<const Piece> pieces, std::span<const int64_t> bounds,
                          const ReduceScatterOptions& options, const CollectiveTag& tag) {
  const std::string place = where(process_group, tag);
  check_bounds("reduce_scatter", bounds, process_group.size(), place);
  check_shard("reduce_scatter", "out", out, bounds, process_group.rank(), place);
  int64_t begin = 0;
  for (const Piece& piece : pieces) {
    check_piece(piece, begin, bounds.back(), options.dtype.value_or(out.scalar_type()), place);
    begin = piece.begin + piece.numel;
  }
  count_collective("reduce_scatter", bounds.back() * message_item_size(out, options), tag.subject);
}

void check_all_reduce(const ProcessGroup& process_group, const at::Tensor& tensor,
                      const CollectiveTag& tag) {
  check_tensor("all_reduce", "tensor", tensor, where(process_group, tag));
  count_collective("all_reduce", static_cast<int64_t>(tensor.nbytes()), tag.subject);
}

void check_broadcast(const ProcessGroup& process_group, const at::Tensor& tensor, int root,
                     const CollectiveTag& tag) {
  const std::string place = where(process_group, tag);
  check_tensor("broadcast", "tensor", tensor, place);
  TORCH_CHECK_VALUE(root >= 0 && root < process_group.size(),
                    "[broadcast] `root` must be a rank; expected 0 to ", process_group.size() - 1,
                    ", got ", root, place);
  count_collective("broadcast", static_cast<int64_t>(tensor.nbytes()), tag.subject);
}

void check_all_to_all(const ProcessGroup& process_group, std::span<const at::Tensor> from,
                      std::span<const at::Tensor> to, const CollectiveTag& tag) {
  const std::string place = where(process_group, tag);
  const auto size = static_cast<size_t>(process_group.size());
  TORCH_CHECK_VALUE(from.size() == size && to.size() == size,
                    "[all_to_all] `from` and `to` must have an entry for each rank; expected ", size,
                    ", got ", from.size(), " and ", to.size(), place);
  std::optional<at::ScalarType> dtype;
  for (size_t r = 0; r < size; ++r) {
    for (const bool is_sent : {true, false}) {
      const at::Tensor& message = is_sent ? to[r] : from[r];
      if (message_numel(message) == 0) continue;
      if (!dtype) dtype = message.scalar_type();
      check_message(is_sent ? "to" : "from", r, message, *dtype, place);
    }
  }
  const auto rank = static_cast<size_t>(process_group.rank());
  TORCH_CHECK_VALUE(message_numel(from[rank]) == message_numel(to[rank]),
                    "[all_to_all] what a rank sends to itself must fit; expected ",
                    message_numel(from[rank]), " elements in `to[", rank, "]`, got ",
                    message_numel(to[rank]), place);
  check_disjoint(from, to, rank, place);
  int64_t bytes = 0;
  for (const at::Tensor& message : to) bytes += message_bytes(message);
  count_collective("all_to_all", bytes, tag.subject);
}

void check_on_cpu(const char* function, const at::Tensor& tensor, const CollectiveTag& tag) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "[", function,
                    "] the tensors of this process group must lie in host memory; got device ", tensor.device(),
                    " (unit '", tag.subject, "')");
}

void check_host_all_gather(const ProcessGroup& process_group, const at::Tensor& flat,
                           const at::Tensor& shard, std::span<const int64_t> bounds,
                           const CollectiveTag& tag) {
  check_all_gather(process_group, flat, shard, bounds, tag);
  check_on_cpu("all_gather", flat, tag);
  check_on_cpu("all_gather", shard, tag);
}

at::ScalarType check_host_reduce_scatter(const ProcessGroup& process_group, const at::Tensor& out,
                                         std::span<const Piece> pieces,
                                         std::span<const int64_t> bounds,
                                         const ReduceScatterOptions& options,
                                         const CollectiveTag& tag) {
  check_reduce_scatter(process_group, out, pieces, bounds, options, tag);
  check_on_cpu("reduce_scatter", out, tag);
  const at::ScalarType dtype = options.dtype.value_or(out.scalar_type());
  check_reducible("reduce_scatter", dtype, ReduceOp::kSum, out.scalar_type());
  for (const Piece& piece : pieces) {
    if (piece.data.defined()) check_on_cpu("reduce_scatter", piece.data, tag);
  }
  return dtype;
}

void check_host_all_reduce(const ProcessGroup& process_group, const at::Tensor& tensor, ReduceOp op,
                           const CollectiveTag& tag) {
  check_all_reduce(process_group, tensor, tag);
  check_on_cpu("all_reduce", tensor, tag);
  check_reducible("all_reduce", tensor.scalar_type(), op);
}

void check_host_broadcast(const ProcessGroup& process_group, const at::Tensor& tensor, int root,
                          const CollectiveTag& tag) {
  check_broadcast(process_group, tensor, root, tag);
  check_on_cpu("broadcast", tensor, tag);
}

void check_host_all_to_all(const ProcessGroup& process_group, std::span<const at::Tensor> from,
                           std::span<const at::Tensor> to, const CollectiveTag& tag) {
  check_all_to_all(process_group, from, to, tag);
  for (const auto& messages : {from, to}) {
    for (const at::Tensor& message : messages) {
      if (message_numel(message) > 0) check_on_cpu("all_to_all", message, tag);
    }
  }
}

void check_in_place(const ProcessGroup& process_group, const at::Tensor& flat,
                    const at::Tensor& shard, std::span<const int64_t> bounds,
                    const CollectiveTag& tag) {
  const auto* const own = static_cast<const std::byte*>(flat.const_data_ptr()) +
                          bounds[process_group.rank()] * static_cast<int64_t>(flat.element_size());
  TORCH_CHECK_VALUE(shard.numel() == 0 || own == shard.const_data_ptr(), "[all_gather] unit '",
                    tag.subject, "': `shard` must lie at its place in `flat`, which is shared memory");
}

std::vector<int64_t> even_bounds(int64_t numel, int size) {
  std::vector<int64_t> bounds(size + 1);
  for (int r = 0; r <= size; ++r) {
    bounds[r] = numel * r / size;
  }
  return bounds;
}

}  // namespace tessera
