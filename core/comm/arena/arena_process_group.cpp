#include "comm/arena/arena_process_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <utility>

#include "comm/arena/handshake.h"
#include "comm/group/collective.h"
#include "comm/group/peer_message.h"

namespace tessera {
namespace {

// Larger tensors are all-reduced in two rounds: each rank reduces a part, then all copy the parts.
constexpr size_t kMaxOneTurnBytes = size_t{64} << 10;
// Larger tensors are broadcast without a copy, and the root waits until they are read.
constexpr size_t kMaxCopiedBytes = size_t{64} << 10;

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

int64_t item_size(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// The input of a rank that has no data for a piece. As in other process groups the zeros are added,
// not skipped: -0 + 0 is 0.
constexpr int64_t kZeroBytes = int64_t{64} << 10;
const std::byte* zeros() {
  alignas(64) static const std::array<std::byte, kZeroBytes> memory{};
  return memory.data();
}

// Computes `part` from the posts of all ranks. Its output lies in memory mapped by this rank.
void reduce_part(const Arena& arena, const ArenaTicket& ticket, const ArenaReduction& part) {
  std::vector<const Post*> posts;
  for (int rank = 0; rank < arena.size(); ++rank) posts.push_back(arena.shown(rank, ticket));
  const int64_t item = item_size(part.reduction.dtype);
  const int64_t out_item = item_size(part.reduction.dtype_of_out());
  std::vector<const void*> inputs(posts.size());
  for (int64_t p = 0; p < posts[0]->pieces; ++p) {
    const ShownPiece& piece = posts[0]->first_piece()[p];
    const int64_t stop = std::min(part.end, piece.begin + piece.numel);
    for (int64_t at = std::max(part.begin, piece.begin); at < stop;) {
      int64_t numel = stop - at;
      for (int rank = 0; rank < arena.size(); ++rank) {
        const ShownPiece& theirs = posts[rank]->first_piece()[p];
        inputs[rank] = theirs.address != 0
                           ? arena.data(rank, theirs.address) + (at - theirs.begin) * item
                           : zeros();
        if (theirs.address == 0) numel = std::min(numel, kZeroBytes / item);
      }
      reduce_in_order(part.reduction, part.out + (at - part.begin) * out_item, inputs, numel);
      at += numel;
    }
  }
}

// Copies the pieces that `rank` published to their positions in `flat`.
void copy_pieces(const Arena& arena, int rank, const Post& post, const at::Tensor& flat) {
  const int64_t item = item_size(flat.scalar_type());
  for (int64_t i = 0; i < post.pieces; ++i) {
    const ShownPiece& piece = post.first_piece()[i];
    if (piece.numel == 0) continue;
    const std::byte* const from = arena.data(rank, piece.address);
    std::byte* const to = bytes_of(flat) + piece.begin * item;
    if (from != to) std::memcpy(to, from, piece.numel * item);
  }
}

// Calls `read` once all ranks have published their posts.
Arena::Advance when_all_show(std::function<void(const Arena&, const ArenaTicket&)> read) {
  return [read = std::move(read)](Arena& arena, ArenaTicket& awaited) {
    if (!arena.all_show(awaited)) return false;
    read(arena, awaited);
    arena.done_reading(awaited);
    return true;
  };
}

// Reduces `tensor` in two rounds: each rank reduces its part of the `bounds` into memory that it
// publishes for the next ticket, and copies the other ranks' parts from theirs.
Arena::Advance reduce_in_two_rounds(const at::Tensor& tensor, const LocalReduction& reduction,
                                    const std::vector<int64_t>& bounds) {
  return [=, has_reduced = false](Arena& arena, ArenaTicket& awaited) mutable {
    if (!arena.all_show(awaited)) return false;
    if (!has_reduced) {
      const int64_t begin = bounds[arena.rank()], end = bounds[arena.rank() + 1];
      std::byte* const part = arena.allocate((end - begin) * item_size(reduction.dtype));
      reduce_part(arena, awaited, {begin, end, part, reduction});
      arena.done_reading(awaited);
      has_reduced = true;
      ++awaited.number;
      arena.show(awaited, {{begin, end - begin, reinterpret_cast<uint64_t>(part)}}, {}, part);
      if (!arena.all_show(awaited)) return false;
    }
    for (int rank = 0; rank < arena.size(); ++rank)
      copy_pieces(arena, rank, *arena.shown(rank, awaited), tensor);
    arena.done_reading(awaited);
    return true;
  };
}

// A rank's post for an all-to-all has a piece for each rank, then one without an address for each
// message that it expects.
std::string disagreement_in(const Arena& arena, const ArenaTicket& ticket) {
  std::vector<const ShownPiece*> posts;
  for (int rank = 0; rank < arena.size(); ++rank)
    posts.push_back(arena.shown(rank, ticket)->first_piece());
  const auto form = [](const ShownPiece& piece) { return MessageForm{piece.numel, piece.begin}; };
  return disagreement(
      arena.size(), [&](int sender, int receiver) { return form(posts[sender][receiver]); },
      [&](int sender, int receiver) { return form(posts[receiver][arena.size() + sender]); });
}

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
  const auto make = [&]() -> std::string {
    if (rank() != 0) return "";
    memory = SharedMemory::create("tessera parameters", nbytes);
    if (reserve) memory->reserve();
    memory->read_only();
    return memory->handle().to_text();
  };
  const std::string failure =
      shake_hands(*this, /*key=*/"", make, [&](int other, const std::vector<std::string>& lines) {
        if (other != 0 || rank() == 0) return;
        memory = SharedMemory::open(SharedMemoryHandle::from_text(lines.at(0)));
        memory->read_only();
      });
  if (!failure.empty()) {
    if (rank() == 0)
      TORCH_WARN("[tessera] unit '", tag.subject, "' is not kept in shared memory: ", failure);
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

WorkPtr ArenaProcessGroup::arrive_at(ArenaTicket ticket) {
  arena_->show(ticket, {}, {});
  return arena_->start(std::move(ticket), when_all_show([](const Arena&, const ArenaTicket&) {}));
}

WorkPtr ArenaProcessGroup::start(Barrier& call, const CollectiveTag& tag) {
  return arrive_at(arena_->take_ticket(call.kName, tag, form_of(call, tag)));
}

WorkPtr ArenaProcessGroup::start(AllGather& call, const CollectiveTag& tag) {
  const auto& [flat, shard, bounds, encoding] = call;  // nothing is sent, nor encoded
  CollectiveForm form = form_of(call, tag);
  if (const auto buffer = buffers_.holding(flat)) {
    check_in_place(*this, call, tag);
    return arrive_at(arena_->take_ticket(call.kName, tag, form.mix(buffer->number)));
  }
  return gather_at(arena_->take_ticket(call.kName, tag, form),
                   {{bounds[rank()], shard, shard.numel()}}, flat);
}

WorkPtr ArenaProcessGroup::gather_at(ArenaTicket ticket, const std::vector<Piece>& pieces,
                                     const at::Tensor& flat) {
  show_pieces(ticket, pieces);
  const auto advance = [flat, copied = std::vector<bool>(size())](Arena& arena,
                                                                  ArenaTicket& awaited) mutable {
    bool all = true;
    for (int rank = 0; rank < arena.size(); ++rank) {
      if (copied[rank]) continue;
      const Post* const post = arena.shown(rank, awaited);
      all = all && post;
      if (!post) continue;
      copied[rank] = true;
      copy_pieces(arena, rank, *post, flat);
    }
    if (all) arena.done_reading(awaited);
    return all;
  };
  return arena_->start(std::move(ticket), advance);
}

void ArenaProcessGroup::show_pieces(const ArenaTicket& ticket, const std::vector<Piece>& pieces,
                                    bool copies_all) {
  const auto is_copied = [&](const Piece& piece) {
    return piece.data.defined() && piece.numel > 0 &&
           (copies_all || !arena_->reaches(piece.data.const_data_ptr()));
  };
  size_t copied = 0;
  for (const Piece& piece : pieces) {
    if (is_copied(piece)) copied += piece.data.nbytes() + 63;
  }
  std::byte* const block = copied > 0 ? arena_->allocate(copied) : nullptr;
  std::byte* copy = block;
  std::vector<ShownPiece> shown;
  std::vector<at::Tensor> kept;
  for (const Piece& piece : pieces) {
    const void* data = nullptr;
    if (is_copied(piece)) {
      data = std::memcpy(copy, piece.data.const_data_ptr(), piece.data.nbytes());
      copy += (piece.data.nbytes() + 63) / 64 * 64;
    } else if (piece.data.defined() && piece.numel > 0) {
      data = piece.data.const_data_ptr();
      kept.push_back(piece.data);
    }
    shown.push_back({piece.begin, piece.numel, reinterpret_cast<uint64_t>(data)});
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
  return reduce(out, pieces, {reduction}, form_of(call, tag), tag);
}

WorkPtr ArenaProcessGroup::reduce(const at::Tensor& out, const std::vector<Piece>& pieces,
                                  std::vector<ArenaReduction> reductions,
                                  const CollectiveForm& form, const CollectiveTag& tag) {
  ArenaTicket ticket = arena_->take_ticket("reduce_scatter", tag, form);
  show_pieces(ticket, pieces);
  // `out` keeps the memory alive.
  const auto read = [out, reductions = std::move(reductions)](const Arena& arena,
                                                              const ArenaTicket& shown) {
    for (const ArenaReduction& part : reductions) reduce_part(arena, shown, part);
  };
  return arena_->start(std::move(ticket), when_all_show(read));
}

// Reduces copies that all ranks publish, because the tensor itself is overwritten.
WorkPtr ArenaProcessGroup::start(AllReduce& call, const CollectiveTag& tag) {
  const auto& [tensor, op] = call;
  const bool is_large = tensor.nbytes() > kMaxOneTurnBytes;
  ArenaTicket ticket = arena_->take_ticket(call.kName, tag, form_of(call, tag), is_large ? 2 : 1);
  show_pieces(ticket, {{0, tensor, tensor.numel()}}, /*copies_all=*/true);
  const LocalReduction reduction{.dtype = tensor.scalar_type(), .op = op};
  if (is_large) {
    const auto bounds = even_bounds(tensor.numel(), size());
    return arena_->start(std::move(ticket), reduce_in_two_rounds(tensor, reduction, bounds));
  }
  const auto read = [tensor = tensor, reduction](const Arena& arena, const ArenaTicket& shown) {
    reduce_part(arena, shown, {0, tensor.numel(), bytes_of(tensor), reduction});
  };
  return arena_->start(std::move(ticket), when_all_show(read));
}

WorkPtr ArenaProcessGroup::start(Broadcast& call, const CollectiveTag& tag) {
  return broadcast_at(arena_->take_ticket(call.kName, tag, form_of(call, tag)), call.tensor,
                      call.root);
}

WorkPtr ArenaProcessGroup::broadcast_at(ArenaTicket ticket, const at::Tensor& tensor, int root) {
  const bool is_read_in_place = rank() == root && tensor.nbytes() > kMaxCopiedBytes &&
                                arena_->reaches(tensor.const_data_ptr());
  if (rank() != root || tensor.numel() == 0) {
    arena_->show(ticket, {}, {});
  } else {
    show_pieces(ticket, {{0, tensor, tensor.numel()}}, /*copies_all=*/!is_read_in_place);
  }
  const auto advance = [tensor, root, is_read_in_place](Arena& arena, ArenaTicket& awaited) {
    if (arena.rank() == root) {
      arena.done_reading(awaited);
      return !is_read_in_place || arena.all_have_read(awaited);
    }
    const Post* const post = arena.shown(root, awaited);
    if (!post) return false;
    copy_pieces(arena, root, *post, tensor);
    arena.done_reading(awaited);
    return true;
  };
  return arena_->start(std::move(ticket), advance);
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
  show_pieces(ticket, pieces);
  const auto advance = [from = std::move(from)](Arena& arena, ArenaTicket& awaited) {
    if (!arena.all_show(awaited)) return false;
    const std::string why = disagreement_in(arena, awaited);
    for (int rank = 0; rank < arena.size() && why.empty(); ++rank) {
      if (rank == arena.rank() || message_numel(from[rank]) == 0) continue;
      const ShownPiece& piece = arena.shown(rank, awaited)->first_piece()[arena.rank()];
      std::memcpy(bytes_of(from[rank]), arena.data(rank, piece.address), from[rank].nbytes());
    }
    // Done also after a disagreement: all ranks detect it, and none will read the messages.
    arena.done_reading(awaited);
    TORCH_CHECK_WITH(DistBackendError, why.empty(), awaited.name.describe(), ": ", why);
    return true;
  };
  return arena_->start(std::move(ticket), advance);
}

ProcessGroupPtr arena_process_group(ProcessGroupPtr inner) {
  return arena_process_group(std::move(inner), /*key=*/"");
}

ProcessGroupPtr arena_process_group(ProcessGroupPtr inner, const std::string& key) {
  TORCH_CHECK_VALUE(inner != nullptr, "[arena_process_group] `inner` must be given");
  if (inner->size() == 1) return inner;
  std::string why_not;
  auto arena = Arena::connect(*inner, key, why_not);
  TORCH_CHECK_NOT_IMPLEMENTED(arena,
                              "[arena_process_group] the ranks can't share memory: ", why_not);
  return std::make_shared<ArenaProcessGroup>(std::move(arena));
}

}  // namespace tessera
