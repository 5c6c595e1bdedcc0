#include "mesh/redistribute.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "dispatch/unit_key.h"
#include "mesh/chunks.h"
#include "mesh/line_conversion.h"

namespace tessera {

// [Note: Changing several placements]
//
// Along each mesh dim, the ranks of a line change a placement, for the tensor that these ranks have
// together. If several mesh dims cut one tensor dim, the outer ones cut first, and an inner one
// cuts the part that they leave to a line. So an outer cut can't be made or undone while an inner
// one of the same dim exists: the inner one is gathered first and made again afterwards. The same
// holds for reductions by different operators: the inner one is done first, and made pending last.
namespace {

bool adds(const Placement& placement) {
  const auto op = std::get<Partial>(placement).op;
  return op == PartialOp::kSum || op == PartialOp::kAvg;
}

// True if an outer placement can't change while the inner one exists, or vice versa.
bool clash(const Placement& a, const Placement& b) {
  if (is_shard(a)) return is_shard(b, std::get<Shard>(a).dim);
  return is_partial(a) && is_partial(b) && a != b && !(adds(a) && adds(b));
}

class Converter {
 public:
  Converter(const DistSpec& from, const Placements& to, at::IntArrayRef sizes,
            std::string_view subject)
      : mesh_(from.mesh), now_(from.placements), to_(to), sizes_(sizes), subject_(subject) {}

  at::Tensor run(at::Tensor local) {
    while (true) {
      const int64_t next = next_free();
      if (next >= 0) {
        local = change(local, next, to_[next]);
      } else if (const int64_t inner = innermost_in_the_way(); inner >= 0) {
        local = change(local, inner, Replicate{});
      } else {
        TORCH_INTERNAL_ASSERT(now_ == to_);
        return local;
      }
    }
  }

 private:
  int64_t ndim() const { return static_cast<int64_t>(now_.size()); }

  // A mesh dim that can change at once to its final placement: first reductions that shrink the
  // data that others have to move, then changes that need no message, then the rest.
  int64_t next_free() const {
    int64_t best = -1;
    double least = 0;
    for (int64_t i = 0; i < ndim(); ++i) {
      if (now_[i] == to_[i] || !is_free(i)) continue;
      const double growth = size_after(to_[i]) - size_after(now_[i]);
      if (best < 0 || growth < least) best = i, least = growth;
    }
    return best;
  }

  static double size_after(const Placement& placement) { return is_shard(placement) ? 0 : 1; }

  bool is_free(int64_t i) const {
    for (int64_t inner = i + 1; inner < ndim(); ++inner) {
      if (clash(now_[inner], now_[i]) || clash(now_[inner], to_[i])) return false;
    }
    for (int64_t outer = 0; outer < i; ++outer) {
      if (now_[outer] == to_[outer]) continue;
      if (clash(now_[outer], to_[i]) || clash(to_[outer], to_[i])) return false;
    }
    return true;
  }

  // The innermost mesh dim that some change has to wait for.
  int64_t innermost_in_the_way() const {
    for (int64_t inner = ndim() - 1; inner >= 0; --inner) {
      for (int64_t i = 0; i < inner; ++i) {
        if (now_[i] == to_[i]) continue;
        if (clash(now_[inner], now_[i]) || clash(now_[inner], to_[i])) return inner;
      }
    }
    return -1;
  }

  at::Tensor change(const at::Tensor& local, int64_t mesh_dim, const Placement& to) {
    Placements along = now_;
    along[mesh_dim] = Replicate{};
    const auto sizes = local_sizes_of({mesh_, along}, sizes_);
    const Placement from = std::exchange(now_[mesh_dim], to);
    if (mesh_.size(mesh_dim) == 1) return local;
    return convert_along({*mesh_.process_group(mesh_dim)}, local, from, to, sizes,
                         subject_of_change(from, to, sizes));
  }

  // Part of the text that ranks compare before they accept each other's tensors: tensors of other
  // sizes or placements may have as many elements.
  std::string subject_of_change(const Placement& from, const Placement& to,
                                at::IntArrayRef sizes) const {
    return fmt::format("{} ([{}], {} to {})", subject_, fmt::join(sizes, ", "), to_string(from),
                       to_string(to));
  }

  const DeviceMesh& mesh_;
  Placements now_;
  const Placements& to_;
  at::IntArrayRef sizes_;
  std::string_view subject_;
};

}  // namespace

at::Tensor convert(const at::Tensor& local, const DistSpec& from, const Placements& to,
                   at::IntArrayRef sizes, std::string_view subject) {
  if (from.placements == to || !from.mesh.is_member()) return local;
  at::NoGradGuard no_grad;
  // Process groups read memory as it is: the memory of a sharded unit must be gathered first, which
  // any operator that reads it does.
  const bool is_watched = local.key_set().has(kUnitKey);
  return Converter(from, to, sizes, subject).run(is_watched ? local.clone() : local);
}

std::vector<int64_t> local_sizes_of(const DistSpec& spec, at::IntArrayRef sizes) {
  const auto& coordinate = spec.mesh.coordinate();
  if (!coordinate) return {0};
  return local_sizes(sizes, spec.placements, spec.mesh.shape(), *coordinate);
}

double cost_of(const DeviceMesh& mesh, const Placements& from, const Placements& to,
               double nbytes) {
  double cost = 0;
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    double line_bytes = nbytes;
    for (int64_t j = 0; j < mesh.ndim(); ++j) {
      if (j != i && is_shard(from[j])) line_bytes /= static_cast<double>(mesh.size(j));
    }
    cost += conversion_cost(from[i], to[i], line_bytes, mesh.size(i));
  }
  return cost;
}

}  // namespace tessera
