# A package is a folder with its sources, its tests in tests/, its commands in command/, its Python modules in python/ and its
# page, README.md. Its public headers are in include/tessera/NAME, or in its own include/. scripts/check_packages.py reads the
# same calls, and checks that includes follow them.
#
#   tessera_package(NAME
#     STANDS_ON ...    packages that it uses; those that these stand on, too
#     ROOMS ...        its folders of sources, if it has any, bottom up: each uses itself and those before it
#     TESTED_WITH ...  packages that its tests need besides
#     LINES N)         the lines of C++ that it may have, tests and commands apart
set(tessera_core base comm init tensor engine checkpoint parallel)
set(tessera_besides colossalai fairscale paddle interop loop trace planner capi)

function(tessera_package name)
  cmake_parse_arguments(PARSE_ARGV 1 package "" "LINES" "STANDS_ON;ROOMS;TESTED_WITH")
  # The package and all that it stands on, bottom up.
  set(closure "")
  foreach(other IN LISTS package_STANDS_ON)
    get_property(below GLOBAL PROPERTY tessera_closure_of_${other})
    if(NOT below)
      message(FATAL_ERROR "The package ${name} stands on ${other}, which TESSERA_PACKAGES leaves out.")
    endif()
    list(APPEND closure ${below})
  endforeach()
  list(APPEND closure ${name})
  list(REMOVE_DUPLICATES closure)
  set_property(GLOBAL PROPERTY tessera_closure_of_${name} ${closure})
  set_property(GLOBAL PROPERTY tessera_folder_of_${name} "${CMAKE_CURRENT_SOURCE_DIR}")
  set_property(GLOBAL PROPERTY tessera_tested_with_${name} ${package_TESTED_WITH})
  set_property(GLOBAL APPEND PROPERTY tessera_packages ${name})

  file(GLOB_RECURSE sources CONFIGURE_DEPENDS *.cpp)
  list(FILTER sources EXCLUDE REGEX "^${CMAKE_CURRENT_SOURCE_DIR}/(tests|command|python)/")
  list(FILTER sources EXCLUDE REGEX "/(no_)?nccl\\.cpp$")
  # Compiled once: the shared library and the tests, which also reach its hidden symbols, are made of these.
  add_library(tessera_${name}_objects OBJECT ${sources})
  tessera_unity_build(tessera_${name}_objects)
  target_link_libraries(tessera_${name}_objects PUBLIC tessera_internals PRIVATE tessera_flags)
  set_target_properties(tessera_${name}_objects PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_precompile_headers(tessera_${name}_objects REUSE_FROM tessera_pch)
  if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/include")
    target_include_directories(tessera_internals INTERFACE "${CMAKE_CURRENT_SOURCE_DIR}/include")
  endif()

  # A program that uses the package links this target.
  add_library(tessera_${name} INTERFACE)
  set_target_properties(tessera_${name} PROPERTIES EXPORT_NAME ${name})
  add_library(Tessera::${name} ALIAS tessera_${name})
endfunction()

# Sets `out` to packages with all that they stand on.
function(tessera_closure out)
  set(closure "")
  foreach(name IN LISTS ARGN)
    get_property(below GLOBAL PROPERTY tessera_closure_of_${name})
    list(APPEND closure ${below})
  endforeach()
  list(REMOVE_DUPLICATES closure)
  set(${out} ${closure} PARENT_SCOPE)
endfunction()

# Links a target with the objects of packages and of all that they stand on: it reaches hidden symbols, too.
function(tessera_link_packages target)
  tessera_closure(closure ${ARGN})
  foreach(name IN LISTS closure)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:tessera_${name}_objects>)
  endforeach()
  target_link_libraries(${target} PRIVATE tessera_internals)
endfunction()
