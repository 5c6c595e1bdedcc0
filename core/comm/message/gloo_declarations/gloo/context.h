#pragma once

#include <chrono>

// Only pointers to these types are used: the gloo inside LibTorch makes and destroys them.
namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};

}  // namespace transport
}  // namespace gloo
