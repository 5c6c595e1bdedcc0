#include "checkpoint/mount_point.h"

#include <fcntl.h>
#include <sys/stat.h>

namespace tessera {

bool is_mount_point(const std::filesystem::path& path) {
#ifdef STATX_ATTR_MOUNT_ROOT  // Linux 5.8; also detects mounts from the same file system
  struct statx status {};
  if (::statx(AT_FDCWD, path.c_str(), 0, STATX_BASIC_STATS, &status) != 0) return false;
  if ((status.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0)
    return (status.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
#endif
  struct stat own {
  }, parent{};
  return ::stat(path.c_str(), &own) == 0 && ::stat(path.parent_path().c_str(), &parent) == 0 &&
         own.st_dev != parent.st_dev;
}

}  // namespace tessera
