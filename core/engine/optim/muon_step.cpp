#include "engine/optim/muon_step.h"

#include <ATen/TensorGeometry.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <map>
#include <utility>

#include "engine/unit/least_loaded.h"

namespace tessera {

// [Note: Cut matrices]
//
// Momentum and the descent treat each element by itself: a rank does them for its part. Between
// them, each matrix is made orthogonal by one rank, to which the others send their parts of the
// update, and which sends back their parts of the direction. Both travel in bfloat16, to which one
// process rounds them as well, so the bits are those of one process. All matrices share two
// all-to-alls. For P elements on N ranks, each rank sends 4 P (N - 1) / N^2 bytes: little beside
// the gradients, whose bytes don't shrink with N.
//
// A matrix that lies on one rank stays there. Each other one goes to the rank with the least work
// so far.
namespace {

constexpr CollectiveTag kUpdates{"updates of Muon", Channel::kControl};
constexpr CollectiveTag kDirections{"directions of Muon", Channel::kControl};

// A matrix, or the whole of a stack whose matrices don't lie one after another.
struct Item {
  const CutMatrix* of = nullptr;
  int64_t begin = 0, end = 0;  // elements of the parameter
  int owner = 0;

  // What a rank has of it, in elements of the parameter.
  std::pair<int64_t, int64_t> part(int rank) const {
    const auto clamp = [&](int64_t bound) { return std::clamp(bound, begin, end); };
    return {clamp(of->bounds[rank]), clamp(of->bounds[rank + 1])};
  }
  int64_t part_numel(int rank) const {
    const auto [first, last] = part(rank);
    return last - first;
  }
  bool is_matrix() const { return end - begin != of->slot->numel || of->slot->sizes.size() == 2; }
};

std::vector<Item> items_of(const std::vector<const CutMatrix*>& cut, int ranks) {
  std::vector<Item> items;
  LeastLoaded loads(ranks);
  for (const CutMatrix* matrix : cut) {
    const ParamSlot& slot = *matrix->slot;
    const bool splits =
        slot.sizes.size() == 3 && at::geometry_is_contiguous(slot.sizes, slot.strides);
    const int64_t count = splits ? slot.sizes[0] : 1,
                  numel = slot.numel / std::max<int64_t>(1, count);
    for (int64_t i = 0; i < count && numel > 0; ++i) {
      Item item{matrix, i * numel, (i + 1) * numel};
      item.owner = loads.next();
      for (int rank = 0; rank < ranks; ++rank)
        if (item.part_numel(rank) == numel) item.owner = rank;
      loads.add(item.owner, numel * std::min(slot.sizes[slot.sizes.size() - 2], slot.sizes.back()));
      items.push_back(item);
    }
  }
  return items;
}

// The parts of all matrices between two ranks, one after another, by the rank that holds them and
// the rank that makes them orthogonal.
class Exchange {
 public:
  Exchange(const std::vector<Item>& items, ProcessGroup& ranks, at::Device device)
      : items_(items), ranks_(ranks), options_(at::device(device).dtype(at::kBFloat16)) {
    for (int rank = 0; rank < ranks.size(); ++rank) {
      held_.push_back(empty_for(ranks.rank(), rank));
      owned_.push_back(empty_for(rank, ranks.rank()));
    }
  }

  // Messages with what this rank holds; and with what it makes orthogonal.
  void send_updates() { ranks_.all_to_all(owned_, held_, kUpdates)->wait(); }
  void send_directions() { ranks_.all_to_all(held_, owned_, kDirections)->wait(); }

  // Calls `f` with each item of which this rank holds a part, the part's place in the parameter,
  // and its elements.
  template <class F>
  void for_each_held(F&& f) const {
    std::vector<int64_t> begins(ranks_.size());
    for (const Item& item : items_) {
      const auto [first, last] = item.part(ranks_.rank());
      if (first == last) continue;
      f(item, first, held_[item.owner].narrow(0, begins[item.owner], last - first));
      begins[item.owner] += last - first;
    }
  }
  // Calls `f` with each item that this rank makes orthogonal, and its parts, in order.
  template <class F>
  void for_each_owned(F&& f) const {
    std::vector<int64_t> begins(ranks_.size());
    for (const Item& item : items_) {
      if (item.owner != ranks_.rank()) continue;
      std::vector<at::Tensor> parts;
      for (int rank = 0; rank < ranks_.size(); ++rank) {
        const int64_t numel = item.part_numel(rank);
        parts.push_back(owned_[rank].narrow(0, begins[rank], numel));
        begins[rank] += numel;
      }
      f(item, parts);
    }
  }

