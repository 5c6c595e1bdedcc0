#include <tessera/fake_world.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera {

World fake_world(int size, int rank) {
  ProcessGroupPtr process_group = fake_process_group(rank, size);
  return World({.rank = rank, .size = size, .source = "fake"},
               c10::make_intrusive<c10d::HashStore>(), std::move(process_group));
}

}  // namespace tessera
