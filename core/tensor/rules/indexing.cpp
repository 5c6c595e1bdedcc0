
#include <algorithm>

#include "tensor/rules.h"

namespace tessera {
namespace {

// Operators that read or write elements at positions that another tensor gives.

// Ranks without elements of the result would not see that there is nothing to choose from.
void check_choice(const OpCall& call) {
  const TensorInfo& self = call.inputs[0];
  const bool chooses = self.ndim() > 0 && std::ranges::count(call.outputs[0].sizes, 0) == 0;
  TORCH_CHECK_INDEX(!chooses || self.sizes[call.dim("dim", self.ndim())] > 0, "[",
                    call.schema.name(), "] the dim to choose from has no elements; got sizes ",
                    at::IntArrayRef(self.sizes));
}

Strategies index_select(const OpCall& call) {
  check_choice(call);
  const int64_t ndim = call.inputs[0].ndim(), dim = call.dim("dim", ndim);
  Strategies ways;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != dim) ways.push_back({{Shard{d}, Replicate{}}, {Shard{d}}});
  }
  if (ndim > 0 && call.inputs[1].ndim() > 0)
    ways.push_back({{Replicate{}, Shard{0}}, {Shard{dim}}});
  return ways;
}

std::vector<TensorInfo> index_select_sizes(const OpCall& call) {
  TensorInfo output = call.inputs[0];
  if (output.ndim() > 0)
    output.sizes[call.dim("dim", output.ndim())] =
        call.inputs[1].ndim() ? call.inputs[1].sizes[0] : 1;
  return {output};
}

Strategies gather(const OpCall& call) {
  check_choice(call);
  return along_other_dims(call);
}

// Reduces rows of `source` into `self`, at the positions that `index` gives along `dim`.
Strategies index_reduce(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim();
  if (ndim == 0) return {};
  const int64_t dim = call.dim("dim", ndim);
  Strategies ways;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != dim) ways.push_back({{Shard{d}, Replicate{}, Shard{d}}, {Shard{d}}});
  }
  return ways;
}

// Adds rows of `source` to `self`, at the positions that `index` gives along `dim`.
Strategies index_add(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim(), dim = call.dim("dim", ndim);
  Strategies ways = index_reduce(call);
  ways.push_back({{kSum, Replicate{}, kSum}, {kSum}});
  if (ndim > 0 && call.inputs[1].ndim() > 0 && call.inputs[2].ndim() == ndim)
    ways.push_back({{kSum, Shard{0}, Shard{dim}}, {kSum}});
  return ways;
}

// `self[indices]`: the indexed dims are replaced by the dims that the indices broadcast to, in
// place of the first of them if they are adjacent, else in front of all dims.
struct Indexing {
  explicit Indexing(const OpCall& call) {
    const auto list = call.argument("indices").toListRef();
    for (size_t d = 0; d < list.size(); ++d) {
      if (!list[d].isTensor() || !list[d].toTensor().defined()) continue;
      has_flags |= !c10::isIntegralType(list[d].toTensor().scalar_type(), /*includeBool=*/false) ||
                   list[d].toTensor().scalar_type() == c10::ScalarType::Byte;
      indexed.push_back(static_cast<int64_t>(d));
    }
    for (size_t i = 1; i <= indexed.size(); ++i) added = std::max(added, call.inputs[i].ndim());
    const bool are_neighbors =
        !indexed.empty() && indexed.back() - indexed.front() + 1 == std::ssize(indexed);
    first = are_neighbors ? indexed.front() : 0;
  }

  bool is_indexed(int64_t dim) const { return std::ranges::find(indexed, dim) != indexed.end(); }

  // Returns the position in the result of dim `dim` of `self`. Requires that it is not indexed.
  int64_t place_of(int64_t dim) const {
    const auto before =
        std::ranges::count_if(indexed, [dim](int64_t other) { return other < dim; });
    const int64_t place = dim - before;
    return place >= first ? place + added : place;
  }

  std::vector<int64_t> indexed;
  int64_t added = 0;       // dims that the indices broadcast to
  int64_t first = 0;       // their position in the result
  bool has_flags = false;  // true if an index is a mask: the result's size depends on data
};

