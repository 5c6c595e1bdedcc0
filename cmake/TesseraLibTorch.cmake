# Finds LibTorch, for Tessera's own build and, installed beside TesseraConfig.cmake, for projects that use it.

# Sets out_dir to the folder of the TorchConfig.cmake that find_package() would read, and out_version to its version; both
# to "" if there is none. Reads only the version: the file itself may be fatal.
function(tessera_locate_libtorch out_dir out_version)
  set(given "${Torch_DIR}")
  find_package(Torch 1000000 QUIET)  # none is so new; CMake lists the ones it rejected for that
  if(given)
    set(Torch_DIR "${given}" CACHE PATH "The folder of TorchConfig.cmake" FORCE)
  endif()
  set(${out_dir} "" PARENT_SCOPE)
  set(${out_version} "" PARENT_SCOPE)
  if(Torch_CONSIDERED_CONFIGS)
    list(GET Torch_CONSIDERED_CONFIGS 0 config)
    list(GET Torch_CONSIDERED_VERSIONS 0 version)
    get_filename_component(folder "${config}" DIRECTORY)
    set(${out_dir} "${folder}" PARENT_SCOPE)
    set(${out_version} "${version}" PARENT_SCOPE)
  endif()
endfunction()

# Sets out to true if LibTorch in `prefix` has CUDA and its package files don't find the toolkit, as after `pip install
# torch` on an ordinary machine. The package files then end CMake, so a separate project tries them.
function(tessera_lacks_cuda_toolkit prefix out)
  set(${out} FALSE PARENT_SCOPE)
  if(NOT EXISTS "${prefix}/lib/libtorch_cuda.so")
    return()
  endif()
  if(NOT TESSERA_TORCH_TRIED STREQUAL prefix)
    set(project "${CMAKE_CURRENT_BINARY_DIR}/tessera_torch")
    file(WRITE "${project}/CMakeLists.txt" "cmake_minimum_required(VERSION 3.25)\nproject(tessera_torch LANGUAGES CXX)\n"
                                           "find_package(Torch REQUIRED)\n")
    execute_process(COMMAND "${CMAKE_COMMAND}" -S "${project}" -B "${project}/build" -G "${CMAKE_GENERATOR}"
                            "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}" "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}"
                            "-DTorch_DIR=${Torch_DIR}" "-DCUDAToolkit_ROOT=${CUDAToolkit_ROOT}"
                            "-DCUDA_TOOLKIT_ROOT_DIR=${CUDA_TOOLKIT_ROOT_DIR}"
                    RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
    set(TESSERA_TORCH_STATUS ${status} CACHE INTERNAL "how a project with find_package(Torch) ends")
    set(TESSERA_TORCH_TRIED "${prefix}" CACHE INTERNAL "the LibTorch of TESSERA_TORCH_STATUS")
  endif()
  if(NOT TESSERA_TORCH_STATUS STREQUAL "0")
    set(${out} TRUE PARENT_SCOPE)
  endif()
endfunction()

# Sets the variables of find_package(Torch), for the LibTorch that tessera_locate_libtorch() found in `folder`.
macro(tessera_load_libtorch folder version)
  set(Torch_DIR "${folder}" CACHE PATH "The folder of TorchConfig.cmake" FORCE)
  get_filename_component(TORCH_INSTALL_PREFIX "${folder}/../../.." ABSOLUTE)
  tessera_lacks_cuda_toolkit("${TORCH_INSTALL_PREFIX}" TESSERA_TORCH_LACKS_TOOLKIT)
  if(TESSERA_TORCH_LACKS_TOOLKIT)
    set(Torch_FOUND TRUE)
    set(Torch_VERSION "${version}")
    set(TORCH_INCLUDE_DIRS "${TORCH_INSTALL_PREFIX}/include" "${TORCH_INSTALL_PREFIX}/include/torch/csrc/api/include")
    set(TORCH_CXX_FLAGS "")
    # Programs link all of them, needed or not: libtorch.so brings the devices, and the others must not be loaded from the
    # folders where the installed libtessera.so would look.
    set(TORCH_LIBRARIES "-Wl,--push-state,--no-as-needed" "${TORCH_INSTALL_PREFIX}/lib/libtorch.so"
        "${TORCH_INSTALL_PREFIX}/lib/libtorch_cpu.so" "${TORCH_INSTALL_PREFIX}/lib/libc10.so" "-Wl,--pop-state")
  else()
    set(tessera_log_level "${CMAKE_MESSAGE_LOG_LEVEL}")
    set(CMAKE_MESSAGE_LOG_LEVEL ERROR)  # Torch warns of parts that the wheel lacks
    find_package(Torch QUIET)
    set(CMAKE_MESSAGE_LOG_LEVEL "${tessera_log_level}")
    unset(tessera_log_level)
  endif()
endmacro()
