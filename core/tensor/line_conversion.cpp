#include "tensor/line_conversion.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <vector>

#include "tensor/chunks.h"

namespace tessera {
namespace {

at::Tensor flat(const at::Tensor& tensor) { return tensor.contiguous().view(-1); }

at::Tensor part_along(const at::Tensor& tensor, int64_t dim, int64_t parts, int64_t index) {
  const Range range = chunk(tensor.size(dim), parts, index);
  return tensor.narrow(dim, range.begin, range.size());
}

std::vector<int64_t> part_sizes(at::IntArrayRef sizes, int64_t dim, int64_t parts, int64_t index) {
  std::vector<int64_t> result = sizes.vec();
  result[dim] = chunk(sizes[dim], parts, index).size();
  return result;
}

// Bounds of the parts of all ranks along `dim` in a flat buffer, one after the other.
std::vector<int64_t> flat_bounds(at::IntArrayRef sizes, int64_t dim, int64_t parts) {
  std::vector<int64_t> bounds{0};
  for (int64_t r = 0; r < parts; ++r)
    bounds.push_back(bounds.back() + c10::multiply_integers(part_sizes(sizes, dim, parts, r)));
  return bounds;
}

// True if parts along `dim` are contiguous in the whole.
bool is_outermost(at::IntArrayRef sizes, int64_t dim) {
  return std::all_of(sizes.begin(), sizes.begin() + dim, [](int64_t size) { return size == 1; });
}

class Conversion {
 public:
  Conversion(ProcessGroup& line, const at::Tensor& local, at::IntArrayRef sizes,
             const CollectiveTag& tag)
      : line_(line), local_(local), sizes_(sizes), tag_(tag) {}

  at::Tensor gather(int64_t dim) const {
    const auto bounds = flat_bounds(sizes_, dim, line_.size());
    const at::Tensor all = at::empty({bounds.back()}, local_.options());
    const auto work = line_.all_gather(all, flat(local_), bounds, tag_);
    work->wait();
    work->wait_inputs();
    if (is_outermost(sizes_, dim)) return all.view(sizes_);
    std::vector<at::Tensor> parts;
    for (int r = 0; r < line_.size(); ++r)
      parts.push_back(all.narrow(0, bounds[r], bounds[r + 1] - bounds[r])
                          .view(part_sizes(sizes_, dim, line_.size(), r)));
    return at::cat(parts, dim);
  }

  at::Tensor slice(int64_t dim) const {
    return part_along(local_, dim, line_.size(), line_.rank());
  }

  // Reduces one term per rank to the whole.
  at::Tensor all_reduce(PartialOp op) const {
    if (op == PartialOp::kProd)
      return combine(receive_terms(sizes_, std::vector<at::Tensor>(line_.size(), flat(local_))),
                     op);
    at::Tensor whole = local_.clone(at::MemoryFormat::Contiguous);
    line_.all_reduce(whole, reduce_op(op), tag_)->wait();
    return op == PartialOp::kAvg ? average(whole) : whole;
  }

  // Reduces one term per rank to this rank's part of the whole.
  at::Tensor reduce_scatter(PartialOp op, int64_t dim) const {
    const auto own = part_sizes(sizes_, dim, line_.size(), line_.rank());
    if (op != PartialOp::kSum && op != PartialOp::kAvg)
      return combine(receive_terms(own, parts_along(dim)), op);
    const auto bounds = flat_bounds(sizes_, dim, line_.size());
    std::vector<Piece> pieces;
    if (is_outermost(sizes_, dim)) {
      pieces.push_back({0, flat(local_), bounds.back()});
    } else {
      for (int r = 0; r < line_.size(); ++r)
        pieces.push_back(
            {bounds[r], flat(part_along(local_, dim, line_.size(), r)), bounds[r + 1] - bounds[r]});
    }
    const at::Tensor part = at::empty(own, local_.options());
    const auto work = line_.reduce_scatter(part.view(-1), std::move(pieces), bounds, {}, tag_);
    work->wait();
    return op == PartialOp::kAvg ? average(part) : part;
  }