Strategies index(const OpCall& call) {
  const Indexing indexing(call);
  const TensorInfo& output = call.outputs[0];
  Strategies ways;
  if (indexing.has_flags) return ways;
  for (int64_t d = 0; d < call.inputs[0].ndim(); ++d) {
    if (!indexing.is_indexed(d))
      ways.push_back({first_placed(call, Shard{d}), {Shard{indexing.place_of(d)}}});
  }
  const TensorInfo places{{output.sizes.begin() + indexing.first,
                           output.sizes.begin() + indexing.first + indexing.added}};
  for (int64_t d = 0; d < indexing.added; ++d) {
    Strategy way{{Replicate{}}, {Shard{indexing.first + d}}};
    for (size_t i = 1; i < call.inputs.size(); ++i)
      way.inputs.push_back(placed_under(call.inputs[i], d, places));
    ways.push_back(std::move(way));
  }
  ways.push_back({first_placed(call, kSum), {kSum}});
  return ways;
}

// The values broadcast to `self[indices]`.
Strategies index_put(const OpCall& call) {
  const Indexing indexing(call);
  Strategies ways;
  if (indexing.has_flags) return ways;
  const TensorInfo& self = call.inputs[0];
  TensorInfo chosen;
  chosen.sizes.assign(self.ndim() - std::ssize(indexing.indexed) + indexing.added, -1);
  for (int64_t d = 0; d < self.ndim(); ++d) {
    if (!indexing.is_indexed(d)) chosen.sizes[indexing.place_of(d)] = self.sizes[d];
  }
  for (int64_t d = 0; d < self.ndim(); ++d) {
    if (indexing.is_indexed(d)) continue;
    Strategy way{first_placed(call, Shard{d}), {Shard{d}}};
    way.inputs.back() = placed_under(call.inputs.back(), indexing.place_of(d), chosen);
    ways.push_back(std::move(way));
  }
  return ways;
}

// Fills rows at the positions that `index` gives along `dim` with one value.
Strategies index_fill(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim();
  if (ndim == 0) return {};
  const int64_t dim = call.dim("dim", ndim);
  Strategies ways;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != dim) ways.push_back({first_placed(call, Shard{d}), {Shard{d}}});
  }
  return ways;
}

// Each value is looked up by itself; every rank has all boundaries.
Strategies bucketize(const OpCall& call) {
  Strategies ways;
  for (int64_t d = 0; d < call.inputs[0].ndim(); ++d)
    ways.push_back({{Shard{d}, Replicate{}}, {Shard{d}}});
  return ways;
}

// A sequence of one dim is that of all values; otherwise each row of values has its own.
Strategies searchsorted(const OpCall& call) {
  const int sequence = call.input("sorted_sequence");
  const int values = call.argument("self").isTensor() ? call.input("self") : -1;
  Strategies ways;
  if (values < 0) return ways;
  const bool is_shared = call.inputs[sequence].ndim() == 1;
  const int64_t ndim = call.inputs[values].ndim();
  for (int64_t d = 0; d < ndim - (is_shared ? 0 : 1); ++d) {
    const Placement own = is_shared ? Placement(Replicate{}) : Shard{d};
    ways.push_back(
        {placed_by_name(call, {{"self", Shard{d}}, {"sorted_sequence", own}, {"sorter", own}}),
         {Shard{d}}});
  }
  return ways;
}

std::vector<TensorInfo> like_values(const OpCall& call) {
  return {call.argument("self").isTensor() ? call.inputs[call.input("self")] : TensorInfo{}};
}

constexpr auto kIndexingRules = with_splits({
    {"gather", gather, like_second},
    {"scatter", along_other_dims, like_first},
    {"scatter_", along_other_dims, like_first},
    {"scatter_add", along_other_dims, like_first},
    {"scatter_add_", along_other_dims, like_first},
    {"scatter_reduce", along_other_dims, like_first},
    {"scatter_reduce_", along_other_dims, like_first},
    {"index_select", index_select, index_select_sizes},
    {"index_add", index_add, like_first},
    {"index_add_", index_add, like_first},
    {"index_fill", index_fill, like_first},
    {"index_fill_", index_fill, like_first},
    {"index_reduce", index_reduce, like_first},
    {"index_reduce_", index_reduce, like_first},
    {"bucketize.Tensor", bucketize, like_first},
    {"searchsorted", searchsorted, like_values},
    {"index", index},
    {"index_put", index_put, like_first},
    {"index_put_", index_put, like_first},
    {"_index_put_impl", index_put, like_first},
    {"_index_put_impl_", index_put, like_first},
});

}  // namespace

std::span<const RuleEntry> indexing_rules() { return kIndexingRules; }

}  // namespace tessera
