#include "tensor/redistribute.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/dispatch/math_bits.h"
#include "base/dispatch/unit_key.h"
#include "tensor/chunks.h"
#include "tensor/line_conversion.h"

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
            const Subject& subject)
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
    // Part of the text that ranks compare before they accept each other's tensors: tensors of other
    // sizes or placements may have as many elements.
    const std::string subject = fmt::format("{} ([{}], {} to {})", subject_.text,
                                            fmt::join(sizes, ", "), to_string(from), to_string(to));
    return convert_along(*mesh_.process_group(mesh_dim), local, from, to, sizes,
                         {subject, Channel::kControl, subject_.identity});
  }

  const DeviceMesh& mesh_;
  Placements now_;
  const Placements& to_;
  at::IntArrayRef sizes_;
  Subject subject_;
};

using Box = std::vector<Range>;

// No ranges if they have no element in common.
Box intersection(const Box& a, const Box& b) {
  Box both;
  for (size_t d = 0; d < a.size(); ++d) {
    both.push_back({std::max(a[d].begin, b[d].begin), std::min(a[d].end, b[d].end)});
    if (both[d].begin >= both[d].end) return {};
  }
  return both;
}

at::Tensor part_of(at::Tensor tensor, const Box& own, const Box& part) {
  for (size_t d = 0; d < part.size(); ++d)
    tensor = tensor.narrow(static_cast<int64_t>(d), part[d].begin - own[d].begin, part[d].size());
  return tensor;
}

// The box of each rank of a mesh.
std::map<int, Box> boxes_of(const DistSpec& spec, at::IntArrayRef sizes) {
  std::map<int, Box> boxes;
  for (const int rank : spec.mesh.ranks())
    boxes[rank] =
        local_box(sizes, spec.placements, spec.mesh.shape(), spec.mesh.coordinate_of(rank));
  return boxes;
}

// For each rank, the ranks that have the same box, including itself.
std::map<int, std::vector<int>> replicas_of(const std::map<int, Box>& boxes) {
  std::map<int, std::vector<int>> replicas;
  for (const auto& [rank, box] : boxes) {
    for (const auto& [other, its_box] : boxes) {
      if (its_box == box) replicas[rank].push_back(other);
    }
  }
  return replicas;
}

// Moves a tensor from one mesh to another. All ranks know all boxes (the ranges of the tensor that
// each rank has, and those that it needs), so each computes alone which part goes where: a rank
// that needs a box gets every part of it from one of the ranks that have it, from itself if it is
// one of them.
class Transfer {
 public:
  Transfer(const DistSpec& from, const DistSpec& to, at::IntArrayRef sizes)
      : from_(from),
        sources_(boxes_of(from, sizes)),
        replicas_(replicas_of(sources_)),
        targets_(boxes_of(to, sizes)) {
    std::set<int> all(from.mesh.ranks().begin(), from.mesh.ranks().end());
    all.insert(to.mesh.ranks().begin(), to.mesh.ranks().end());
    ranks_.assign(all.begin(), all.end());
  }

