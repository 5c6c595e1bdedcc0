#pragma once

#include <exception>

namespace tessera::detail {

// Begins a forward of `model`, and ends it unless an error leaves the scope.
template <class Model>
class ForwardScope {
 public:
  explicit ForwardScope(Model& model) : model_(model) { model.begin_forward(); }
  ~ForwardScope() {
    if (std::uncaught_exceptions() == errors_) model_.end_forward();
  }
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

 private:
  Model& model_;
  const int errors_ = std::uncaught_exceptions();
};

}  // namespace tessera::detail
