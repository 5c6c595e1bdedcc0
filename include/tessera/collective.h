#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/export.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera {

/// The streams of collectives that must not block each other. Collectives of one channel are issued
/// in the same order by all ranks; nothing is assumed between channels.
enum class Channel : uint8_t { kParams, kGrads, kControl };

/// The purpose of a collective: shown in errors and traces, and part of what ranks compare, so that
/// ranks that issue collectives in different orders get an error and never another tensor's values:
/// at once over the arena and c10d backends on the CPU, by the timeout over Gloo. (NCCL compares
/// nothing.)
struct CollectiveTag {
  std::string_view subject;  ///< for example the name of the unit; must outlive the `Work`
  Channel channel = Channel::kControl;
};

/// A contiguous range of a flat buffer and the tensor that holds it.
struct Piece {
  int64_t begin = 0;  ///< offset of the first element in the flat buffer
  at::Tensor data;    ///< 1-D and contiguous; an undefined tensor stands for `numel` zeros
  int64_t numel = 0;
};

struct ReduceScatterOptions {
  double scale = 1.0;       ///< the sum over ranks is multiplied by this before it is stored
  bool accumulate = false;  ///< add to the values of `out` instead of overwriting them
  /// Dtype of the pieces, and so of the messages; none: that of `out`. Float may go with an `out`
  /// of bfloat16 or half and the other way round: sums are taken in float and rounded once.
  std::optional<at::ScalarType> dtype = std::nullopt;
};

enum class ReduceOp : uint8_t { kSum, kMax, kMin };

/// The arguments of each collective of `ProcessGroup`, whose methods say what they mean.
struct AllGather {
  static constexpr const char* kName = "all_gather";
  at::Tensor flat, shard;
  std::span<const int64_t> bounds;
};
struct ReduceScatter {
  static constexpr const char* kName = "reduce_scatter";
  at::Tensor out;
  std::vector<Piece> pieces;
  std::span<const int64_t> bounds;
  ReduceScatterOptions options;

  /// Dtype of the messages.
  at::ScalarType dtype() const { return options.dtype.value_or(out.scalar_type()); }
};
struct AllReduce {
  static constexpr const char* kName = "all_reduce";
  at::Tensor tensor;
  ReduceOp op = ReduceOp::kSum;
};
struct Broadcast {
  static constexpr const char* kName = "broadcast";
  at::Tensor tensor;
  int root = 0;
};
struct AllToAll {
  static constexpr const char* kName = "all_to_all";
  std::vector<at::Tensor> from, to;
};
struct Barrier {
  static constexpr const char* kName = "barrier";
};

/// One call of a collective: what a process group checks, counts, and hands to its transport.
struct TESSERA_API Collective {
  CollectiveTag tag;
  std::variant<AllGather, ReduceScatter, AllReduce, Broadcast, AllToAll, Barrier> call;

  /// "all_gather", "reduce_scatter", ...
  const char* name() const;
  /// Size of the whole buffer; of an all-to-all, of all `to`; of a barrier, 0.
  int64_t nbytes() const;
};

}  // namespace tessera