  at::Tensor run(const at::Tensor& local, std::string_view subject) const {
    const ProcessGroupPtr process_group = from_.mesh.process_group_of(ranks_);
    const int self = ranks_[process_group->rank()];
    // Not undefined: the device of empty ones tells over which connection a rank without messages
    // takes part.
    const at::Tensor nothing = at::empty({0}, local.options());
    std::vector<at::Tensor> sent(ranks_.size(), nothing), received(ranks_.size(), nothing);
    const auto own = sources_.find(self), wanted = targets_.find(self);
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (own != sources_.end()) {
        const Box part = what_goes(self, ranks_[r]);
        if (!part.empty()) sent[r] = part_of(local, own->second, part).contiguous().view(-1);
      }
      if (wanted != targets_.end()) {
        const Box part = what_goes(ranks_[r], self);
        if (!part.empty()) received[r] = at::empty(sizes_of(part), local.options());
      }
    }
    std::vector<at::Tensor> into;
    for (const at::Tensor& tensor : received) into.push_back(tensor.view(-1));
    const auto work =
        process_group->all_to_all(std::move(into), std::move(sent), {subject, Channel::kControl});
    work->wait();
    work->wait_inputs();
    if (wanted == targets_.end()) return at::empty({0}, local.options());
    const at::Tensor result = at::empty(sizes_of(wanted->second), local.options());
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (received[r].numel() > 0)
        part_of(result, wanted->second, what_goes(ranks_[r], self)).copy_(received[r]);
    }
    return result;
  }

 private:
  static std::vector<int64_t> sizes_of(const Box& box) {
    std::vector<int64_t> sizes;
    for (const Range& range : box) sizes.push_back(range.size());
    return sizes;
  }

  // Returns the box that `giver` sends to `receiver`, empty if none. If several ranks have that
  // box, the receiver itself gives it, or else one chosen by the receiver's position among the
  // receivers, so that neighbours ask different ones.
  Box what_goes(int giver, int receiver) const {
    const auto source = sources_.find(giver), target = targets_.find(receiver);
    if (source == sources_.end() || target == targets_.end()) return {};
    const auto& replicas = replicas_.at(giver);
    const auto number = static_cast<size_t>(std::distance(targets_.begin(), target));
    const bool has_it = std::find(replicas.begin(), replicas.end(), receiver) != replicas.end();
    if (giver != (has_it ? receiver : replicas[number % replicas.size()])) return {};
    return intersection(source->second, target->second);
  }

  const DistSpec& from_;
  std::map<int, Box> sources_;
  std::map<int, std::vector<int>> replicas_;
  std::map<int, Box> targets_;
  std::vector<int> ranks_;
};

}  // namespace

at::Tensor convert(const at::Tensor& local, const DistSpec& from, const Placements& to,
                   at::IntArrayRef sizes, const Subject& subject) {
  if (from.placements == to || !from.mesh.is_member()) return local;
  if (local.is_meta()) return at::empty(local_sizes_of({from.mesh, to}, sizes), local.options());
  at::NoGradGuard no_grad;
  // Process groups read memory as it is: clone(), as any operator, gathers the memory of a sharded
  // unit first.
  const bool is_watched = local.key_set().has(kUnitKey);
  return with_marks_of(local,
                       Converter(from, to, sizes, subject).run(is_watched ? local.clone() : local));
}

at::Tensor transfer(const at::Tensor& local, const DistSpec& from, const DistSpec& to,
                    at::IntArrayRef sizes, const Subject& subject) {
  if (local.is_meta()) return at::empty(local_sizes_of(to, sizes), local.options());
  at::NoGradGuard no_grad;
  // Pending reductions are done on the mesh of their terms, and made pending again where they are
  // wanted; likewise splits, whose parts are not boxes. A scalar is sent as a tensor of one
  // element.
  const DistSpec whole{from.mesh, without_splits(without_partial(from.placements))};
  const DistSpec placed{to.mesh, without_splits(without_partial(to.placements))};
  const at::Tensor reduced = convert(local, from, whole.placements, sizes, subject);
  const bool is_scalar = sizes.empty();
  const std::vector<int64_t> shape = is_scalar ? std::vector<int64_t>{1} : sizes.vec();
  const at::Tensor source = is_scalar && from.mesh.is_member() ? reduced.reshape(shape) : reduced;
  const std::string moved_subject =
      fmt::format("{} ([{}], to another mesh)", subject.text, fmt::join(sizes, ", "));
  const at::Tensor moved = Transfer(whole, placed, shape).run(source, moved_subject);
  if (!to.mesh.is_member()) return moved;
  // Ranks that are not in the old mesh may know another identity.
  return convert(is_scalar ? moved.reshape(sizes) : moved, placed, to.placements, sizes,
                 Subject(subject.text, 0));
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

bool moves_shards(const Placements& from, const Placements& to) {
  for (size_t i = 0; i < from.size(); ++i) {
    if (is_shard(from[i]) && from[i] != to[i] && !is_partial(to[i])) return true;
  }
  return false;
}

}  // namespace tessera
