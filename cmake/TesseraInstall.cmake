# Makes `find_package(Tessera)` work for an installed copy.
include(CMakePackageConfigHelpers)
# The installed library finds LibTorch where the build did, and the tools find the library beside themselves.
# INSTALL_RPATH_USE_LINK_PATH would leave out folders inside the project, where ./dev puts LibTorch.
set(torch_rpath "${TORCH_INSTALL_PREFIX}/lib")
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
