#include "arena/arena_process_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "arena/handshake.h"
#include "group/collective.h"
#include "group/peer_message.h"

namespace tessera {
namespace {

// Larger tensors are all-reduced in two rounds: each rank reduces a part, then all copy the parts.
constexpr size_t kMaxOneTurnBytes = size_t{64} << 10;
// Larger tensors are broadcast without a copy, and the root waits until they are read.
constexpr size_t kMaxCopiedBytes = size_t{64} << 10;

class ArenaWork final : public Work {
 public:
  ArenaWork(std::shared_ptr<Arena> arena, std::shared_ptr<ArenaTask> task)
      : arena_(std::move(arena)), task_(std::move(task)) {}

  void wait() override { arena_->wait(*task_, /*inputs=*/false); }
  void wait_inputs() override { arena_->wait(*task_, /*inputs=*/true); }
  bool is_completed() override { return arena_->is_done(*task_); }

 private:
  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<ArenaTask> task_;
};

}  // namespace

ArenaProcessGroup::ArenaProcessGroup(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {
  // No rank may release the process group that connected them while another still uses it.
  barrier({.subject = "shared memory", .channel = Channel::kControl});
}

ArenaProcessGroup::~ArenaProcessGroup() { close(); }

void ArenaProcessGroup::close() noexcept { arena_->close(closing_grace(timeout())); }

std::shared_ptr<SharedMemory> ArenaProcessGroup::share_memory(int64_t nbytes, bool reserve,
                                                              const CollectiveTag& tag) {
  std::shared_ptr<SharedMemory> memory;
  Handshake handshake(*this);
  handshake.show([&]() -> std::string {
    if (rank() != 0) return "";
    memory = SharedMemory::create("tessera parameters", nbytes);
    if (reserve) memory->reserve();
    memory->read_only();
    return memory->handle().to_text();
  });
  handshake.take([&](int other, const std::vector<std::string>& lines) {
    if (other != 0 || rank() == 0) return;
    memory = SharedMemory::open(SharedMemoryHandle::from_text(lines.at(0)),
                                SharedMemory::Access::kWrite);
    memory->read_only();
  });
  if (!handshake.failure().empty()) {
    if (rank() == 0)
      TORCH_WARN("[tessera] unit '", tag.subject,
                 "' is not kept in shared memory: ", handshake.failure());
    return nullptr;
  }
  memory->close_descriptor();
  return memory;
}

std::optional<SharedBuffer> ArenaProcessGroup::share(int64_t nbytes, const CollectiveTag& tag) {
  const auto memory = share_memory(nbytes, /*reserve=*/true, tag);
  if (!memory) return std::nullopt;
  const auto buffer = std::make_shared<NumberedBuffer>(NumberedBuffer{memory, next_buffer_++});
  return buffers_.add(buffer, *memory, nbytes);
}

WorkPtr ArenaProcessGroup::issue(Collective collective) {
  return std::visit([&](auto& call) { return start(call, collective.tag); }, collective.call);
}

WorkPtr ArenaProcessGroup::start(const std::shared_ptr<ArenaTask>& task) {
  arena_->start(task);
  return std::make_shared<ArenaWork>(arena_, task);
}

WorkPtr ArenaProcessGroup::arrive_at(ArenaTicket ticket) {
  arena_->show(ticket, {}, {});
  return start(std::make_shared<ArrivalTask>(std::move(ticket)));
}

WorkPtr ArenaProcessGroup::start(Barrier& call, const CollectiveTag& tag) {
  return arrive_at(arena_->take_ticket(call.kName, tag, form_of(call, tag)));
}

bool ArenaProcessGroup::show(const ArenaTicket& ticket, const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !arena_->reaches(tensor.const_data_ptr())) {
    show_copy(ticket, tensor);
    return false;
  }
  arena_->show(ticket, {{0, tensor.numel(), reinterpret_cast<uint64_t>(tensor.const_data_ptr())}},
               {tensor});
  return true;
}

void ArenaProcessGroup::show_copy(const ArenaTicket& ticket, const at::Tensor& tensor) {
  std::byte* const copy = arena_->allocate(tensor.nbytes());
  if (tensor.numel() > 0) std::memcpy(copy, tensor.const_data_ptr(), tensor.nbytes());
  arena_->show(ticket, {{0, tensor.numel(), reinterpret_cast<uint64_t>(copy)}}, {}, copy);
}

WorkPtr ArenaProcessGroup::start(AllGather& call, const CollectiveTag& tag) {
  const auto& [flat, shard, bounds] = call;
  CollectiveForm form = form_of(call, tag);
  if (const auto buffer = buffers_.holding(flat)) {
    check_in_place(*this, call, tag);
    return arrive_at(arena_->take_ticket(call.kName, tag, form.mix(buffer->number)));
  }
  return gather_at(arena_->take_ticket(call.kName, tag, form),
                   {{bounds[rank()], shard, shard.numel()}}, flat);
}

WorkPtr ArenaProcessGroup::gather_at(ArenaTicket ticket, std::vector<Piece> pieces,
                                     const at::Tensor& flat) {
  show_pieces(ticket, std::move(pieces));
  return start(std::make_shared<GatherTask>(std::move(ticket), flat));
}

// Describes `piece` for the other ranks. Copies it to `copy` if they can't reach it, and advances
// `copy` past the copy.
ShownPiece ArenaProcessGroup::reachable_piece(const Piece& piece, std::byte*& copy) const {
  ShownPiece shown{piece.begin, piece.numel, 0};
  if (!piece.data.defined() || piece.numel == 0) return shown;
  const void* data = piece.data.const_data_ptr();
  if (!arena_->reaches(data)) {
    data = std::memcpy(copy, data, piece.data.nbytes());
    copy += (piece.data.nbytes() + 63) / 64 * 64;
  }
  shown.address = reinterpret_cast<uint64_t>(data);
  return shown;
}

// Publishes the tensors that the other ranks can reach in place, and copies of the rest.
void ArenaProcessGroup::show_pieces(const ArenaTicket& ticket, std::vector<Piece> pieces) {
  size_t copied = 0;
  for (const Piece& piece : pieces) {
    if (piece.data.defined() && !arena_->reaches(piece.data.const_data_ptr()))
      copied += piece.data.nbytes() + 63;
  }
  std::byte* const block = copied > 0 ? arena_->allocate(copied) : nullptr;
  std::byte* copy = block;
  std::vector<ShownPiece> shown;
  std::vector<at::Tensor> kept;
  for (Piece& piece : pieces) {
    shown.push_back(reachable_piece(piece, copy));
    if (piece.data.defined() && arena_->reaches(piece.data.const_data_ptr()))
      kept.push_back(std::move(piece.data));
  }
  arena_->show(ticket, shown, std::move(kept), block);
}

WorkPtr ArenaProcessGroup::start(ReduceScatter& call, const CollectiveTag& tag) {
  const auto& [out, pieces, bounds, options] = call;
  const ArenaReduction reduction{
      bounds[rank()],
      bounds[rank() + 1],
      static_cast<std::byte*>(out.mutable_data_ptr()),
      {call.dtype(), ReduceOp::kSum, options.scale, options.accumulate, out.scalar_type()}};
  const CollectiveForm form = form_of(call, tag);
  return reduce(out, std::move(call.pieces), {reduction}, form, tag);
}

WorkPtr ArenaProcessGroup::reduce(const at::Tensor& out, std::vector<Piece> pieces,
                                  std::vector<ArenaReduction> reductions,
                                  const CollectiveForm& form, const CollectiveTag& tag) {
  ArenaTicket ticket = arena_->take_ticket("reduce_scatter", tag, form);
  show_pieces(ticket, std::move(pieces));
  return start(std::make_shared<ReduceScatterTask>(std::move(ticket), out, std::move(reductions)));
}

WorkPtr ArenaProcessGroup::start(AllReduce& call, const CollectiveTag& tag) {
  const auto& [tensor, op] = call;
  std::vector<int64_t> parts;
  if (tensor.nbytes() > kMaxOneTurnBytes) parts = even_bounds(tensor.numel(), size());
  ArenaTicket ticket =
      arena_->take_ticket(call.kName, tag, form_of(call, tag), parts.empty() ? 1 : 2);
  show_copy(ticket, tensor);  // the tensor itself is overwritten
  return start(std::make_shared<AllReduceTask>(std::move(ticket), tensor, op, std::move(parts)));
}

WorkPtr ArenaProcessGroup::start(Broadcast& call, const CollectiveTag& tag) {
  return broadcast_at(arena_->take_ticket(call.kName, tag, form_of(call, tag)), call.tensor,
                      call.root);
}

WorkPtr ArenaProcessGroup::broadcast_at(ArenaTicket ticket, const at::Tensor& tensor, int root) {
  bool is_read_in_place = false;
  if (rank() != root || tensor.numel() == 0) {
    arena_->show(ticket, {}, {});
  } else if (tensor.nbytes() <= kMaxCopiedBytes) {
    show_copy(ticket, tensor);
  } else {
    is_read_in_place = show(ticket, tensor);
  }
  return start(std::make_shared<BroadcastTask>(std::move(ticket), tensor, root, is_read_in_place));
}

// Publishes the messages to each rank, then the forms of the messages expected from each, so that
// every rank can check whether all agree.
WorkPtr ArenaProcessGroup::start(AllToAll& call, const CollectiveTag& tag) {
  auto& [from, to] = call;
  ArenaTicket ticket = arena_->take_ticket(call.kName, tag, form_of(call, tag));
  take_own_message(from[rank()], to[rank()]);
  std::vector<Piece> pieces;
  const auto add = [&](const at::Tensor& message, bool is_shown) {
    const MessageForm form = message_form_of(message);
    pieces.push_back({form.dtype, is_shown ? message : at::Tensor(), form.numel});
  };
  for (int r = 0; r < size(); ++r) add(to[r], r != rank());
  for (const at::Tensor& message : from) add(message, false);
  show_pieces(ticket, std::move(pieces));
  return start(std::make_shared<AllToAllTask>(std::move(ticket), std::move(from)));
}

ProcessGroupPtr arena_process_group(ProcessGroupPtr inner) {
  TORCH_CHECK_VALUE(inner != nullptr, "[arena_process_group] `inner` must be given");
  if (inner->size() == 1) return inner;
  std::string why_not;
  auto arena = Arena::connect(*inner, why_not);
  TORCH_CHECK_NOT_IMPLEMENTED(arena, "[arena_process_group] the ranks can't share memory: ", why_not);
  return std::make_shared<ArenaProcessGroup>(std::move(arena));
}

}  // namespace tessera
