#include "engine/model/join_scope.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <limits>

namespace tessera {

// [Note: Uneven steps]
//
// Ranks that have run out of data must still take part in the collectives of the others, but do not
// know which come next. So under `join()` each collective call of training is announced: by one
// small all-reduce (MAX) of its number and the number of values that go with it, and another one of
// the values if there are any. Ranks that are done announce nothing themselves (0), receive the
// maximum, and make the same call without data of their own. When the maximum is 0, all are done.
//
// The negated number is reduced, too, for the minimum: if ranks that are not done make different
// calls, all ranks learn of it.
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

// By `JoinCall`.
constexpr std::array kCallNames = {"nothing",    "a forward that synchronizes buffers",
                                   "a backward", "a backward",
                                   "reduce()",   "clip_grad_norm_()",
                                   "step()",     "an error"};

const char* name_of(JoinCall call) { return kCallNames.at(static_cast<size_t>(call)); }

}  // namespace

JoinScope::Heard JoinScope::exchange(JoinCall call, const std::vector<double>& values) {
  const CollectiveTag tag{"uneven steps", Channel::kControl};
  const bool speaks = call != JoinCall::kDone;
  const at::Tensor header = at::full({4}, kNothing, at::kDouble);
  auto* data = header.mutable_data_ptr<double>();
  data[0] = static_cast<double>(call);
  if (speaks) data[1] = -static_cast<double>(call);
  if (speaks) data[2] = static_cast<double>(values.size());
  if (!speaks) data[3] = 1;
  mesh_.all_reduce(header, ReduceOp::kMax, tag);
  is_uneven_ = data[3] == 1;
  const auto most = static_cast<JoinCall>(data[0]);
  TORCH_CHECK(most != JoinCall::kFailed || call == JoinCall::kFailed,
              "[join] another rank has failed; see its own error");
  if (most == JoinCall::kDone || most == JoinCall::kFailed) return {most, {}};
  const auto least = static_cast<JoinCall>(-data[1]);
  TORCH_CHECK(most == least, "[join] ranks that are not done must make the same calls; one calls ",
              name_of(most), ", another ", name_of(least));
  if (data[2] == 0) return {most, {}};
  const at::Tensor sent = at::full({static_cast<int64_t>(data[2])}, kNothing, at::kDouble);
  std::copy(values.begin(), values.end(), sent.mutable_data_ptr<double>());
  mesh_.all_reduce(sent, ReduceOp::kMax, tag);
  const auto* begin = sent.const_data_ptr<double>();
  return {most, {begin, begin + sent.numel()}};
}

size_t JoinScope::index_of(const torch::optim::Optimizer& optimizer) const {
  const auto it = std::find(optimizers_.begin(), optimizers_.end(), &optimizer);
  TORCH_CHECK_VALUE(it != optimizers_.end(),
                    "[join] an optimizer that steps must be among those given to join()");
  return it - optimizers_.begin();
}

void JoinScope::announce(JoinCall call, const std::vector<double>& values) {
  if (!is_done_) exchange(call, values);
}

JoinScope::Heard JoinScope::listen() {
  is_done_ = true;
  return exchange(JoinCall::kDone, {});
}

}  // namespace tessera
