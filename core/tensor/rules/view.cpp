#include <c10/core/WrapDimMinimal.h>

#include <algorithm>

#include "tensor/rules.h"

namespace tessera {
namespace {

// Operators that move elements without changing them.

// For a tensor whose dim d becomes dim `to[d]` of every output; -1: the dim does not survive.
Strategies moved_dims(const OpCall& call, const std::vector<int64_t>& to) {
  Strategies ways;
  for (size_t d = 0; d < to.size(); ++d) {
    if (to[d] < 0) continue;
    ways.push_back(
        {{Shard{static_cast<int64_t>(d)}}, Placements(call.outputs.size(), Shard{to[d]})});
  }
  add_pending(ways, call);
  return ways;
}

std::vector<int64_t> same_dims(int64_t ndim) {
  std::vector<int64_t> to(ndim);
  for (int64_t d = 0; d < ndim; ++d) to[d] = d;
  return to;
}

Strategies transpose(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim();
  auto to = same_dims(ndim);
  if (ndim > 0) std::swap(to[call.dim("dim0", ndim)], to[call.dim("dim1", ndim)]);
  return moved_dims(call, to);
}

Strategies t(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim();
  return moved_dims(call, ndim == 2 ? std::vector<int64_t>{1, 0} : same_dims(ndim));
}

Strategies permute(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim();
  const auto dims = call.argument("dims").toIntVector();
  std::vector<int64_t> to(ndim);
  for (int64_t d = 0; d < ndim; ++d) to[c10::maybe_wrap_dim(dims[d], ndim)] = d;
  return moved_dims(call, to);
}

Strategies unsqueeze(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim(), added = call.dim("dim", ndim + 1);
  auto to = same_dims(ndim);
  for (int64_t& d : to) d += d >= added;
  return moved_dims(call, to);
}

// Removes those of the named dims that have one element.
Strategies squeeze(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim();
  auto to = same_dims(ndim);
  for (const int64_t dim : named_dims(call.find("dim"), ndim, /*empty_is_all=*/false)) {
    if (call.inputs[0].sizes[dim] == 1) to[dim] = -1;
  }
  int64_t next = 0;
  for (int64_t& d : to) d = d < 0 ? d : next++;
  return moved_dims(call, to);
}

// A dim of (f, h, rest) elements that is split by f is placed as the dim of h elements that is cut.
// Calls `way(d, e, f)` for each such dim d of `merged` and e of `parted`.
template <class Way>
void each_split(const std::vector<int64_t>& merged, const std::vector<int64_t>& parted, Way way) {
  int64_t before_d = 1;
  for (size_t d = 0; d < merged.size(); before_d *= merged[d++]) {
    int64_t before_e = 1;
    for (size_t e = 0; e < parted.size(); before_e *= parted[e++]) {
      const int64_t factor = before_d == 0 ? 0 : before_e / before_d;
      if (factor <= 1 || factor * before_d != before_e || parted[e] <= 1) continue;
      if (merged[d] > 0 && merged[d] % (factor * parted[e]) == 0)
        way(static_cast<int64_t>(d), static_cast<int64_t>(e), factor);
    }
  }
}

// A dim survives if it has the same size in both and the same number of elements before it; so does
// the first of several dims that are merged, or that one is split into, if its elements divide
// evenly: also with a split factor, if the blocks do. See `each_split()` for the inner ones. Among
// dims of one element (the first rank has it), the n-th with so many elements before survives as
// the n-th.
Strategies view(const OpCall& call) {
  const auto &in = call.inputs[0].sizes, &out = call.outputs[0].sizes;
  std::vector<int64_t> to(in.size(), -1);
  int64_t before_in = 1;
  for (size_t d = 0; d < in.size(); before_in *= in[d++]) {
    int64_t before_out = 1;
    for (size_t e = 0; e < out.size(); before_out *= out[e++]) {
      if (before_in != before_out || in[d] == 0 || out[e] == 0) continue;
      if (in[d] == 1 || out[e] == 1) {
        const bool is_free = std::ranges::find(to, static_cast<int64_t>(e)) == to.end();
        if (in[d] == out[e] && to[d] < 0 && is_free) to[d] = static_cast<int64_t>(e);
        continue;
      }
      const bool divides = in[d] % call.ranks == 0 && out[e] % call.ranks == 0;
      if (in[d] == out[e] || divides) to[d] = static_cast<int64_t>(e);
    }
  }
  Strategies ways = moved_dims(call, to);
  each_split(in, out, [&](int64_t d, int64_t e, int64_t factor) {
    ways.push_back({{Shard{d, factor}}, {Shard{e}}});
  });
  each_split(out, in, [&](int64_t d, int64_t e, int64_t factor) {
    ways.push_back({{Shard{e}}, {Shard{d, factor}}});
  });
  return ways;
}

// The bytes seen as elements of another dtype: if its size differs, the last dim has more or fewer
// elements. Terms of a reduction are no terms when they are seen as another dtype.
Strategies view_as_dtype(const OpCall& call) {
  const c10::ScalarType from = call.inputs[0].dtype, to = call.argument("dtype").toScalarType();
  Strategies ways;
  const bool is_same_size = c10::elementSize(from) == c10::elementSize(to);
  const int64_t kept = call.inputs[0].ndim() - (is_same_size ? 0 : 1);
  for (int64_t d = 0; d < kept; ++d) ways.push_back({{Shard{d}}, {Shard{d}}});
  if (from == to) add_pending(ways, call);
  return ways;
}

Strategies expand(const OpCall& call) {
  const auto &in = call.inputs[0].sizes, &out = call.outputs[0].sizes;
  std::vector<int64_t> to(in.size(), -1);
  const size_t added = out.size() - in.size();
  for (size_t d = 0; d < in.size(); ++d) {
    if (in[d] == out[d + added]) to[d] = static_cast<int64_t>(d + added);
  }
  return moved_dims(call, to);
}

// Needs all elements along `dims`; the other dims stay.
Strategies along_dims(const OpCall& call, const std::vector<int64_t>& dims) {
  const int64_t ndim = call.inputs[0].ndim();
  if (ndim == 0) return {};  // a scalar has no dims, but takes 0 and -1
  auto to = same_dims(ndim);
  for (const int64_t dim : dims) to[c10::maybe_wrap_dim(dim, ndim)] = -1;
  return moved_dims(call, to);
}

Strategies along_dim(const OpCall& call) {
  return along_dims(call, {call.dim("dim", call.inputs[0].ndim())});
}

Strategies select(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim(), dim = call.dim("dim", ndim);
  auto to = same_dims(ndim);
  for (int64_t& d : to) d = d == dim ? -1 : d - (d > dim);
  return moved_dims(call, to);
}

// The gradient of `slice` or `select`: zeros around the part that was cut out.
Strategies padded(const OpCall& call) {
  const int64_t ndim = call.outputs[0].ndim(), dim = call.dim("dim", ndim);
  const bool is_select = call.inputs[0].ndim() < ndim;
  Strategies ways;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d == dim) continue;
    ways.push_back({{Shard{d - (is_select && d > dim)}}, {Shard{d}}});
  }
  ways.push_back({{Partial{}}, {Partial{}}});
  return ways;
}

