#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "mesh/chunks.h"
#include "mesh/redistribute.h"

namespace tessera {

// From one mesh to another. Both sides know all boxes (what ranges of the tensor each rank has, and
// needs), so each works out alone what goes where: a rank that needs a box gets every part of it
// from one of the ranks that have it, from itself if it is one of them.
namespace {

using Box = std::vector<Range>;

Box intersection(const Box& a, const Box& b) {
  Box both;
  for (size_t d = 0; d < a.size(); ++d)
    both.push_back({std::max(a[d].begin, b[d].begin), std::min(a[d].end, b[d].end)});
  return both;
}

bool is_empty(const Box& box) {
  return std::any_of(box.begin(), box.end(), [](const Range& r) { return r.begin >= r.end; });
}

at::Tensor part_of(at::Tensor tensor, const Box& own, const Box& part) {
  for (size_t d = 0; d < part.size(); ++d)
    tensor = tensor.narrow(static_cast<int64_t>(d), part[d].begin - own[d].begin, part[d].size());
  return tensor;
}

Box box_of(const DistSpec& spec, int rank, at::IntArrayRef sizes) {
  return local_box(sizes, spec.placements, spec.mesh.shape(), spec.mesh.coordinate_of(rank));
}

// Of each rank of a mesh what it has; ranks with equal boxes are replicas.
std::map<int, Box> boxes_of(const DistSpec& spec, at::IntArrayRef sizes) {
  std::map<int, Box> boxes;
  for (const int rank : spec.mesh.ranks()) boxes[rank] = box_of(spec, rank, sizes);
  return boxes;
}

// The rank that gives each distinct box to `receiver`, the `number`th of its mesh: neighbours ask
// different replicas.
std::vector<int> givers(const std::map<int, Box>& boxes, int receiver, size_t number) {
  std::map<std::vector<std::pair<int64_t, int64_t>>, std::vector<int>> replicas;
  for (const auto& [rank, box] : boxes) {
    std::vector<std::pair<int64_t, int64_t>> key;
    for (const Range& range : box) key.emplace_back(range.begin, range.end);
    replicas[key].push_back(rank);
  }
  std::vector<int> chosen;
  for (const auto& [key, ranks] : replicas) {
    const bool has_it = std::find(ranks.begin(), ranks.end(), receiver) != ranks.end();
    chosen.push_back(has_it ? receiver : ranks[number % ranks.size()]);
  }
  return chosen;
}

Placements without_partial(Placements placements) {
  for (Placement& placement : placements) {
    if (is_partial(placement)) placement = Replicate{};
  }
  return placements;
}

// One move of boxes between two sets of ranks.
class Transfer {
 public:
  Transfer(const DistSpec& from, const DistSpec& to, at::IntArrayRef sizes)
      : from_(from), to_(to), sources_(boxes_of(from, sizes)), targets_(boxes_of(to, sizes)) {
    std::set<int> all(from.mesh.ranks().begin(), from.mesh.ranks().end());
    all.insert(to.mesh.ranks().begin(), to.mesh.ranks().end());
    ranks_.assign(all.begin(), all.end());
  }

  at::Tensor run(const at::Tensor& local, std::string_view subject) const {
    const ProcessGroupPtr process_group = from_.mesh.process_group_of(ranks_);
    const int self = ranks_[process_group->rank()];
    std::vector<at::Tensor> sent(ranks_.size()), received(ranks_.size());
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
    std::vector<at::Tensor> into(received);
    for (at::Tensor& tensor : into) {
      if (tensor.defined()) tensor = tensor.view(-1);
    }
    const auto work =
        process_group->all_to_all(std::move(into), std::move(sent), {subject, Channel::kControl});
    work->wait();
    work->wait_inputs();
    if (wanted == targets_.end()) return at::empty({0}, local.options());
    const at::Tensor result = at::empty(sizes_of(wanted->second), local.options());
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (received[r].defined())
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

  // Empty if nothing goes; a scalar's box has no dims, so its parts are told by who gives it.
  Box what_goes(int giver, int receiver) const {
    const auto source = sources_.find(giver), target = targets_.find(receiver);
    if (source == sources_.end() || target == targets_.end()) return {};
    const auto number = static_cast<size_t>(std::distance(targets_.begin(), target));
    const auto chosen = givers(sources_, receiver, number);
    if (std::find(chosen.begin(), chosen.end(), giver) == chosen.end()) return {};
    const Box both = intersection(source->second, target->second);
    return is_empty(both) ? Box() : both;
  }

  const DistSpec& from_;
  const DistSpec& to_;
  std::map<int, Box> sources_, targets_;
  std::vector<int> ranks_;
};

}  // namespace

at::Tensor transfer(const at::Tensor& local, const DistSpec& from, const DistSpec& to,
                    at::IntArrayRef sizes, std::string_view subject) {
  at::NoGradGuard no_grad;
  // Pending reductions are done where their terms are, and made again where they are wanted. A
  // scalar travels as a tensor of one element.
  const DistSpec whole{from.mesh, without_partial(from.placements)};
  const DistSpec placed{to.mesh, without_partial(to.placements)};
  const at::Tensor reduced = convert(local, from, whole.placements, sizes, subject);
  const bool is_scalar = sizes.empty();
  const std::vector<int64_t> shape = is_scalar ? std::vector<int64_t>{1} : sizes.vec();
  const at::Tensor source = is_scalar && from.mesh.is_member() ? reduced.reshape(shape) : reduced;
  const at::Tensor moved = Transfer(whole, placed, shape).run(source, subject);
  if (!to.mesh.is_member()) return moved;
  return convert(is_scalar ? moved.reshape(sizes) : moved, placed, to.placements, sizes, subject);
}

}  // namespace tessera
