#include "engine/grad/clip_grad.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "comm/group/blocking_all_reduce.h"

namespace tessera {
namespace {

// Calls `f` with each live gradient that takes part: those of its unit, and its parameter.
template <class F>
void for_each_counted(const AllGradients& gradients, const IsCounted& is_counted, F&& f) {
  for (const auto& unit : gradients) {
    const auto& slots = unit->unit().layout().slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      if (unit->is_live(slot) && is_counted(unit->unit().index(), slot)) f(*unit, slots[slot]);
    }
  }
}

at::Tensor local_norm(const at::Tensor& part, double norm_type) {
  const bool is_low_precision = c10::isReducedFloatingType(part.scalar_type());
  const auto dtype = is_low_precision ? std::optional(at::kFloat) : std::nullopt;
  return at::linalg_vector_norm(part, norm_type, at::OptionalIntArrayRef(), false, dtype);
}

// Returns the values of tensors of one element each. From a device, they are copied together.
std::vector<double> values_of(const std::vector<at::Tensor>& scalars) {
  std::vector<double> values;
  for (size_t i = 0; i < scalars.size();) {
    const at::Device device = scalars[i].device();
    std::vector<at::Tensor> run;
    for (; i < scalars.size() && scalars[i].device() == device; ++i)
      run.push_back(scalars[i].to(at::kDouble));
    const at::Tensor all = at::stack(run).to(at::kCPU);
    const auto* const data = all.const_data_ptr<double>();
    values.insert(values.end(), data, data + run.size());
  }
  return values;
}

}  // namespace

double grad_norm(const AllGradients& gradients, const ShardMesh& mesh, double norm_type,
                 const IsCounted& is_counted) {
  at::NoGradGuard no_grad;
  const bool is_max = std::isinf(norm_type);
  std::vector<at::Tensor> norms;
  for_each_counted(gradients, is_counted, [&](const UnitGradients& unit, const ParamSlot& param) {
    // This rank's own shard counts, even where it holds the whole gradient. A part of a DistTensor
    // that several ranks hold counts on one of them.
    const bool is_first = param.dist ? param.dist->is_first_replica : mesh.parts().rank() == 0;
    const int rank = unit.unit().context().mesh.shard().rank();
    const auto& bounds = unit.unit().layout().bounds;
    const auto [begin, end] = overlap(param, bounds[rank], bounds[rank + 1]);
    if (!is_first || begin == end) return;
    norms.push_back(local_norm(unit.reduced(begin, end), norm_type));
  });
  // A NaN must win over any number, as it does in one process; std::max would drop it.
  double total = 0;
  for (const double norm : values_of(norms)) {
    if (is_max) {
      total = std::isnan(norm) || std::isnan(total) ? NAN : std::max(total, norm);
    } else {
      total += std::pow(norm, norm_type);
    }
  }
  // Infinity is sent as it is; NaN is sent as a separate flag, because MAX over ranks may drop it.
  const at::Tensor sums = at::empty({2}, at::kDouble);
  auto* data = sums.mutable_data_ptr<double>();
  data[0] = std::isnan(total) ? 0 : total;
  data[1] = std::isnan(total) ? 1 : 0;
  const ReduceOp op = is_max ? ReduceOp::kMax : ReduceOp::kSum;
  for (ProcessGroup* process_group : {&mesh.shard(), &mesh.parts()})
    blocking_all_reduce(*process_group, sums, op, {"gradient norm", Channel::kControl});
  if (data[1] > 0) return NAN;
  return is_max ? data[0] : std::pow(data[0], 1.0 / norm_type);
}

void scale_gradients(const AllGradients& gradients, double factor, const IsCounted& is_counted) {
  at::NoGradGuard no_grad;
  for_each_counted(gradients, is_counted, [&](const UnitGradients& unit, const ParamSlot& param) {
    const auto [begin, end] = unit.unit().updated_range(param);
    if (begin < end) unit.reduced(begin, end).mul_(factor);
  });
}

}  // namespace tessera