  at::Tensor change_dim(int64_t from, int64_t to) const {
    std::vector<at::Tensor> received;
    const auto own = part_sizes(sizes_, to, line_.size(), line_.rank());
    for (int r = 0; r < line_.size(); ++r)
      received.push_back(at::empty(part_sizes(own, from, line_.size(), r), local_.options()));
    exchange(received, parts_along(to));
    return at::cat(received, from);
  }

  // Returns this rank's term; the terms of all ranks reduce to `local_`. All of them have `local_`.
  at::Tensor term(PartialOp op) const {
    const bool is_sum = op == PartialOp::kSum || op == PartialOp::kNorm;
    // Reduced with itself, a value of other operators stays the same.
    if (line_.rank() == 0 || !(is_sum || op == PartialOp::kProd)) return local_;
    const at::Tensor term = is_sum ? at::zeros_like(local_) : at::ones_like(local_);
    if (local_.unsafeGetTensorImpl()->is_wrapped_number())  // results have the dtypes of rank 0's
      term.unsafeGetTensorImpl()->set_wrapped_number(true);
    return term;
  }

  // This rank's part, padded with zeros: the sum of such terms is the whole, and so is their norm.
  at::Tensor padded(int64_t dim) const {
    const at::Tensor whole = at::zeros(sizes_, local_.options());
    part_along(whole, dim, line_.size(), line_.rank()).copy_(local_);
    return whole;
  }

 private:
  static ReduceOp reduce_op(PartialOp op) {
    if (op == PartialOp::kMax || op == PartialOp::kAny) return ReduceOp::kMax;
    return op == PartialOp::kMin || op == PartialOp::kAll ? ReduceOp::kMin : ReduceOp::kSum;
  }

  at::Tensor average(at::Tensor sum) const {
    TORCH_CHECK_VALUE(
        sum.is_floating_point() || sum.is_complex(),
        "[redistribute] a tensor with placement Partial(avg) must have a floating dtype; got ",
        sum.scalar_type());
    return sum.div_(static_cast<double>(line_.size()));
  }

  void exchange(const std::vector<at::Tensor>& received, std::vector<at::Tensor> sent) const {
    std::vector<at::Tensor> into;
    for (const at::Tensor& tensor : received) into.push_back(tensor.view(-1));
    const auto work = line_.all_to_all(std::move(into), std::move(sent), tag_);
    work->wait();
    work->wait_inputs();
  }

  // The part for each rank if the tensor is cut along `dim`.
  std::vector<at::Tensor> parts_along(int64_t dim) const {
    std::vector<at::Tensor> parts;
    for (int r = 0; r < line_.size(); ++r)
      parts.push_back(flat(part_along(local_, dim, line_.size(), r)));
    return parts;
  }

  // Receives every rank's term of this rank's result of these sizes.
  std::vector<at::Tensor> receive_terms(at::IntArrayRef sizes, std::vector<at::Tensor> sent) const {
    std::vector<at::Tensor> terms;
    for (int r = 0; r < line_.size(); ++r) terms.push_back(at::empty(sizes, local_.options()));
    exchange(terms, std::move(sent));
    return terms;
  }

  static at::Tensor combine(const at::Tensor& a, const at::Tensor& b, PartialOp op) {
    if (op == PartialOp::kMax) return at::maximum(a, b);
    if (op == PartialOp::kMin) return at::minimum(a, b);
    if (op == PartialOp::kAny) return at::logical_or(a, b).to(a.scalar_type());
    if (op == PartialOp::kAll) return at::logical_and(a, b).to(a.scalar_type());
    return at::mul(a, b);
  }

  // Combines in rank order, so that all ranks get the same bits.
  static at::Tensor combine(const std::vector<at::Tensor>& terms, PartialOp op) {
    at::Tensor result = terms[0];
    for (size_t r = 1; r < terms.size(); ++r) result = combine(result, terms[r], op);
    return result;
  }

