#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/export.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera {

/// Streams of collectives that must not block each other. All ranks issue the collectives of one
/// channel in the same order; nothing is assumed about the order between channels.
enum class Channel : uint8_t { kParams, kGrads, kControl };

/// The purpose of a collective, shown in errors and traces. Ranks compare it with the rest of the
/// call: ranks that issue collectives in different orders get an error and never another tensor's
/// values. The error comes at once over the arena and over c10d backends on the CPU, and after the
/// timeout over Gloo. (NCCL compares nothing.)
struct CollectiveTag {
  std::string_view subject;  ///< for example the name of the unit; must outlive the `Work`
  Channel channel = Channel::kControl;
  uint64_t identity = 0;  ///< distinguishes tensors with one subject; 0: there is one
};

/// The form in which floating-point elements are sent.
enum class Encoding : uint8_t {
  kPlain,     ///< as they are
  kBFloat16,  ///< rounded
  kHalf,      ///< rounded
  kInt8,      ///< blocks of 256 elements: a float scale, and an int8 for each
  kFloat8,    ///< with e4m3 for int8: finer near 0 and coarser near the block's maximum
};

/// A contiguous range of a flat buffer and the tensor that holds its values.
struct Piece {
  int64_t begin = 0;  ///< offset of the first element in the flat buffer
  at::Tensor data;    ///< 1-D and contiguous; an undefined tensor stands for `numel` zeros
  int64_t numel = 0;
};

struct ReduceScatterOptions {
  double scale = 1.0;       ///< the sum over ranks is multiplied by this before it is stored
  bool accumulate = false;  ///< add to the values of `out` instead of overwriting them
  /// Dtype of the pieces, and so of the messages; none: that of `out`. Float pieces may go with an
  /// `out` of bfloat16 or half, and the reverse: sums are taken in float and rounded once.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// Form of the messages. Ranks that share memory, and this rank itself, add plain values. Sums
  /// are taken in float.
  Encoding encoding = Encoding::kPlain;
  /// With an encoding: the losses of messages of earlier calls, to add to those of this one (error
  /// feedback). Belongs to the process group, and must be given to all calls for the same data;
  /// undefined at first. Null: losses are forgotten.
  std::shared_ptr<at::Tensor> error = nullptr;
  /// If defined: the flat buffer of which `out` is this rank's range, in memory, too. Each rank's
  /// sums are gathered into it as soon as they are there, so that all ranks have all of them; then
  /// `Work::wait()` returns when `out` may be overwritten, too. Throws `c10::ValueError` with an
  /// encoding, and `c10::NotImplementedError` except over Gloo, also between hosts whose ranks
  /// share memory: elsewhere, call `all_gather()`.
  at::Tensor gather_into = {};
};

enum class ReduceOp : uint8_t { kSum, kMax, kMin };

/// The arguments of each collective; the methods of `ProcessGroup` document their meaning. Fields
/// of the same name have the same meaning in each.
struct AllGather {
  static constexpr const char* kName = "all_gather";
  at::Tensor flat, shard;
  std::span<const int64_t> bounds;
  Encoding encoding = Encoding::kPlain;

  /// Dtype of the messages.
  at::ScalarType dtype() const { return flat.scalar_type(); }
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
  Encoding encoding = Encoding::kPlain;
};
struct AllToAll {
  static constexpr const char* kName = "all_to_all";
  std::vector<at::Tensor> from, to;
};
struct Barrier {
  static constexpr const char* kName = "barrier";
};

/// One call of a collective, as a process group checks it, counts it and passes it to its
/// transport.
struct TESSERA_API Collective {
  CollectiveTag tag;
  std::variant<AllGather, ReduceScatter, AllReduce, Broadcast, AllToAll, Barrier> call;

  /// Returns "all_gather", "reduce_scatter", ...
  const char* name() const;
  /// Returns the bytes of the whole buffer; for an all-to-all, of all `to`; for a barrier, 0.
  int64_t nbytes() const;
};

}  // namespace tessera