 private:
  at::Tensor empty_for(int holder, int owner) const {
    int64_t numel = 0;
    for (const Item& item : items_)
      if (item.owner == owner) numel += item.part_numel(holder);
    return at::empty({numel}, options_);
  }

  const std::vector<Item>& items_;
  ProcessGroup& ranks_;
  const at::TensorOptions options_;
  std::vector<at::Tensor> held_, owned_;  // by the other rank
};

const MuonOptions& options_of(const Muon& optimizer, const Item& item) {
  return static_cast<const MuonOptions&>(optimizer.param_groups()[item.of->param_group].options());
}

// Replaces the parts of an update by those of its direction.
void make_orthogonal(const Item& item, const std::vector<at::Tensor>& parts,
                     const MuonOptions& options) {
  const ParamSlot& slot = *item.of->slot;
  const at::Tensor flat = at::empty({item.end - item.begin}, parts[0].options());
  const auto each_part = [&](const auto& f) {
    int64_t begin = 0;
    for (const at::Tensor& part : parts) {
      f(flat.narrow(0, begin, part.numel()), part);
      begin += part.numel();
    }
  };
  each_part([](const at::Tensor& place, const at::Tensor& part) { place.copy_(part); });
  const size_t skipped = item.is_matrix() && slot.sizes.size() == 3 ? 1 : 0;
  const at::Tensor whole = at::as_strided(flat, at::IntArrayRef(slot.sizes).slice(skipped),
                                          at::IntArrayRef(slot.strides).slice(skipped));
  if (whole.dim() == 2) {
    whole.copy_(orthogonalized(whole, options));
  } else {
    for (int64_t i = 0; i < whole.size(0); ++i) whole[i].copy_(orthogonalized(whole[i], options));
  }
  each_part([](const at::Tensor& place, const at::Tensor& part) { part.copy_(place); });
}

void step_cut(Muon& optimizer, const std::vector<const CutMatrix*>& cut, ProcessGroup& ranks) {
  const std::vector<Item> items = items_of(cut, ranks.size());
  Exchange exchange(items, ranks, cut[0]->device);
  // The elements of a part of an item, in a tensor of the shape of the rank's part.
  const auto within = [&](const at::Tensor& tensor, const Item& item, int64_t begin,
                          int64_t numel) {
    return tensor.view({-1}).narrow(0, begin - item.of->bounds[ranks.rank()], numel);
  };
  std::map<const CutMatrix*, at::Tensor> updates;
  for (const CutMatrix* matrix : cut) {
    if (!matrix->part.defined()) continue;
    const at::Tensor buffer = muon_buffer(optimizer, matrix->part);
    updates[matrix] = muon_update(
        static_cast<const MuonOptions&>(optimizer.param_groups()[matrix->param_group].options()),
        matrix->part.grad().to(buffer.scalar_type()), buffer);
  }
  exchange.for_each_held([&](const Item& item, int64_t begin, const at::Tensor& message) {
    message.copy_(within(updates.at(item.of), item, begin, message.numel()));
  });
  updates.clear();
  exchange.send_updates();
  exchange.for_each_owned([&](const Item& item, const std::vector<at::Tensor>& parts) {
    make_orthogonal(item, parts, options_of(optimizer, item));
  });
  exchange.send_directions();
  exchange.for_each_held([&](const Item& item, int64_t begin, const at::Tensor& message) {
    const auto& sizes = item.of->slot->sizes;
    muon_descend(options_of(optimizer, item), sizes[sizes.size() - 2], sizes.back(),
                 within(item.of->part, item, begin, message.numel()), message);
  });
}

}  // namespace

void step_muon(Muon& optimizer, const std::vector<CutMatrix>& cut) {
  at::NoGradGuard no_grad;
  check_muon_gradients(optimizer);
  std::set<const c10::TensorImpl*> parts;
  std::vector<std::pair<const ShardMesh*, std::vector<const CutMatrix*>>> by_ranks;
  for (const CutMatrix& matrix : cut) {
    parts.insert(matrix.part.unsafeGetTensorImpl());
    auto it = std::ranges::find_if(by_ranks, [&](auto& own) { return own.first == matrix.ranks; });
    if (it == by_ranks.end()) it = by_ranks.insert(it, {matrix.ranks, {}});
    it->second.push_back(&matrix);
  }
  for (const auto& group : optimizer.param_groups()) step_muon_group(optimizer, group, parts);
  for (const auto& [ranks, matrices] : by_ranks) step_cut(optimizer, matrices, ranks->shard());
}

}  // namespace tessera
