#include "optim/segment_gradients.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "device/side_stream.h"
#include "model/sharded_state.h"

namespace tessera {

static at::Tensor pinned_copy(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).pinned_memory(true);
  return at::empty(tensor.sizes(), options).copy_(tensor, /*non_blocking=*/true);
}

void SegmentGradients::begin(ShardedState& state, const std::vector<const Segment*>& segments) {
  if (segments.empty()) return;
  for (const Segment* segment : segments) gradients_.push_back(reduced_gradient(state, *segment));
  const at::Device device = gradients_.front().device();
  if (device == segments.front()->tensor.device()) return;
  copied_ = state.context().copies->of(device).run([&] {
    for (at::Tensor& gradient : gradients_) gradient = pinned_copy(gradient);
  });
}

std::vector<at::Tensor> SegmentGradients::take() {
  if (copied_) copied_->synchronize();
  copied_.reset();
  return std::exchange(gradients_, {});
}

}  // namespace tessera
