# cmake -DSOURCE=... -DVERSION=0.1.0 -P recipes.cmake: the recipes of packaging/ have the version of the library, and need what it
# needs.
cmake_minimum_required(VERSION 3.25)
file(READ "${SOURCE}/packaging/vcpkg/tessera/vcpkg.json" port)
string(JSON version GET "${port}" version)
if(NOT version STREQUAL VERSION)
  message(FATAL_ERROR "packaging/vcpkg/tessera/vcpkg.json has the version ${version}; include/tessera/version.h has ${VERSION}")
endif()
file(READ "${SOURCE}/packaging/conan/conanfile.py" recipe)
foreach(library IN ITEMS fmt nlohmann.json xxhash mbedtls cli11)
  if(NOT port MATCHES "\"${library}\"" OR NOT recipe MATCHES "requires\\(\"${library}/")
    message(FATAL_ERROR "A recipe of packaging/ does not name ${library}")
  endif()
endforeach()
