# The Debian package: `cpack --config BUILD/CPackConfig.cmake -G DEB`, once everything is built. LibTorch is no package of
# Debian's, so that it can't be among the dependencies: docs/guide/versions.md.
set(CPACK_GENERATOR DEB)
set(CPACK_INSTALL_CMAKE_PROJECTS "${PROJECT_BINARY_DIR};Tessera;tessera;/")
set(CPACK_PACKAGE_DIRECTORY "${PROJECT_BINARY_DIR}/packages")
set(CPACK_PACKAGE_NAME tessera)
set(CPACK_PACKAGE_VENDOR "The Tessera authors")
set(CPACK_PACKAGE_CONTACT "The Tessera authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Sharded training for LibTorch: library, headers and command-line tool")
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION "Trains LibTorch models in C++ with their parameters, gradients and optimizer state sharded over many processes.
LibTorch ${Torch_VERSION} is needed, and is not a package of Debian's: its libraries must lie in
${torch_rpath}
or in a folder that LD_LIBRARY_PATH or /etc/ld.so.conf.d names.")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
# The libraries that the files are linked with are looked up in the packages installed here, but for LibTorch.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${TORCH_INSTALL_PREFIX}/lib")
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS python3)  # for tessera-flight
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "openssh-client, g++ (>= 4:12), cmake (>= 3.25)")
include(CPack)
