#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "mesh/dist_meta.h"

namespace tessera {

// [Note: The last gather is kept]
//
// The layers that read one activation, such as those of q, k and v, each need it whole where it is
// cut along the sequence. So the part that an operator gathered is kept until an operator gathers
// another one: as many bytes as one gathered activation. In backward the gradients of the weights
// read it again, one after another, and the gradient of a product is read twice, once transposed.
//
// Ranks must agree on which gathers are done. A tensor is therefore known by its family, offset,
// sizes and version, which are global, and not by memory, which some ranks may have to copy. Only
// results of operators are kept, whose memory nobody else writes to: after `to_local()` a family is
// not kept any more.

/// Returns an id for a tensor that an operator made.
int64_t new_family();

/// Must be called when the memory of `meta` is shown to the user.
void show_family(const DistMeta& meta);

/// Returns the part that an earlier operator gathered; nullopt if it is not kept.
std::optional<at::Tensor> find_kept_gather(const at::Tensor& tensor, const DistMeta& meta,
                                           const DistSpecPtr& wanted);

/// Keeps `part`, if it was gathered.
void keep_gather(const at::Tensor& tensor, const DistMeta& meta, const DistSpecPtr& wanted,
                 const at::Tensor& part);

/// True if a change from the placements `from` to `to` moves shards: by an all-gather, or by an
/// all-to-all.
bool moves_shards(const Placements& from, const Placements& to);

}  // namespace tessera
