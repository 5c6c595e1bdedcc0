#include "checkpoint/fail_together.h"

#include <c10/util/Exception.h>

#include <exception>

#include "mesh/shard_mesh.h"

namespace tessera {

void fail_together(const ShardMesh& mesh, const std::function<void()>& work) {
  check_on_all_ranks(mesh, [&] {
    try {
      work();
    } catch (const c10::Error&) {
      throw;
    } catch (const std::exception& error) {
      // Of the file system, of memory: the other ranks must hear of these, too.
      TORCH_CHECK(false, "[checkpoint] ", error.what());
    }
  });
}

}  // namespace tessera
