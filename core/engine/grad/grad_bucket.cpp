#include "engine/grad/grad_bucket.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace tessera {

// [Note: Layout of a bucket]
//
// A bucket is a flat buffer that is never allocated as a whole. Each rank's range of it consists of
// that rank's range of each unit, one after another, so that one reduce-scatter gives each rank its
// part of all units, side by side in one buffer. The units' reduced gradients are views of that
// buffer:
//
//   unit a |a0 a0 a0|a1 a1 a1|     unit b |b0 b0|b1 b1|     bucket |a0 a0 a0 b0 b0|a1 a1 a1 b1 b1|
//
// Rank r's range begins where the ranges of all ranks before it end: at the sum of the units' own
// bounds. The units' chunks are cut at those bounds, and the resulting pieces are sent: no gradient
// is copied to put it into a bucket. (Transports combine short pieces into one message.)
//
// Each element is summed in rank order, whichever collective carries it, so a bucket changes no
// bit. Which units share a bucket depends only on the order of reductions and the layouts, and
// which of them take part only on facts that all ranks have agreed on.
namespace {

int64_t sent_bytes(const UnitLayout& layout) {
  return layout.numel() * static_cast<int64_t>(c10::elementSize(layout.reduce_dtype));
}

bool can_share(const UnitLayout& a, const UnitLayout& b) {
  return a.reduce_dtype == b.reduce_dtype && a.reduce_encoding == b.reduce_encoding &&
         a.master_dtype == b.master_dtype && a.device == b.device;
}

bool is_frozen(const UnitLayout& layout) { return !layout.slots.front().requires_grad; }

const UnitLayout& layout_of(const UnitGradients* unit) { return unit->unit().layout(); }

std::vector<int64_t> bounds_of(const std::vector<UnitGradients*>& units) {
  std::vector<int64_t> bounds(layout_of(units[0]).bounds.size(), 0);
  for (const UnitGradients* unit : units) {
    for (size_t rank = 0; rank < bounds.size(); ++rank)
      bounds[rank] += layout_of(unit).bounds[rank];
  }
  return bounds;
}

// Appends the parts of a unit's pieces that lie in [begin, end) of the unit, a range that starts at
// `to` in the bucket.
void cut_pieces(const std::vector<Piece>& unit, int64_t begin, int64_t end, int64_t to,
                std::vector<Piece>& pieces) {
  for (const Piece& piece : unit) {
    const int64_t first = std::max(begin, piece.begin);
    const int64_t last = std::min(end, piece.begin + piece.numel);
    if (first >= last) continue;
    pieces.push_back({to + first - begin,
                      piece.data.defined() ? piece.data.narrow(0, first - piece.begin, last - first)
                                           : at::Tensor(),
                      last - first});
  }
}

std::vector<Piece> bucket_pieces(const std::vector<UnitGradients*>& units,
                                 const std::vector<std::vector<Piece>>& given, int ranks) {
  std::vector<Piece> pieces;
  int64_t to = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    for (size_t i = 0; i < units.size(); ++i) {
      const auto& bounds = layout_of(units[i]).bounds;
      cut_pieces(given[i], bounds[rank], bounds[rank + 1], to, pieces);
      to += bounds[rank + 1] - bounds[rank];
    }
  }
  return pieces;
}

// Returns the buffer in which an earlier reduction of the same units left their sums side by side;
// undefined if they do not lie side by side.
at::Tensor earlier_buffer(const std::vector<UnitGradients*>& units, int64_t numel) {
  const at::Tensor& first = units[0]->reduced();
  if (!first.defined()) return {};
  int64_t offset = first.storage_offset();
  for (const UnitGradients* unit : units) {
    const at::Tensor& reduced = unit->reduced();
    if (!unit->any_live() || !reduced.is_alias_of(first) || reduced.storage_offset() != offset)
      return {};
    offset += reduced.numel();
  }
  if (offset != first.storage_offset() + numel) return {};
  return at::as_strided(first, {numel}, {1}, first.storage_offset());
}

}  // namespace

std::vector<GradBucket> cut_buckets(const std::vector<const UnitLayout*>& units,
                                    const std::vector<int>& order, int64_t nbytes) {
  std::vector<GradBucket> buckets;
  GradBucket open;
  int64_t room = 0;
  const auto close = [&] {
    if (open.units.size() > 1)
      open.name += fmt::format(" and {} more units", open.units.size() - 1);
    if (!open.units.empty()) buckets.push_back(std::exchange(open, {}));
  };
  for (const int unit : order) {
    const UnitLayout& layout = *units[unit];
    // Units of other process groups are reduced by themselves, and frozen units are not reduced.
    if (is_frozen(layout) || layout.group != 0) {
      buckets.push_back({{static_cast<size_t>(unit)}, layout.name});
      continue;
    }
    if (open.units.empty() || nbytes == 0 || sent_bytes(layout) > room ||
        !can_share(layout, *units[open.units.front()])) {
      close();
      open.name = layout.name;
      room = nbytes;
    }
    open.units.push_back(unit);
    room -= sent_bytes(layout);
  }
  close();
  return buckets;
}

void BucketOrder::set(std::vector<int> order, const AllGradients& gradients, int64_t bucket_bytes) {
  units_ = std::move(order);
  std::vector<const UnitLayout*> layouts;
  for (const auto& unit : gradients) layouts.push_back(&unit->unit().layout());
  buckets_ = cut_buckets(layouts, units_, bucket_bytes);
  for (const GradBucket& bucket : buckets_) {
    int64_t nbytes = 0;
    for (const size_t unit : bucket.units) nbytes += layouts[unit]->nbytes();
    largest_ = std::max(largest_, nbytes);
  }
}

void launch_together(const std::vector<UnitGradients*>& units, std::string_view subject) {
  if (units.size() == 1) return units[0]->launch();
  at::NoGradGuard no_grad;
  const ShardMesh& mesh = units[0]->unit().mesh();
  const UnitLayout& layout = layout_of(units[0]);
  const std::vector<int64_t> bounds = bounds_of(units);
  const int rank = mesh.shard().rank();
  const int64_t numel = bounds[rank + 1] - bounds[rank];
  const bool has_earlier =
      std::any_of(units.begin(), units.end(), [](const auto* unit) { return unit->any_live(); });
  const bool apart = has_earlier && mesh.replicates();
  at::Tensor out = apart ? at::Tensor() : earlier_buffer(units, numel);
  if (!out.defined()) {
    out = memory_for_sums(layout, numel);
    if (has_earlier) out.zero_();
  }
  std::vector<std::vector<Piece>> given;
  int64_t begin = 0;
  for (UnitGradients* unit : units) {
    const int64_t part = layout_of(unit).shard_numel(rank);
    given.push_back(unit->launch_into(out.narrow(0, begin, part), apart));
    begin += part;
  }
  const auto reduction = std::make_shared<Reduction>(
      mesh, out, bucket_pieces(units, given, mesh.shard().size()), bounds,
      ReduceScatterOptions{.scale = units[0]->scale(),
                           .accumulate = has_earlier && !apart,
                           .dtype = layout.reduce_dtype,
                           .encoding = layout.reduce_encoding},
      subject);
  for (UnitGradients* unit : units) unit->follow(reduction);
}

}  // namespace tessera
