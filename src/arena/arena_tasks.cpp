#include "arena/arena_tasks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "group/peer_message.h"

namespace tessera {
namespace {

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
void do_part(const Arena& arena, const ArenaTicket& ticket, const ArenaReduction& part) {
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
        inputs[rank] =
            theirs.address != 0 ? arena.data(rank, theirs) + (at - theirs.begin) * item : zeros();
        if (theirs.address == 0) numel = std::min(numel, kZeroBytes / item);
      }
      reduce_in_order(part.reduction, part.out + (at - part.begin) * out_item, inputs, numel);
      at += numel;
    }
  }
}

}  // namespace

bool ArrivalTask::advance(Arena& arena) {
  if (!arena.all_show(ticket_)) return false;
  arena.done_reading(ticket_);
  return true;
}

GatherTask::GatherTask(ArenaTicket ticket, at::Tensor flat)
    : ArenaTask(std::move(ticket)), flat_(std::move(flat)), copied_(ticket_.name.size, false) {}

bool GatherTask::advance(Arena& arena) {
  bool all = true;
  for (int rank = 0; rank < arena.size(); ++rank) {
    if (copied_[rank]) continue;
    const Post* const post = arena.shown(rank, ticket_);
    all = all && post;
    if (!post) continue;
    copied_[rank] = true;
    copy_from(arena, rank, *post);
  }
  if (all) arena.done_reading(ticket_);
  return all;
}

void GatherTask::copy_from(const Arena& arena, int rank, const Post& post) {
  const int64_t item = item_size(flat_.scalar_type());
  for (int64_t i = 0; i < post.pieces; ++i) {
    const ShownPiece& piece = post.first_piece()[i];
    if (piece.numel == 0) continue;
    const std::byte* const from = arena.data(rank, piece);
    std::byte* const to = bytes_of(flat_) + piece.begin * item;
    if (from != to) std::memcpy(to, from, piece.numel * item);
  }
}

BroadcastTask::BroadcastTask(ArenaTicket ticket, at::Tensor tensor, int root, bool wait_for_readers)
    : ArenaTask(std::move(ticket)),
      tensor_(std::move(tensor)),
      root_(root),
      wait_for_readers_(wait_for_readers) {}

bool BroadcastTask::advance(Arena& arena) {
  if (arena.rank() == root_) {
    arena.done_reading(ticket_);
    return !wait_for_readers_ || arena.all_have_read(ticket_);
  }
  const Post* const post = arena.shown(root_, ticket_);
  if (!post) return false;
  if (post->pieces > 0)
    std::memcpy(bytes_of(tensor_), arena.data(root_, *post->first_piece()), tensor_.nbytes());
  arena.done_reading(ticket_);
  return true;
}

AllToAllTask::AllToAllTask(ArenaTicket ticket, std::vector<at::Tensor> from)
    : ArenaTask(std::move(ticket)), from_(std::move(from)) {}

bool AllToAllTask::advance(Arena& arena) {
  if (!arena.all_show(ticket_)) return false;
  const std::string why = disagreement(arena);
  for (int rank = 0; rank < arena.size() && why.empty(); ++rank) {
    if (rank == arena.rank() || message_numel(from_[rank]) == 0) continue;
    const ShownPiece& piece = arena.shown(rank, ticket_)->first_piece()[arena.rank()];
    std::memcpy(bytes_of(from_[rank]), arena.data(rank, piece), from_[rank].nbytes());
  }
  // Also after a disagreement: all ranks detect it, and none will read the messages.
  arena.done_reading(ticket_);
  TORCH_CHECK_WITH(DistBackendError, why.empty(), ticket_.name.describe(), ": ", why);
  return true;
}

std::string AllToAllTask::disagreement(const Arena& arena) const {
  std::vector<const ShownPiece*> posts;
  for (int rank = 0; rank < arena.size(); ++rank)
    posts.push_back(arena.shown(rank, ticket_)->first_piece());
  const auto form = [](const ShownPiece& piece) { return MessageForm{piece.numel, piece.begin}; };
  return tessera::disagreement(
      arena.size(), [&](int sender, int receiver) { return form(posts[sender][receiver]); },
      [&](int sender, int receiver) { return form(posts[receiver][arena.size() + sender]); });
}

ReduceScatterTask::ReduceScatterTask(ArenaTicket ticket, at::Tensor out,
                                     std::vector<ArenaReduction> reductions)
    : ArenaTask(std::move(ticket)), out_(std::move(out)), reductions_(std::move(reductions)) {}

bool ReduceScatterTask::advance(Arena& arena) {
  if (!arena.all_show(ticket_)) return false;
  for (const ArenaReduction& part : reductions_) do_part(arena, ticket_, part);
  arena.done_reading(ticket_);
  return true;
}

AllReduceTask::AllReduceTask(ArenaTicket ticket, at::Tensor tensor, ReduceOp op,
                             std::vector<int64_t> bounds)
    : ArenaTask(std::move(ticket)),
      tensor_(std::move(tensor)),
      reduction_{.dtype = tensor_.scalar_type(), .op = op},
      bounds_(std::move(bounds)),
      second_(ticket_) {
  second_.number += 1;
}

bool AllReduceTask::advance(Arena& arena) {
  if (!arena.all_show(awaited())) return false;
  if (bounds_.empty()) {
    do_part(arena, ticket_, {0, tensor_.numel(), bytes_of(tensor_), reduction_});
    arena.done_reading(ticket_);
    return true;
  }
  if (!has_reduced_) reduce_part(arena);
  if (!arena.all_show(second_)) return false;
  take_parts(arena);
  return true;
}

void AllReduceTask::reduce_part(Arena& arena) {
  const int64_t begin = bounds_[arena.rank()], end = bounds_[arena.rank() + 1];
  std::byte* const part = arena.allocate((end - begin) * item_size(reduction_.dtype));
  do_part(arena, ticket_, {begin, end, part, reduction_});
  arena.done_reading(ticket_);
  has_reduced_ = true;
  arena.show(second_, {{begin, end - begin, reinterpret_cast<uint64_t>(part)}}, {}, part);
}

void AllReduceTask::take_parts(Arena& arena) {
  const int64_t item = item_size(reduction_.dtype);
  for (int rank = 0; rank < arena.size(); ++rank) {
    const ShownPiece& part = *arena.shown(rank, second_)->first_piece();
    if (part.numel > 0)
      std::memcpy(bytes_of(tensor_) + part.begin * item, arena.data(rank, part), part.numel * item);
  }
  arena.done_reading(second_);
}

}  // namespace tessera
