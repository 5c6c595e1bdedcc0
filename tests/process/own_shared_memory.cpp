#include "own_shared_memory.h"

#include <sched.h>
#include <sys/mount.h>

namespace tessera {

bool take_own_shared_memory() {
  return ::unshare(CLONE_NEWNS) == 0 &&
         ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, nullptr) == 0;
}

}  // namespace tessera