  ProcessGroup& line_;
  const at::Tensor& local_;
  at::IntArrayRef sizes_;
  CollectiveTag tag_;
};

bool ignores_zeros(PartialOp op) { return op == PartialOp::kSum || op == PartialOp::kNorm; }

// Squares that keep their sign, so that a value among zeros is restored as it was. In double: the
// square of an ordinary float may be too large for a float.
at::Tensor signed_squares(const at::Tensor& terms) {
  TORCH_CHECK_VALUE(
      terms.is_floating_point(),
      "[redistribute] a tensor with placement Partial(norm) must have a floating dtype; got ",
      terms.scalar_type());
  const at::Tensor wide = terms.to(at::kDouble);
  return wide.mul(wide.abs());
}

at::Tensor signed_roots(const at::Tensor& squares, at::ScalarType dtype) {
  return squares.sign().mul(squares.abs().sqrt()).to(dtype);
}

// For placements that aren't split.
at::Tensor convert_plain(ProcessGroup& line, const at::Tensor& local, const Placement& from,
                         const Placement& to, at::IntArrayRef sizes, const CollectiveTag& tag) {
  if (from == to) return local;
  const Conversion conversion(line, local, sizes, tag);
  const auto* const shard = std::get_if<Shard>(&to);
  const auto* const partial = std::get_if<Partial>(&to);
  if (const auto* const source = std::get_if<Shard>(&from)) {
    if (shard) return conversion.change_dim(source->dim, shard->dim);
    if (partial && ignores_zeros(partial->op)) return conversion.padded(source->dim);
    const at::Tensor whole = conversion.gather(source->dim);
    return partial ? convert_plain(line, whole, Replicate{}, to, sizes, tag) : whole;
  }
  if (const auto* const source = std::get_if<Partial>(&from)) {
    if (source->op == PartialOp::kNorm && !partial) {
      const at::Tensor squares = signed_squares(local);
      return signed_roots(convert_plain(line, squares, Partial{}, to, sizes, tag),
                          local.scalar_type());
    }
    if (partial)
      return convert_plain(line, convert_plain(line, local, from, Replicate{}, sizes, tag),
                           Replicate{}, to, sizes, tag);
    if (shard) return conversion.reduce_scatter(source->op, shard->dim);
    return conversion.all_reduce(source->op);
  }
  return shard ? conversion.slice(shard->dim) : conversion.term(partial->op);
}

}  // namespace

at::Tensor convert_along(ProcessGroup& line, const at::Tensor& local, const Placement& from,
                         const Placement& to, at::IntArrayRef sizes, const CollectiveTag& tag) {
  if (!is_split(from) && !is_split(to)) return convert_plain(line, local, from, to, sizes, tag);
  if (from == to) return local;
  if (is_shard(from) && is_shard(to, std::get<Shard>(from).dim)) {
    const at::Tensor whole = convert_along(line, local, from, Replicate{}, sizes, tag);
    return convert_along(line, whole, Replicate{}, to, sizes, tag);
  }
  if (is_replicate(from))
    return part_of_blocks(local, std::get<Shard>(to), line.size(), line.rank())
        .flatten(std::get<Shard>(to).dim, std::get<Shard>(to).dim + 1);
  at::Tensor part = local;
  if (is_split(to)) part = in_order_of_ranks(part, std::get<Shard>(to), line.size());
  const Placements plain = without_splits({from, to});
  part = convert_plain(line, part, plain[0], plain[1], sizes, tag);
  return is_split(from) ? in_own_order(part, std::get<Shard>(from), line.size()) : part;
}

double conversion_cost(const Placement& from, const Placement& to, double nbytes, int64_t ranks) {
  constexpr double kMessageBytes = 4096;  // roughly the bytes sent in a message's latency
  const auto k = static_cast<double>(ranks);
  const double others = (k - 1) / k;
  if (from == to || is_replicate(from)) return 0;
  const bool is_same_dim = is_shard(from) && is_shard(to, std::get<Shard>(from).dim);
  if (is_shard(from) && is_shard(to) && !is_same_dim) return nbytes * others / k + kMessageBytes;
  const double once = nbytes * others + kMessageBytes;
  // A pending reduction in place of shards: nothing may be sent now, but the whole is sent later.
  if (is_partial(to)) return 2 * once + 1;
  return is_partial(from) && is_replicate(to) ? 2 * once : once;
}

}  // namespace tessera
