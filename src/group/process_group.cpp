#include <c10/util/Exception.h>
#include <tessera/dist_debug.h>
#include <tessera/process_group_decorators.h>

#include <memory>
#include <utility>

#include "group/collective.h"
#include "group/math_bits.h"

namespace tessera {
namespace {

// A tensor whose memory does not hold its values, and the copy that is written in its place.
struct ReplacedOutput {
  at::Tensor target, plain;
};

class PlainWork : public Work {
 public:
  PlainWork(WorkPtr inner, std::vector<ReplacedOutput> outputs)
      : inner_(std::move(inner)), outputs_(std::move(outputs)) {}

  void wait() override {
    inner_->wait();
    const at::NoGradGuard no_grad;
    for (const auto& output : std::exchange(outputs_, {})) output.target.copy_(output.plain);
  }
  void wait_inputs() override { inner_->wait_inputs(); }
  bool is_completed() override { return inner_->is_completed(); }

 private:
  const WorkPtr inner_;
  std::vector<ReplacedOutput> outputs_;
};

// Replaces, by copies, the tensors of a collective whose memory does not hold their values; returns
// those that are outputs.
std::vector<ReplacedOutput> make_plain(Collective& collective) {
  std::vector<ReplacedOutput> outputs;
  const auto replace = [&](at::Tensor& tensor, bool is_written) {
    if (!has_math_bits(tensor)) return;
    const at::Tensor target = std::exchange(tensor, with_plain_memory(tensor));
    if (is_written) outputs.push_back({target, tensor});
  };
  std::visit([&](auto& call) { for_each_tensor(call, replace); }, collective.call);
  return outputs;
}

}  // namespace

WorkPtr ProcessGroup::start(Collective collective) {
  check_arguments(*this, collective);
  CommDebug::count(collective);
  std::vector<ReplacedOutput> outputs = make_plain(collective);
  WorkPtr work = issue(std::move(collective));
  if (outputs.empty()) return work;
  return std::make_shared<PlainWork>(std::move(work), std::move(outputs));
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

ProcessGroupDecorator::ProcessGroupDecorator(ProcessGroupPtr inner) : inner_(std::move(inner)) {
  TORCH_CHECK_VALUE(inner_ != nullptr, "[ProcessGroupDecorator] `inner` must be given");
}

}  // namespace tessera
