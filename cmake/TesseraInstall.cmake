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
foreach(package IN LISTS tessera_packages)
  install(TARGETS tessera_${package} EXPORT TesseraTargets)
  get_property(folder GLOBAL PROPERTY tessera_folder_of_${package})
  if(EXISTS "${folder}/include")
    install(DIRECTORY "${folder}/include/tessera" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  else()
    install(DIRECTORY include/tessera/${package} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera)
  endif()
endforeach()
install(EXPORT TesseraTargets NAMESPACE Tessera:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
install(FILES include/tessera/tessera.h include/tessera/export.h include/tessera/version.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera)
configure_package_config_file(cmake/TesseraConfig.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake"
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake"
              cmake/TesseraLibTorch.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
foreach(program tessera_cli tessera_bench)
  if(TARGET ${program})
    set_target_properties(${program} PROPERTIES INSTALL_RPATH "\$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${torch_rpath}")
    install(TARGETS ${program})
  endif()
endforeach()
if(TARGET tessera_cli)
  install(PROGRAMS launcher/flight.py TYPE BIN RENAME tessera-flight)
endif()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/tessera RENAME copyright)
include(TesseraNotices)
install(DIRECTORY "${tessera_notices}/" DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/tessera)
if(TESSERA_BUILD_PYTHON)
  install(DIRECTORY "${tessera_notices}/" DESTINATION tessera/notices COMPONENT python EXCLUDE_FROM_ALL)
endif()
file(RELATIVE_PATH prefix_from_pc "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
configure_file(cmake/tessera.pc.in "${CMAKE_CURRENT_BINARY_DIR}/tessera.pc" @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/tessera.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
