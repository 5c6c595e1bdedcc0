#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/export.h>
#include <tessera/tensor/device_mesh.h>
#include <tessera/tensor/nested_tensors.h>
#include <tessera/tensor/placement.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// Placements of several values in order; none for a value that is not a DistTensor.
using PlacementsList = std::vector<std::optional<Placements>>;

struct LocalMapOptions {
  /// The placements that the arguments must have; empty: any.
  PlacementsList in_placements = {};
  /// Placements of the gradients that the function's backward computes from local parts; empty:
  /// those of the arguments, with `Replicate` in place of `Partial`. A replicated argument that is
  /// used together with parts of others has a gradient in terms: `Partial`.
  PlacementsList in_grad_placements = {};
  /// The mesh of the results; none: that of the first DistTensor among the arguments.
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// Redistributes arguments with other placements; else they are errors.
  bool redistribute_inputs = false;
};

namespace detail {

/// One call of a function on local parts.
class TESSERA_API LocalCall {
 public:
  /// Both must outlive the call.
  LocalCall(const PlacementsList& out_placements, const LocalMapOptions& options);
  /// Replaces the next argument by its local part; null: it is not a tensor.
  void add_argument(at::Tensor* argument);
  /// Must be called after all arguments.
  void check_arguments() const;
  /// Adds the next result. It must outlive the call; null: it is not a tensor.
  void add_result(at::Tensor* result) { results_.push_back(result); }
  /// Replaces the results by DistTensors, if an argument was one.
  void finish();

 private:
  at::Tensor part_of(const at::Tensor& argument);
  std::vector<std::vector<int64_t>> exchanged_sizes() const;

  const PlacementsList& out_placements_;
  const LocalMapOptions& options_;
  std::optional<DeviceMesh> mesh_;
  size_t arguments_ = 0;
  bool has_dist_ = false, is_uneven_ = false;
  std::vector<at::Tensor*> results_;
};

/// Calls `f` with a pointer to each tensor in `value`, and with null for each other value.
template <class T, class F>
void each_value(T& value, const F& f) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    f(&value);
  } else if constexpr (!NestedTensors<T>) {
    f(static_cast<at::Tensor*>(nullptr));
  } else if constexpr (requires { value.has_value(); }) {
    value ? each_value(*value, f) : f(static_cast<at::Tensor*>(nullptr));
  } else if constexpr (requires { typename T::mapped_type; }) {
    for (auto& [key, element] : value) each_value(element, f);
  } else if constexpr (requires { value.begin(); }) {
    for (auto& element : value) each_value(element, f);
  } else {
    std::apply([&](auto&... element) { (each_value(element, f), ...); }, value);
  }
}

template <class T>
decltype(auto) local_argument(T&& argument, LocalCall& call) {
  if constexpr (NestedTensors<std::remove_cvref_t<T>>) {
    std::remove_cvref_t<T> local = std::forward<T>(argument);
    each_value(local, [&](at::Tensor* tensor) { call.add_argument(tensor); });
    return local;
  } else {
    call.add_argument(nullptr);
    return std::forward<T>(argument);
  }
}

}  // namespace detail

/// Returns a function that calls `fn`, written for ordinary tensors, with the local parts of
/// DistTensors, and makes DistTensors of its results:
///
/// ```cpp
/// auto scaled = tessera::local_map(
///     [](const at::Tensor& rows, double factor) { return rows.softmax(-1) * factor; },
///     {tessera::Placements{tessera::Shard{0}}},
///     {.in_placements = {tessera::Placements{tessera::Shard{0}}, std::nullopt}});
/// auto result = scaled(dist, 0.5);  // a DistTensor that is cut by rows
/// ```
///
/// `out_placements`, `in_placements` and `in_grad_placements` have one entry for each result or
/// argument; those in tuples, pairs, vectors, arrays, maps and optionals count one by one, in
/// order. The entry of a value that is not a tensor must be `std::nullopt`; an ordinary tensor
/// among the arguments is passed on as it is, and among the results it stays one if its entry is
/// `std::nullopt`. If no argument is a DistTensor, `fn` is called as it is.
///
/// Differentiable. `fn` may issue collectives of its own. The call is collective over the mesh
/// where arguments are redistributed, and, if one is cut unevenly and a result is a `Shard`, for
/// comparing the sizes of the results; otherwise the ranks' parts of a result are assumed to have
/// equal sizes, and nothing is sent.
///
/// Throws `c10::ValueError` for arguments with other placements than `in_placements` unless
/// `redistribute_inputs` is set, for lists of other lengths, for DistTensors on another mesh or
/// among the results of `fn`, and on ranks that are not in the mesh.
template <class F>
auto local_map(F fn, PlacementsList out_placements, LocalMapOptions options = {}) {
  return [fn = std::move(fn), out_placements = std::move(out_placements),
          options = std::move(options)]<class... Args>(Args&&... args) {
    detail::LocalCall call(out_placements, options);
    // Braces guarantee that the arguments are evaluated in order.
    std::tuple<decltype(detail::local_argument(std::forward<Args>(args), call))...> local{
        detail::local_argument(std::forward<Args>(args), call)...};
    call.check_arguments();
    const auto run = [&]() -> decltype(auto) {
      return std::apply(
          [&](auto&&... item) -> decltype(auto) {
            return fn(std::forward<decltype(item)>(item)...);
          },
          std::move(local));
    };
    if constexpr (std::is_void_v<decltype(run())>) {
      run();
      call.finish();
    } else {
      std::remove_cvref_t<decltype(run())> result = run();
      detail::each_value(result, [&](at::Tensor* tensor) { call.add_result(tensor); });
      call.finish();
      return result;
    }
  };
}

/// As above, for a function with one result.
template <class F>
auto local_map(F fn, Placements out_placements, LocalMapOptions options = {}) {
  return local_map(std::move(fn), PlacementsList{std::move(out_placements)}, std::move(options));
}

}  // namespace tessera
