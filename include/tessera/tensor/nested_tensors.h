#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera::detail {

/// True for tensors, and for optionals, vectors, arrays, maps (as values), pairs and tuples that
/// contain tensors at any depth.
template <class T>
struct HoldsTensors : std::is_same<T, at::Tensor> {};
template <class T>
struct HoldsTensors<std::optional<T>> : HoldsTensors<T> {};
template <class T, class A>
struct HoldsTensors<std::vector<T, A>> : HoldsTensors<T> {};
template <class T, size_t n>
struct HoldsTensors<std::array<T, n>> : HoldsTensors<T> {};
template <class K, class V, class C, class A>
struct HoldsTensors<std::map<K, V, C, A>> : HoldsTensors<V> {};
template <class K, class V, class H, class E, class A>
struct HoldsTensors<std::unordered_map<K, V, H, E, A>> : HoldsTensors<V> {};
template <class A, class B>
struct HoldsTensors<std::pair<A, B>> : std::disjunction<HoldsTensors<A>, HoldsTensors<B>> {};
template <class... T>
struct HoldsTensors<std::tuple<T...>> : std::disjunction<HoldsTensors<T>...> {};

template <class T>
concept NestedTensors = HoldsTensors<T>::value;

/// Replaces each tensor in `value` by the result of `f`.
template <class T, std::invocable<const at::Tensor&> F>
void replace_tensors(T& value, const F& f) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    value = f(value);
  } else if constexpr (!NestedTensors<T>) {
    // Nothing in it.
  } else if constexpr (requires { value.has_value(); }) {
    if (value) replace_tensors(*value, f);
  } else if constexpr (requires { typename T::mapped_type; }) {
    for (auto& [key, element] : value) replace_tensors(element, f);
  } else if constexpr (requires { value.begin(); }) {
    for (auto& element : value) replace_tensors(element, f);
  } else {
    std::apply([&](auto&... element) { (replace_tensors(element, f), ...); }, value);
  }
}

}  // namespace tessera::detail
