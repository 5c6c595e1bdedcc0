# Flags for our own files only: warnings and sanitizers.
add_library(tessera_flags INTERFACE)
target_compile_options(tessera_flags INTERFACE -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers)
# LibTorch brings fmt's headers, but not its library, and in a version that differs from the system's. Header-only, either
# works; all of our files do the same, because they share a precompiled header.
target_link_libraries(tessera_flags INTERFACE fmt::fmt-header-only)
if(TESSERA_SANITIZE)
  list(JOIN TESSERA_SANITIZE "," sanitizers)
  target_compile_options(tessera_flags INTERFACE -fsanitize=${sanitizers} -fno-omit-frame-pointer)
  target_link_options(tessera_flags INTERFACE -fsanitize=${sanitizers})
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
    message(FATAL_ERROR "g++ ${CMAKE_CXX_COMPILER_VERSION} was found; Tessera needs g++ 12 or newer (C++20).")
  endif()
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # g++ 12 warns of std::string's own assignments at -O3: https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105651
    target_compile_options(tessera_flags INTERFACE -Wno-restrict)
  endif()
  # ccache can keep the results of compiling with a precompiled header only if the compiler names the header.
  target_compile_options(tessera_flags INTERFACE -fpch-preprocess)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 16)
    message(FATAL_ERROR "clang ${CMAKE_CXX_COMPILER_VERSION} was found; Tessera needs clang 16 or newer (C++20's ranges).")
  endif()
  # Hints at loops, which GCC alone understands.
  target_compile_options(tessera_flags INTERFACE -Wno-unknown-pragmas)
endif()

# Messages name sources as the repository does, wherever it lies. A unity file includes its sources by absolute path, and
# without this __FILE__ would have it too, so that builds in two folders would share nothing of ccache's. A precompiled header
# is found in the cache only if its options are the same in all folders, and has no __FILE__ of ours.
define_property(TARGET PROPERTY TESSERA_IS_PRECOMPILED_HEADER BRIEF_DOCS "The target is there for its precompiled header")
target_compile_options(tessera_flags INTERFACE
  "$<$<NOT:$<BOOL:$<TARGET_PROPERTY:TESSERA_IS_PRECOMPILED_HEADER>>>:-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=>")

# Compile through ccache if it is installed. The settings let it work with precompiled headers, and let builds in several
# folders share its cache.
find_program(TESSERA_CCACHE ccache)
mark_as_advanced(TESSERA_CCACHE)
if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime "${TESSERA_CCACHE}")
endif()
