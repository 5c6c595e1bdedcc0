# An overlay port: it builds the sources that it lies in. See docs/guide/getting_started.md.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT EXISTS "${SOURCE_PATH}/include/tessera/version.h")
  message(FATAL_ERROR "The port must lie in packaging/vcpkg/tessera of Tessera's sources: give vcpkg that folder's parent "
                      "as --overlay-ports. A registry would have vcpkg_from_git() here.")
endif()
if("$ENV{Torch_DIR}" STREQUAL "")
  message(FATAL_ERROR "Set the environment variable Torch_DIR to the folder with LibTorch's TorchConfig.cmake, and "
                      "VCPKG_KEEP_ENV_VARS=Torch_DIR, so that vcpkg passes it on.")
endif()

vcpkg_check_linkage(ONLY_DYNAMIC_LIBRARY)  # operators are registered once in a process
vcpkg_check_features(OUT_FEATURE_OPTIONS features FEATURES tools TESSERA_BUILD_TOOLS)
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS "-DTorch_DIR=$ENV{Torch_DIR}" ${features} -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_EXAMPLES=OFF
          -DTESSERA_BUILD_PYTHON=OFF
  MAYBE_UNUSED_VARIABLES TESSERA_BUILD_PYTHON)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/Tessera)
vcpkg_fixup_pkgconfig()
if("tools" IN_LIST FEATURES)
  vcpkg_copy_tools(TOOL_NAMES tessera tessera-bench tessera-flight AUTO_CLEAN)
endif()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
