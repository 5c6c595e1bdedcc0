#include "comm/group/collective.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>

#include "comm/group/encoding.h"
#include "comm/group/local_sum.h"
#include "comm/group/peer_message.h"

namespace tessera {
namespace {

// The memory range of a message of an all-to-all.
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

// Returns true if `shard` is empty or lies at this rank's place in `flat`.
bool is_own_range(const ProcessGroup& process_group, const at::Tensor& flat,
                  const at::Tensor& shard, std::span<const int64_t> bounds) {
  const auto* const own = static_cast<const std::byte*>(flat.const_data_ptr()) +
                          bounds[process_group.rank()] * static_cast<int64_t>(flat.element_size());
  return shard.numel() == 0 || (own == shard.const_data_ptr() && shard.is_neg() == flat.is_neg() &&
                                shard.is_conj() == flat.is_conj());
}

// Checks the arguments of a call.
class ArgumentCheck {
 public:
  ArgumentCheck(const ProcessGroup& process_group, const Collective& collective)
      : process_group_(process_group), tag_(collective.tag), function_(collective.name()) {}

  template <class Call>
  void operator()(const Call& call) const {
    if constexpr (requires { call.tensor; }) check_tensor("tensor", call.tensor);
    if constexpr (requires { call.bounds; }) check_bounds(call.bounds);
    if constexpr (requires { call.shard; }) check_shard("shard", call.shard, call.bounds);
    if constexpr (requires { call.flat; })
      check_flat("flat", call.flat, "shard", call.shard, call.bounds);
    if constexpr (requires { call.out; }) check_shard("out", call.out, call.bounds);
    if constexpr (requires { call.pieces; }) check_pieces(call);
    if constexpr (requires { call.options; }) check_gather_into(call);
    if constexpr (requires { call.root; }) check_root(call.root);
    if constexpr (requires { call.from; }) check_messages(call.from, call.to);
    check_encoding(call);
    if (process_group_.device_type()) check_device(call, *process_group_.device_type());
  }

 private:
  // The end of every error message.
  std::string where() const {
    return fmt::format(" (unit '{}', rank {} of {})", tag_.subject, process_group_.rank(),
                       process_group_.size());
  }

  void check_tensor(const char* name, const at::Tensor& tensor) const {
    TORCH_CHECK_VALUE(tensor.defined(), "[", function_, "] `", name, "` must be defined", where());
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "[", function_, "] `", name,
                      "` must be dense; got layout ", tensor.layout(), where());
    // A view with gaps would silently transfer the elements in the gaps.
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "[", function_, "] `", name,
                      "` must be contiguous; got sizes ", tensor.sizes(), " with strides ",
                      tensor.strides(), where());
  }

  void check_bounds(std::span<const int64_t> bounds) const {
    const int size = process_group_.size();
    TORCH_CHECK_VALUE(bounds.size() == static_cast<size_t>(size) + 1, "[", function_,
                      "] `bounds` must have an element more than there are ranks; expected ",
                      size + 1, ", got ", bounds.size(), where());
    TORCH_CHECK_VALUE(bounds[0] == 0, "[", function_, "] `bounds` must begin with 0; got ",
                      bounds[0], where());
    for (int r = 0; r < size; ++r) {
      TORCH_CHECK_VALUE(bounds[r] <= bounds[r + 1], "[", function_, "] `bounds` must ascend; got ",
                        bounds[r], " before ", bounds[r + 1], where());
    }
  }

  void check_shard(const char* name, const at::Tensor& shard,
                   std::span<const int64_t> bounds) const {
    check_tensor(name, shard);
    const int64_t numel = bounds[process_group_.rank() + 1] - bounds[process_group_.rank()];
    TORCH_CHECK_VALUE(shard.numel() == numel, "[", function_, "] `", name,
                      "` must have the elements that `bounds` gives this rank; expected ", numel,
                      ", got ", shard.numel(), where());
  }

  void check_flat(const char* name, const at::Tensor& flat, const char* shard_name,
                  const at::Tensor& shard, std::span<const int64_t> bounds) const {
    check_tensor(name, flat);
    TORCH_CHECK_VALUE(flat.numel() == bounds.back(), "[", function_, "] `", name,
                      "` must have `bounds.back()` elements; expected ", bounds.back(), ", got ",
                      flat.numel(), where());
    TORCH_CHECK_VALUE(flat.scalar_type() == shard.scalar_type(), "[", function_, "] `", name,
                      "` and `", shard_name, "` must have one dtype; got ", flat.scalar_type(),
                      " and ", shard.scalar_type(), where());
  }

