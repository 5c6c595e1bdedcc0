#include "grad/clip_grad.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "group/host_all_reduce.h"

namespace tessera {
namespace {

// Calls `f` with the part of each live gradient that counts on this rank: its own shard, even where
// it holds the whole gradient. A part of a DistTensor that several ranks hold counts on one of
// them.
template <class F>
void for_each_own_part(const UnitGradients& gradients, const ShardMesh& mesh,
                       const IsCounted& is_counted, F&& f) {
  const int rank = gradients.unit().context().mesh.shard().rank();
  const UnitLayout& layout = gradients.unit().layout();
  for (size_t slot = 0; slot < layout.slots.size(); ++slot) {
    const ParamSlot& param = layout.slots[slot];
    const bool is_first = param.dist ? param.dist->is_first_replica : mesh.parts().rank() == 0;
    if (!gradients.is_live(slot) || !is_first || !is_counted(gradients.unit().index(), slot))
      continue;
    const auto [begin, end] = overlap(param, layout.bounds[rank], layout.bounds[rank + 1]);
    if (begin < end) f(gradients.reduced(begin, end));
  }
}

double local_norm(const at::Tensor& part, double norm_type) {
  const bool is_low_precision =
      part.scalar_type() == at::kHalf || part.scalar_type() == at::kBFloat16;
  const auto dtype = is_low_precision ? std::optional(at::kFloat) : std::nullopt;
  return at::linalg_vector_norm(part, norm_type, at::OptionalIntArrayRef(), false, dtype)
      .item<double>();
}

}  // namespace

double grad_norm(const std::vector<std::shared_ptr<UnitGradients>>& gradients,
                 const ShardMesh& mesh, double norm_type, const IsCounted& is_counted) {
  at::NoGradGuard no_grad;
  const bool is_max = std::isinf(norm_type);
  // A NaN must win over any number, as it does in one process; std::max would drop it.
  double total = 0;
  for (const auto& unit : gradients) {
    for_each_own_part(*unit, mesh, is_counted, [&](const at::Tensor& part) {
      const double norm = local_norm(part, norm_type);
      if (is_max) {
        total = std::isnan(norm) || std::isnan(total) ? NAN : std::max(total, norm);
      } else {
        total += std::pow(norm, norm_type);
      }
    });
  }
  // Infinity is sent as it is; NaN is sent as a separate flag, because MAX over ranks may drop it.
  const at::Tensor sums = at::empty({2}, at::kDouble);
  auto* data = sums.mutable_data_ptr<double>();
  data[0] = std::isnan(total) ? 0 : total;
  data[1] = std::isnan(total) ? 1 : 0;
  for (ProcessGroup* process_group : {&mesh.shard(), &mesh.parts()})
    host_all_reduce(*process_group, sums, is_max ? ReduceOp::kMax : ReduceOp::kSum,
                    {"gradient norm", Channel::kControl});
  if (data[1] > 0) return NAN;
  return is_max ? data[0] : std::pow(data[0], 1.0 / norm_type);
}

void scale_gradients(const std::vector<std::shared_ptr<UnitGradients>>& gradients, double factor,
                     const IsCounted& is_counted) {
  at::NoGradGuard no_grad;
  for (const auto& unit : gradients) {
    const UnitLayout& layout = unit->unit().layout();
    for (size_t slot = 0; slot < layout.slots.size(); ++slot) {
      if (!unit->is_live(slot) || !is_counted(unit->unit().index(), slot)) continue;
      const ParamSlot& param = layout.slots[slot];
      const auto [begin, end] = unit->unit().updated_range(param);
      if (begin < end) unit->reduced(begin, end).mul_(factor);
    }
  }
}

}  // namespace tessera
