#include <tessera/comm/process_group_decorators.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>
#include <variant>

#include "comm/group/encoding.h"
#include "comm/group/peer_message.h"
#include "comm/group/sent_bytes.h"

namespace tessera {

namespace {

// The entries, in the order of the alternatives of `Collective::call`.
constexpr CollectiveCounts::Entry CollectiveCounts::*kEntries[] = {
    &CollectiveCounts::all_gather, &CollectiveCounts::reduce_scatter, &CollectiveCounts::all_reduce,
    &CollectiveCounts::broadcast,  &CollectiveCounts::all_to_all,     &CollectiveCounts::barrier};
static_assert(std::size(kEntries) == std::variant_size_v<decltype(Collective::call)>);

class CountingDecorator : public CountingProcessGroup {
 public:
  using CountingProcessGroup::CountingProcessGroup;

  CollectiveCounts counts() const override {
    std::lock_guard lock(mutex_);
    return counts_;
  }

  void reset_counts() override {
    std::lock_guard lock(mutex_);
    counts_ = {};
  }

 private:
  // Counts after the call, because a call that throws has sent nothing.
  WorkPtr issue(Collective collective) override {
    const auto kind = kEntries[collective.call.index()];
    const int64_t bytes =
        std::visit([this](const auto& call) { return sent_by(call); }, collective.call);
    WorkPtr work = pass_on(std::move(collective));
    std::lock_guard lock(mutex_);
    (counts_.*kind).calls += 1;
    (counts_.*kind).bytes_sent += bytes;
    return work;
  }

  int64_t sent_by(const AllGather& call) const {
    return receivers() * encoded_nbytes(call.encoding, call.shard.numel(), call.dtype());
  }

  int64_t sent_by(const ReduceScatter& call) const {
    int64_t bytes = 0;
    for (const int r : sends_to()) {
      const int64_t begin = call.bounds[r], end = call.bounds[r + 1];
      if (call.options.encoding == Encoding::kPlain) {
        bytes += encoded_nbytes(Encoding::kPlain, end - begin, call.dtype());
        continue;
      }
      // Each piece is encoded by itself.
      for (const Piece& piece : call.pieces) {
        const int64_t numel =
            std::min(end, piece.begin + piece.numel) - std::max(begin, piece.begin);
        if (numel > 0) bytes += encoded_nbytes(call.options.encoding, numel, call.dtype());
      }
    }
    if (call.options.gather_into.defined())
      bytes += receivers() * static_cast<int64_t>(call.out.nbytes());
    return bytes;
  }

  // Ranks that share memory each reduce one part with the ranks that they send to. A c10d backend
  // has no channels; assume that it sends the minimum.
  int64_t sent_by(const AllReduce& call) const {
    const auto nbytes = static_cast<int64_t>(call.tensor.nbytes());
    const int64_t ranks = receivers() + 1;
    if (!has_channels()) return 2 * receivers() * nbytes / ranks;
    const int64_t sharing = is_reduced_whole(call.tensor) ? 1 : size() / ranks;
    return all_reduce_bytes(nbytes / sharing, ranks);
  }

  int64_t sent_by(const Broadcast& call) const {
    if (rank() != call.root) return 0;
    return receivers() *
           encoded_nbytes(call.encoding, call.tensor.numel(), call.tensor.scalar_type());
  }

  // A transport that sends messages at all sends every message of an all-to-all.
  int64_t sent_by(const AllToAll& call) const {
    int64_t bytes = 0;
    for (size_t r = 0; r < call.to.size() && receivers() > 0; ++r) {
      if (static_cast<int>(r) != rank()) bytes += message_bytes(call.to[r]);
    }
    return bytes;
  }

  int64_t sent_by(const Barrier& /*call*/) const { return 0; }

  int64_t receivers() const { return static_cast<int64_t>(sends_to().size()); }

  mutable std::mutex mutex_;
  CollectiveCounts counts_;
};

}  // namespace

int64_t CollectiveCounts::calls() const {
  int64_t calls = 0;
  for (const auto kind : kEntries) calls += (this->*kind).calls;
  return calls;
}

int64_t CollectiveCounts::bytes_sent() const {
  int64_t bytes = 0;
  for (const auto kind : kEntries) bytes += (this->*kind).bytes_sent;
  return bytes;
}

std::shared_ptr<CountingProcessGroup> counting_process_group(ProcessGroupPtr inner) {
  return std::make_shared<CountingDecorator>(std::move(inner));
}

}  // namespace tessera