  void check_pieces(const ReduceScatter& call) const {
    const int64_t end = call.bounds.back();
    int64_t begin = 0;
    for (const Piece& piece : call.pieces) {
      TORCH_CHECK_VALUE(
          piece.numel >= 0 && piece.begin >= begin && piece.begin + piece.numel <= end, "[",
          function_, "] `pieces` must ascend, be disjoint and lie inside `bounds`; got [",
          piece.begin, ", ", piece.begin + piece.numel, ") where [", begin, ", ", end, ") is left",
          where());
      begin = piece.begin + piece.numel;
      if (!piece.data.defined()) continue;
      check_tensor("data", piece.data);
      TORCH_CHECK_VALUE(piece.data.numel() == piece.numel, "[", function_,
                        "] a piece's tensor must have `numel` elements; expected ", piece.numel,
                        ", got ", piece.data.numel(), where());
      TORCH_CHECK_VALUE(piece.data.scalar_type() == call.dtype(), "[", function_,
                        "] pieces must have the dtype of `out`, or that of the options; expected ",
                        call.dtype(), ", got ", piece.data.scalar_type(), where());
    }
    // With a single dtype, a backend itself rejects dtypes that it can't sum.
    if (call.dtype() != call.out.scalar_type() || process_group_.device_type() == at::kCPU)
      check_reducible(function_, call.dtype(), ReduceOp::kSum, call.out.scalar_type());
  }

  void check_gather_into(const ReduceScatter& call) const {
    const at::Tensor& all = call.options.gather_into;
    if (!all.defined()) return;
    check_flat("gather_into", all, "out", call.out, call.bounds);
    TORCH_CHECK_VALUE(is_own_range(process_group_, all, call.out, call.bounds), "[", function_,
                      "] `out` must lie at its place in `gather_into`", where());
    TORCH_CHECK_VALUE(call.options.encoding == Encoding::kPlain, "[", function_,
                      "] `gather_into` can't be used with an encoding", where());
  }

  template <class Call>
  void check_encoding(const Call& call) const {
    if constexpr (requires { call.bounds; })
      check_encodable(function_, encoding_of(call), call.dtype());
    if constexpr (requires {
                    call.encoding;
                    call.tensor;
                  })
      check_encodable(function_, call.encoding, call.tensor.scalar_type());
    if constexpr (requires { call.options; }) {
      TORCH_CHECK_VALUE(!call.options.error || call.options.encoding != Encoding::kPlain, "[",
                        function_, "] `error` needs an encoding that loses something", where());
    }
  }

  void check_root(int root) const {
    TORCH_CHECK_VALUE(root >= 0 && root < process_group_.size(), "[", function_,
                      "] `root` must be a rank; expected 0 to ", process_group_.size() - 1,
                      ", got ", root, where());
  }

  void check_messages(std::span<const at::Tensor> from, std::span<const at::Tensor> to) const {
    const auto size = static_cast<size_t>(process_group_.size());
    TORCH_CHECK_VALUE(from.size() == size && to.size() == size, "[", function_,
                      "] `from` and `to` must have an entry for each rank; expected ", size,
                      ", got ", from.size(), " and ", to.size(), where());
    std::optional<at::ScalarType> dtype;
    for (size_t r = 0; r < size; ++r) {
      for (const bool is_sent : {true, false}) {
        const at::Tensor& message = is_sent ? to[r] : from[r];
        if (message_numel(message) == 0) continue;
        if (!dtype) dtype = message.scalar_type();
        check_message(is_sent ? "to" : "from", r, message, *dtype);
      }
    }
    const auto rank = static_cast<size_t>(process_group_.rank());
    TORCH_CHECK_VALUE(message_numel(from[rank]) == message_numel(to[rank]), "[", function_,
                      "] a rank's message to itself must fit; expected ", message_numel(from[rank]),
                      " elements in `to[", rank, "]`, got ", message_numel(to[rank]), where());
    check_disjoint(from, to, rank);
  }

