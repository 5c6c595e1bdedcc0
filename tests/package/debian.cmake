# cmake -DCONFIG=CPackConfig.cmake -DVERSION=0.1.0 -DWHERE=FOLDER ... -P debian.cmake: packs what is built for Debian, and looks
# at the package and at the tool in it. READELF and OUTSIDE are those of runpath.cmake.
cmake_minimum_required(VERSION 3.25)

# Runs a command and sets `out` to its output.
function(ask out)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(${out} "${output}" PARENT_SCOPE)
endfunction()

function(expect text pattern)
  if(NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "expected a match of ${pattern}; got:\n${text}")
  endif()
endfunction()

file(REMOVE_RECURSE "${WHERE}")
ask(said "${CMAKE_CPACK_COMMAND}" --config "${CONFIG}" -G DEB -B "${WHERE}")
file(GLOB package "${WHERE}/*.deb")
expect("${package}" "/tessera_${VERSION}_[a-z0-9]+\\.deb$")

ask(version dpkg-deb --field "${package}" Version)
if(NOT version STREQUAL VERSION)
  message(FATAL_ERROR "The package has the version ${version}; include/tessera/version.h has ${VERSION}")
endif()
ask(depends dpkg-deb --field "${package}" Depends)
expect("${depends}" "libc6 \\(>= .*libstdc\\+\\+6 \\(>= ")
ask(description dpkg-deb --field "${package}" Description)
expect("${description}" "LibTorch ${TORCH_VERSION} is needed, and is not a package of Debian's")

ask(contents dpkg-deb --contents "${package}")
foreach(file IN ITEMS bin/tessera bin/tessera-bench bin/tessera-flight include/tessera/tessera.h lib/libtessera.so.${VERSION}
                      lib/cmake/Tessera/TesseraConfig.cmake lib/cmake/Tessera/TesseraTargets.cmake
                      lib/pkgconfig/tessera.pc share/doc/tessera/copyright share/doc/tessera/tessera.spdx.json
                      share/doc/tessera/third_party/nlohmann_json.txt)
  expect("${contents}\n" " \\./usr/${file}\n")
endforeach()
expect("${contents}" "root/root")
foreach(foreign IN ITEMS libtorch libfmt gtest nlohmann/ "\\.py" "/_C\\.")
  if(contents MATCHES "${foreign}")
    message(FATAL_ERROR "The package has files of others (${foreign}):\n${contents}")
  endif()
endforeach()

# As installed: no file looks into folders of this machine, and the tool finds the library beside itself.
ask(said dpkg-deb --extract "${package}" "${WHERE}/root")
set(FOLDER "${WHERE}/root")
set(NEEDED libtessera.so tessera-bench)
include("${CMAKE_CURRENT_LIST_DIR}/runpath.cmake")
file(READ "${WHERE}/root/usr/lib/pkgconfig/tessera.pc" pkg_config)
foreach(folder IN LISTS folders)
  if(pkg_config MATCHES "=${folder}/")
    message(FATAL_ERROR "tessera.pc names a folder below ${folder}:\n${pkg_config}")
  endif()
endforeach()
ask(said "${CMAKE_COMMAND}" -E env "LD_LIBRARY_PATH=${TORCH_LIBRARIES}" "${WHERE}/root/usr/bin/tessera" --version)
expect("${said}" "^tessera ${VERSION} .*LibTorch ${TORCH_VERSION} is loaded")