Strategies cat(const OpCall& call) {
  const int64_t ndim = call.outputs[0].ndim(), dim = call.dim("dim", ndim);
  const bool is_stack = call.schema.name() == "aten::stack";
  Strategies ways;
  const bool equal = std::ranges::all_of(call.inputs, [&](const TensorInfo& input) {
    return input.ndim() == call.inputs[0].ndim();  // `cat` skips empty tensors of one dim
  });
  for (int64_t d = 0; equal && d < ndim; ++d) {
    if (d == dim) continue;
    ways.push_back({Placements(call.inputs.size(), Shard{d - (is_stack && d > dim)}), {Shard{d}}});
  }
  add_pending(ways, call);
  return ways;
}

// The elements whose indices along two dims differ by an offset, as a last dim.
struct Diagonal {
  Diagonal(const OpCall& call, int64_t of_ndim)
      : ndim(of_ndim), dim1(call.dim("dim1", ndim)), dim2(call.dim("dim2", ndim)) {}
  bool has(int64_t dim) const { return dim == dim1 || dim == dim2; }
  // Returns the dim of the diagonals for dim `dim` of the matrices. Requires `!has(dim)`.
  int64_t place_of(int64_t dim) const { return dim - (dim > dim1) - (dim > dim2); }
  int64_t ndim, dim1, dim2;
};

