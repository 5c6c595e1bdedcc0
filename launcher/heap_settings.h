#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera::tools {

/// Environment variables that make glibc's heap keep freed memory, without those that the user has
/// set.
///
/// Autograd frees and allocates the same large blocks in every step. By default glibc gives them
/// back to the kernel (blocks above the mmap threshold at once, others when the top of the heap is
/// trimmed) and pays with a page fault and a zeroed page for each 4 KiB that it gets again. With
/// these settings every block comes from the heap. It is never trimmed, and grows in steps of 16
/// MiB. The price: a process keeps its peak. glibc reads the variables when a program starts.
std::vector<std::pair<std::string, std::string>> heap_settings();

}  // namespace tessera::tools
