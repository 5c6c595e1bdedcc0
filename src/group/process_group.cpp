#include <tessera/process_group.h>

#include <utility>

#include "group/check_arguments.h"
#include "group/collective_count.h"
#include "group/math_bits.h"

namespace tessera {

WorkPtr ProcessGroup::start(Collective collective) {
  check_arguments(*this, collective);
  count_collective(collective);
  PlainArguments plain(collective);
  return std::move(plain).finish(issue(std::move(collective)));
}

WorkPtr ProcessGroup::issue_on(ProcessGroup& inner, Collective collective) {
  return inner.issue(std::move(collective));
}

WorkPtr ProcessGroup::all_gather(const at::Tensor& flat, const at::Tensor& shard,
                                 std::span<const int64_t> bounds, const CollectiveTag& tag) {
  return start({tag, AllGather{flat, shard, bounds}});
}

WorkPtr ProcessGroup::reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                                     std::span<const int64_t> bounds,
                                     const ReduceScatterOptions& options,
                                     const CollectiveTag& tag) {
  return start({tag, ReduceScatter{out, std::move(pieces), bounds, options}});
}

WorkPtr ProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) {
  return start({tag, AllReduce{tensor, op}});
}

WorkPtr ProcessGroup::broadcast(const at::Tensor& tensor, int root, const CollectiveTag& tag) {
  return start({tag, Broadcast{tensor, root}});
}

WorkPtr ProcessGroup::all_to_all(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                                 const CollectiveTag& tag) {
  return start({tag, AllToAll{std::move(from), std::move(to)}});
}

WorkPtr ProcessGroup::arrive(const CollectiveTag& tag) { return start({tag, Barrier{}}); }

std::vector<int> ProcessGroup::sends_to() const {
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace tessera