Strategies diagonal(const OpCall& call) {
  const Diagonal diagonal(call, call.inputs[0].ndim());
  std::vector<int64_t> to(diagonal.ndim, -1);
  for (int64_t d = 0; d < diagonal.ndim; ++d) {
    if (!diagonal.has(d)) to[d] = diagonal.place_of(d);
  }
  return moved_dims(call, to);
}

// Puts a diagonal into matrices, of zeros or those of `self`.
Strategies diagonal_into(const OpCall& call) {
  const Diagonal diagonal(call, call.outputs[0].ndim());
  Strategies ways;
  for (int64_t d = 0; d < diagonal.ndim; ++d) {
    if (diagonal.has(d)) continue;
    const Shard of_diagonal{diagonal.place_of(d)};
    ways.push_back(
        {call.inputs.size() == 1 ? Placements{of_diagonal} : Placements{Shard{d}, of_diagonal},
         {Shard{d}}});
  }
  add_sums(ways, call);
  return ways;
}

// `self` with `src` in place of a part of it.
Strategies scattered(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim(), dim = call.dim("dim", ndim);
  const bool is_select = call.inputs[1].ndim() < ndim;
  Strategies ways;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != dim) ways.push_back({{Shard{d}, Shard{d - (is_select && d > dim)}}, {Shard{d}}});
  }
  add_sums(ways, call);
  return ways;
}

// Windows along a dim, as a last dim.
Strategies unfold(const OpCall& call) {
  return along_dims(call, {call.dim("dimension", call.inputs[0].ndim())});
}

// Elements that are in several windows are added up.
Strategies unfold_backward(const OpCall& call) {
  const int64_t ndim = call.outputs[0].ndim();
  Strategies ways;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != call.dim("dim", ndim)) ways.push_back({{Shard{d}}, {Shard{d}}});
  }
  add_sums(ways, call);
  return ways;
}

// Complex numbers seen as pairs of real ones, pairs as complex numbers, or conjugated.
Strategies complex_view(const OpCall& call) {
  const int64_t ndim = std::min(call.inputs[0].ndim(), call.outputs[0].ndim());
  Strategies ways;
  for (int64_t d = 0; d < ndim; ++d) ways.push_back({{Shard{d}}, {Shard{d}}});
  add_sums(ways, call);
  return ways;
}

// `size` is that of the local part, whose layout may not allow a view.
void local_view_copy(const c10::OperatorHandle& op, const std::vector<LocalPart>&,
                     torch::jit::Stack& stack) {
  const at::Tensor part = stack[0].toTensor();
  const auto sizes = stack[*op.schema().argumentIndexWithName("size")].toIntVector();
  stack = {part.reshape(sizes).clone()};
}

std::vector<TensorInfo> padded_sizes(const OpCall& call) {
  return {{call.argument("input_sizes").toIntVector()}};
}

Strategies flip(const OpCall& call) {
  return along_dims(call, call.argument("dims").toIntVector());
}

// Without dims, the elements roll as one row.
Strategies roll(const OpCall& call) {
  return along_dims(call, named_dims(call.find("dims"), call.inputs[0].ndim()));
}

