# Makes `find_package(Tessera)` work for an installed copy. All of it is the component `tessera`, to leave out the files
# of dependencies that CMake has fetched: `cmake --install BUILD --component tessera`.
include(CMakePackageConfigHelpers)
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME tessera)
# The installed library finds LibTorch where the build did, or where it is told to, and the tools find the library beside
# themselves. INSTALL_RPATH_USE_LINK_PATH would leave out folders inside the project, where ./dev puts LibTorch.
set(TESSERA_TORCH_RPATH "" CACHE STRING
    "Folders, separated by :, where the installed library looks for LibTorch; empty: where the build found it")
set(torch_rpath "${TORCH_INSTALL_PREFIX}/lib")
if(TESSERA_TORCH_RPATH)
  set(torch_rpath "${TESSERA_TORCH_RPATH}")
endif()
set_target_properties(tessera PROPERTIES INSTALL_RPATH "\$ORIGIN;${torch_rpath}")
install(TARGETS tessera tessera_torch EXPORT TesseraTargets)
install(EXPORT TesseraTargets NAMESPACE Tessera:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
configure_package_config_file(cmake/TesseraConfig.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake"
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake"
              cmake/TesseraLibTorch.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
if(TARGET tessera_cli)
  set_target_properties(tessera_cli tessera_bench PROPERTIES
    INSTALL_RPATH "\$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${torch_rpath}")
  install(TARGETS tessera_cli tessera_bench)
endif()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/tessera RENAME copyright)
