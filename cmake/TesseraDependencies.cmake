# Finds the library's dependencies, or stops with instructions.
find_package(Python3 COMPONENTS Interpreter QUIET)
if(NOT Torch_DIR AND NOT DEFINED ENV{Torch_DIR} AND Python3_EXECUTABLE)
  # The package is located, not imported: an import takes seconds.
  execute_process(COMMAND ${Python3_EXECUTABLE} -c
                  "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
                  OUTPUT_VARIABLE torch_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(torch_package)
    list(APPEND CMAKE_PREFIX_PATH "${torch_package}/share/cmake")
  endif()
endif()
include(TesseraLibTorch)
tessera_locate_libtorch(torch_folder torch_version)
if(NOT torch_folder)
  message(FATAL_ERROR "LibTorch was not found. Set Torch_DIR to the folder with TorchConfig.cmake, or let "
                      "Python3_EXECUTABLE be a Python that has torch (./dev build sets both up).")
endif()
if(torch_version VERSION_LESS 2.12)
  message(FATAL_ERROR "LibTorch ${torch_version} was found in ${torch_folder}; Tessera needs 2.12 or newer.")
endif()
# A project that adds this one links with these targets, too, by the names that Tessera::tessera passes on.
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
tessera_load_libtorch("${torch_folder}" "${torch_version}")
unset(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)
message(STATUS "LibTorch ${Torch_VERSION}: ${TORCH_INSTALL_PREFIX}")

# One target in place of Torch's variables. Its headers are system headers, so that their warnings are not shown.
add_library(tessera_torch INTERFACE)
target_include_directories(tessera_torch SYSTEM INTERFACE
  "$<BUILD_INTERFACE:${TORCH_INCLUDE_DIRS}>")
target_compile_options(tessera_torch INTERFACE "$<BUILD_INTERFACE:${TORCH_CXX_FLAGS}>")
target_compile_definitions(tessera_torch INTERFACE USE_DISTRIBUTED)
target_link_libraries(tessera_torch INTERFACE "$<BUILD_INTERFACE:${TORCH_LIBRARIES}>")

include(FetchContent)
FetchContent_Declare(fmt URL https://github.com/fmtlib/fmt/archive/refs/tags/9.1.0.tar.gz
                     URL_HASH SHA256=5dea48d1fcddc3ec571ce2058e13910a0d4a6bab4cc09a809d8b1dd1c88ae6f2 FIND_PACKAGE_ARGS)
FetchContent_Declare(nlohmann_json URL https://github.com/nlohmann/json/archive/refs/tags/v3.11.2.tar.gz
                     URL_HASH SHA256=d69f9deb6a75e2580465c6c4c5111b89c4dc2fa94e3a85fcd2ffcd9a143d9273 FIND_PACKAGE_ARGS)
FetchContent_MakeAvailable(fmt nlohmann_json)
find_path(TESSERA_XXHASH_INCLUDE xxhash.h)  # a header-only library
if(NOT TESSERA_XXHASH_INCLUDE)
  FetchContent_Declare(xxhash URL https://github.com/Cyan4973/xxHash/archive/refs/tags/v0.8.1.tar.gz
                       URL_HASH SHA256=3bb6b7d6f30c591dd65aaaff1c8b7a5b94d81687998ca9400082c739a690436c
                       SOURCE_SUBDIR build/none)
  FetchContent_MakeAvailable(xxhash)
  set(TESSERA_XXHASH_INCLUDE "${xxhash_SOURCE_DIR}")
endif()
# HMAC-SHA256, linked into the library: programs need no library of Mbed TLS.
find_path(TESSERA_MBEDTLS_INCLUDE mbedtls/constant_time.h)
find_library(TESSERA_MBEDCRYPTO NAMES libmbedcrypto.a mbedcrypto)  # 2.28 to 3; from 4 on it has another name
add_library(tessera_mbedcrypto INTERFACE)
# Another copy may be in the program; and Debian's archive fits a shared library only if this hides it.
target_link_options(tessera_mbedcrypto INTERFACE LINKER:--exclude-libs,libmbedcrypto.a)
if(TESSERA_MBEDTLS_INCLUDE AND TESSERA_MBEDCRYPTO)
  target_include_directories(tessera_mbedcrypto SYSTEM INTERFACE "${TESSERA_MBEDTLS_INCLUDE}")
  target_link_libraries(tessera_mbedcrypto INTERFACE "${TESSERA_MBEDCRYPTO}")
else()
  enable_language(C)
  set(ENABLE_PROGRAMS OFF)
  set(ENABLE_TESTING OFF)
  set(DISABLE_PACKAGE_CONFIG_AND_INSTALL ON)
  # v3.6.6
  FetchContent_Declare(mbedtls GIT_REPOSITORY https://github.com/Mbed-TLS/mbedtls.git
                       GIT_TAG 0bebf8b8c7f07abe3571ded48a11aa907a1ffb20)
  FetchContent_MakeAvailable(mbedtls)
  target_link_libraries(tessera_mbedcrypto INTERFACE mbedcrypto)
endif()
if(TESSERA_BUILD_TOOLS OR TESSERA_BUILD_EXAMPLES)
  FetchContent_Declare(CLI11 URL https://github.com/CLIUtils/CLI11/archive/refs/tags/v2.1.2.tar.gz
                       URL_HASH SHA256=26291377e892ba0e5b4972cdfd4a2ab3bf53af8dac1f4ea8fe0d1376b625c8cb FIND_PACKAGE_ARGS)
  FetchContent_MakeAvailable(CLI11)
endif()
if(TESSERA_BUILD_TESTS)
  FetchContent_Declare(googletest URL https://github.com/google/googletest/archive/refs/tags/release-1.12.1.tar.gz
                       URL_HASH SHA256=81964fe578e9bd7c94dfdb09c8e4d6e6759e19967e397dbea48d1c10e45d0df2
                       FIND_PACKAGE_ARGS NAMES GTest)
  FetchContent_MakeAvailable(googletest)
endif()
if(TESSERA_BUILD_TESTS AND TESSERA_BUILD_TOOLS)
  set(BENCHMARK_ENABLE_TESTING OFF)
  set(BENCHMARK_ENABLE_INSTALL OFF)
  set(BENCHMARK_ENABLE_WERROR OFF)
  # v1.7.1
  FetchContent_Declare(benchmark GIT_REPOSITORY https://github.com/google/benchmark.git
                       GIT_TAG d572f4777349d43653b21d6c2fc63020ab326db2 FIND_PACKAGE_ARGS)
  FetchContent_MakeAvailable(benchmark)
endif()

# NCCL is compiled in if LibTorch has CUDA and the headers are there: those of a CUDA toolkit and of NCCL, or of the Python
# wheels that pip installs with LibTorch's.
option(TESSERA_REQUIRE_NCCL "Fail if NCCL can't be built in" OFF)
set(TESSERA_HAVE_NCCL OFF)
set(tessera_no_nccl "LibTorch has no CUDA")
if(EXISTS "${TORCH_INSTALL_PREFIX}/lib/libtorch_cuda.so")
  file(GLOB tessera_wheel_includes "${TORCH_INSTALL_PREFIX}/../nvidia/*/include")
  find_path(TESSERA_NCCL_INCLUDE nccl.h HINTS ${tessera_wheel_includes})
  find_path(TESSERA_CUDA_INCLUDE NAMES crt/host_config.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${tessera_wheel_includes}
            PATHS /usr/local/cuda/include)
  if(TESSERA_NCCL_INCLUDE AND TESSERA_CUDA_INCLUDE)
    set(TESSERA_HAVE_NCCL ON)
    message(STATUS "NCCL is built in, with the headers in ${TESSERA_NCCL_INCLUDE} and ${TESSERA_CUDA_INCLUDE}")
    if(TESSERA_TORCH_LACKS_TOOLKIT)
      target_link_libraries(tessera_torch INTERFACE "$<BUILD_INTERFACE:${TORCH_INSTALL_PREFIX}/lib/libtorch_cuda.so>"
                                                    "$<BUILD_INTERFACE:${TORCH_INSTALL_PREFIX}/lib/libc10_cuda.so>")
    endif()
  else()
    set(tessera_no_nccl "LibTorch has CUDA, but nccl.h or CUDA's crt/host_config.h was not found (set TESSERA_NCCL_INCLUDE and TESSERA_CUDA_INCLUDE to their folders, or install the wheels nvidia-nccl-cuN, nvidia-cuda-crt and nvidia-cuda-cccl)")
  endif()
endif()
if(NOT TESSERA_HAVE_NCCL)
  if(TESSERA_REQUIRE_NCCL)
    message(FATAL_ERROR "TESSERA_REQUIRE_NCCL is set: ${tessera_no_nccl}")
  endif()
  message(STATUS "Tessera is built without NCCL: ${tessera_no_nccl}")
endif()

# ProcessGroupGloo.hpp is included with our own declarations of gloo's types: compile and run a program that shows that they
# fit this LibTorch. The result is kept until another LibTorch is used.
if(NOT TESSERA_GLOO_PROBED STREQUAL "${Torch_DIR} ${Torch_VERSION}")
  message(STATUS "Checking LibTorch's ProcessGroupGloo")
  unset(TESSERA_GLOO_COMPILES CACHE)
  unset(TESSERA_GLOO_RUNS CACHE)
  # Files, not targets: LibTorch's targets name others that exist only in its own build.
  try_run(TESSERA_GLOO_RUNS TESSERA_GLOO_COMPILES "${CMAKE_CURRENT_BINARY_DIR}/gloo_probe"
    "${CMAKE_CURRENT_SOURCE_DIR}/cmake/gloo_probe.cpp"
    CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${CMAKE_CURRENT_SOURCE_DIR}/core/comm/message/gloo_declarations;${TORCH_INCLUDE_DIRS}"
                "-DCMAKE_BUILD_RPATH=${TORCH_INSTALL_PREFIX}/lib"
    COMPILE_DEFINITIONS -DUSE_C10D_GLOO -DUSE_DISTRIBUTED -DGLOO_STORE_HAS_STORE_V2
    LINK_LIBRARIES "${TORCH_INSTALL_PREFIX}/lib/libtorch.so" "${TORCH_INSTALL_PREFIX}/lib/libtorch_cpu.so"
                   "${TORCH_INSTALL_PREFIX}/lib/libc10.so"
    CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON
    COMPILE_OUTPUT_VARIABLE compile_output RUN_OUTPUT_VARIABLE run_output)
  if(NOT TESSERA_GLOO_COMPILES OR NOT TESSERA_GLOO_RUNS STREQUAL "0")
    message(FATAL_ERROR "LibTorch ${Torch_VERSION} has another ProcessGroupGloo than Tessera knows (the program "
                        "cmake/gloo_probe.cpp ended with ${TESSERA_GLOO_RUNS}):\n${compile_output}\n${run_output}")
  endif()
  set(TESSERA_GLOO_PROBED "${Torch_DIR} ${Torch_VERSION}" CACHE INTERNAL "the LibTorch that gloo_probe.cpp ran with")
endif()