// The last two dims are a matrix.
Strategies triangle(const OpCall& call) { return along_dims(call, {-2, -1}); }

std::vector<TensorInfo> padded_on_sides(const OpCall& call) {
  return surrounded_sizes(call, "pad");
}

Strategies pad(const OpCall& call) {
  const auto pad = call.argument("pad").toIntVector();
  Strategies ways;
  for (int64_t d = 0; d < call.inputs[0].ndim(); ++d) {
    const size_t before = 2 * (call.inputs[0].ndim() - 1 - d);
    const bool is_padded = before < pad.size() && (pad[before] != 0 || pad[before + 1] != 0);
    if (!is_padded) ways.push_back({{Shard{d}}, {Shard{d}}});
  }
  return ways;
}

// The output has a dim for each repetition, before those of the input if there are more.
Strategies repeat(const OpCall& call) {
  const auto repeats = call.argument("repeats").toIntVector();
  const auto ndim = call.inputs[0].ndim();
  const auto added = static_cast<int64_t>(repeats.size()) - ndim;
  std::vector<int64_t> to(ndim, -1);
  for (int64_t d = 0; d < ndim; ++d) {
    if (repeats[d + added] == 1) to[d] = d + added;
  }
  return moved_dims(call, to);
}

std::vector<TensorInfo> repeated_sizes(const OpCall& call) {
  TensorInfo output{call.argument("repeats").toIntVector()};
  const int64_t added = output.ndim() - call.inputs[0].ndim();
  for (int64_t d = 0; d < call.inputs[0].ndim(); ++d)
    output.sizes[d + added] *= call.inputs[0].sizes[d];
  return {output};
}

constexpr auto kViewRules = with_splits({
    {"flip", flip, like_first},
    {"roll", roll, like_first},
    {"tril", triangle, like_first},
    {"tril_", triangle, like_first},
    {"triu", triangle, like_first},
    {"triu_", triangle, like_first},
    {"constant_pad_nd", pad, padded_on_sides},
    {"repeat", repeat, repeated_sizes},
    {"t", t},
    {"transpose", transpose},
    {"permute", permute},
    {"unsqueeze", unsqueeze},
    {.name = "squeeze", .rule = squeeze, .reshapes = true},
    {.name = "view", .rule = view, .reshapes = true},
    {.name = "_unsafe_view", .rule = view, .reshapes = true},
    {.name = "_reshape_alias", .rule = view, .reshapes = true},
    {"view.dtype", view_as_dtype},
    {"expand", expand, nullptr, "size"},
    {"slice", along_dim},
    {"select", select},
    {"split", along_dim},
    {"split_with_sizes", along_dim},
    {"unbind", select},
    {"narrow", along_dim},
    {"unsafe_split", along_dim},
    {"unsafe_split_with_sizes", along_dim},
    {"split_with_sizes_copy", along_dim},
    {.name = "view_copy", .rule = view, .size_argument = "size", .local = local_view_copy},
    {"view_copy.dtype", view_as_dtype},
    {"expand_copy", expand, nullptr, "size"},
    {"view_as_real", complex_view},
    {"view_as_complex", complex_view},
    {"_conj", complex_view},
    {"_neg_view", complex_view},
    {"diagonal", diagonal},
    {"diagonal_copy", diagonal},
    {"diagonal_scatter", diagonal_into, like_first},
    {"diagonal_backward", diagonal_into, padded_sizes, "input_sizes"},
    {"diag_embed", diagonal_into},
    {"select_scatter", scattered, like_first},
    {"slice_scatter", scattered, like_first},
    {"unfold", unfold},
    {"unfold_backward", unfold_backward, padded_sizes, "input_sizes"},
    {"cat", cat},
    {"stack", cat},
    {"slice_backward", padded, padded_sizes, "input_sizes"},
    {"select_backward", padded, padded_sizes, "input_sizes"},
});

}  // namespace

std::span<const RuleEntry> view_rules() { return kViewRules; }

}  // namespace tessera
