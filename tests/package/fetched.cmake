# cmake -DBUILD=... -P fetched.cmake: the project in BUILD, which adds Tessera, has none of its tests and installs none of its
# files.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND "${CMAKE_CTEST_COMMAND}" --test-dir "${BUILD}" --show-only OUTPUT_VARIABLE tests
                COMMAND_ERROR_IS_FATAL ANY)
if(NOT tests MATCHES "Total Tests: 0")
  message(FATAL_ERROR "The project has tests of Tessera's:\n${tests}")
endif()
file(REMOVE_RECURSE "${BUILD}/installed")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${BUILD}/installed" COMMAND_ERROR_IS_FATAL ANY)
file(GLOB_RECURSE installed "${BUILD}/installed/*")
if(installed)
  message(FATAL_ERROR "The project installs files of Tessera's: ${installed}")
endif()