  void check_message(const char* name, size_t rank, const at::Tensor& message,
                     at::ScalarType dtype) const {
    TORCH_CHECK_VALUE(message.layout() == at::kStrided, "[", function_, "] `", name, "[", rank,
                      "]` must be dense; got layout ", message.layout(), where());
    TORCH_CHECK_VALUE(message.dim() == 1 && message.is_contiguous(), "[", function_, "] `", name,
                      "[", rank, "]` must be 1-D and contiguous; got sizes ", message.sizes(),
                      " with strides ", message.strides(), where());
    TORCH_CHECK_VALUE(message.scalar_type() == dtype, "[", function_,
                      "] all messages must have one dtype; got ", dtype, " and, as `", name, "[",
                      rank, "]`, ", message.scalar_type(), where());
  }

  // Checks that no message is received into the memory of another message. `rank`, the calling
  // rank, may receive its own message in place.
  void check_disjoint(std::span<const at::Tensor> from, std::span<const at::Tensor> to,
                      size_t rank) const {
    std::vector<MessageMemory> written = memory_of("from", from);
    const bool in_place =
        message_numel(to[rank]) > 0 && from[rank].const_data_ptr() == to[rank].const_data_ptr();
    if (in_place)
      std::erase_if(written, [&](const MessageMemory& place) { return place.rank == rank; });
    std::ranges::sort(written, {}, &MessageMemory::begin);
    const auto check = [&](const MessageMemory& a, const MessageMemory& b) {
      TORCH_CHECK_VALUE(a.end <= b.begin || b.end <= a.begin, "[", function_,
                        "] no `from` may overlap a `to` or another `from`, except that this rank's "
                        "own may be its `to` itself; got `",
                        a.name, "[", a.rank, "]` over `", b.name, "[", b.rank, "]`", where());
    };
    for (size_t i = 1; i < written.size(); ++i) check(written[i - 1], written[i]);
    // Written ranges are disjoint and sorted, so only the first that ends after `begin` can
    // overlap.
    for (const MessageMemory& place : memory_of("to", to)) {
      const auto next = std::ranges::partition_point(
          written, [&](const MessageMemory& other) { return other.end <= place.begin; });
      if (next != written.end()) check(*next, place);
    }
  }

  // Additional checks for process groups whose tensors must be in one kind of memory.
  template <class Call>
  void check_device(const Call& call, c10::DeviceType type) const {
    for_each_tensor(call, [&, this](const at::Tensor& tensor, bool /*is_written*/) {
      // An empty message is not sent.
      const bool is_used =
          tensor.defined() && (tensor.numel() > 0 || !std::is_same_v<Call, AllToAll>);
      TORCH_CHECK_VALUE(!is_used || tensor.device().type() == type, "[", function_,
                        "] the tensors of this process group must lie ",
                        type == at::kCPU ? "in host memory"
                                         : "on devices of type " + c10::DeviceTypeName(type, true),
                        "; got device ", tensor.device(), where());
    });
    if constexpr (requires { call.op; }) {
      if (type == at::kCPU) check_reducible(function_, call.tensor.scalar_type(), call.op);
    }
  }

  const ProcessGroup& process_group_;
  const CollectiveTag& tag_;
  const char* const function_;
};

}  // namespace

const char* Collective::name() const {
  return std::visit([](const auto& call) { return call.kName; }, call);
}

int64_t Collective::nbytes() const {
  return std::visit(
      [](const auto& call) {
        int64_t bytes = 0;
        if constexpr (requires { call.tensor; }) bytes = static_cast<int64_t>(call.tensor.nbytes());
        if constexpr (requires { call.bounds; })
          bytes = call.bounds.back() * static_cast<int64_t>(c10::elementSize(call.dtype()));
        if constexpr (requires { call.options; }) {
          if (call.options.gather_into.defined())
            bytes += static_cast<int64_t>(call.options.gather_into.nbytes());
        }
        if constexpr (requires { call.to; })
          for (const at::Tensor& message : call.to) bytes += message_bytes(message);
        return bytes;
      },
      call);
}

void check_arguments(const ProcessGroup& process_group, const Collective& collective) {
  std::visit(ArgumentCheck(process_group, collective), collective.call);
}

void check_in_place(const ProcessGroup& process_group, const AllGather& call,
                    const CollectiveTag& tag) {
  TORCH_CHECK_VALUE(is_own_range(process_group, call.flat, call.shard, call.bounds),
                    "[all_gather] unit '", tag.subject,
                    "': `shard` must lie at its place in `flat`, which is shared memory");
}

std::vector<int64_t> even_bounds(int64_t numel, int size) {
  std::vector<int64_t> bounds(size + 1);
  for (int r = 0; r <= size; ++r) bounds[r] = numel * r / size;
  return bounds;
}

}  // namespace tessera
