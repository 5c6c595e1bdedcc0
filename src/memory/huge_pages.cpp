#include "memory/huge_pages.h"

#include <sys/mman.h>

#include <cstdlib>
#include <string_view>

namespace tessera {

bool may_use_huge_pages() {
  const char* const choice = std::getenv("TESSERA_HUGE_PAGES");
  return choice == nullptr || std::string_view(choice) != "0";
}

void ask_for_huge_pages(void* begin, size_t nbytes) {
  if (may_use_huge_pages()) ::madvise(begin, nbytes, MADV_HUGEPAGE);
}

}  // namespace tessera
