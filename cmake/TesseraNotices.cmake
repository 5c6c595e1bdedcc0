# Notices of the libraries whose code is compiled in, and a list of them in SPDX 2.3, to install beside the copyright.
set(tessera_notices "${CMAKE_CURRENT_BINARY_DIR}/notices")
file(REMOVE_RECURSE "${tessera_notices}")
set(tessera_spdx_packages "")
set(tessera_spdx_relations "")

# Adds a library: its SPDX licence, its page, and the package of Debian's that has its notice if it was not fetched.
function(tessera_notice name version license page debian)
  set(notice "")
  string(TOLOWER "${name}" fetched)
  file(GLOB places "${FETCHCONTENT_BASE_DIR}/${fetched}-src/LICENSE*" "/usr/share/doc/${debian}/copyright"
       "${TORCH_INSTALL_PREFIX}/../torch-*.dist-info/licenses/third_party/${name}/LICENSE")
  if(places)
    list(GET places 0 notice)
    configure_file("${notice}" "${tessera_notices}/third_party/${name}.txt" COPYONLY)
  else()
    message(STATUS "The notice of ${name} was not found: a package that is made of this build must add it")
  endif()
  string(REGEX REPLACE "[^A-Za-z0-9]" "-" id "SPDXRef-${name}")
  list(APPEND tessera_spdx_packages "    {\"SPDXID\": \"${id}\", \"name\": \"${name}\", \"versionInfo\": \"${version}\",
     \"downloadLocation\": \"${page}\", \"filesAnalyzed\": false, \"copyrightText\": \"NOASSERTION\",
     \"licenseConcluded\": \"${license}\", \"licenseDeclared\": \"${license}\"}")
  list(APPEND tessera_spdx_relations
       "    {\"spdxElementId\": \"SPDXRef-tessera\", \"relationshipType\": \"CONTAINS\", \"relatedSpdxElement\": \"${id}\"}")
  set(tessera_spdx_packages "${tessera_spdx_packages}" PARENT_SCOPE)
  set(tessera_spdx_relations "${tessera_spdx_relations}" PARENT_SCOPE)
endfunction()

# Sets `variable` to the version that a header defines in macros PREFIX_MAJOR and so on, or as a text.
function(tessera_version_in header pattern variable)
  set(found "NOASSERTION")
  if(EXISTS "${header}")
    file(READ "${header}" text)
    string(REGEX MATCHALL "${pattern}" lines "${text}")
    string(REGEX MATCHALL "[ \"][0-9][0-9.]*" numbers "${lines}")
    list(JOIN numbers "." found)
    string(REGEX REPLACE "[ \"]" "" found "${found}")
  endif()
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()

tessera_version_in("${TESSERA_XXHASH_INCLUDE}/xxhash.h" "#define XXH_VERSION_(MAJOR|MINOR|RELEASE) +[0-9]+" xxhash_version)
set(mbedtls_header "${TESSERA_MBEDTLS_INCLUDE}/mbedtls/build_info.h")  # of version 3; before it was version.h
if(NOT EXISTS "${mbedtls_header}")
  set(mbedtls_header "${TESSERA_MBEDTLS_INCLUDE}/mbedtls/version.h")
endif()
tessera_version_in("${mbedtls_header}" "#define MBEDTLS_VERSION_STRING +\"[0-9.]+" mbedtls_version)
tessera_version_in("${TORCH_INSTALL_PREFIX}/include/pybind11/detail/common.h"
  "#define PYBIND11_VERSION_(MAJOR|MINOR) +[0-9]+" pybind11_version)

tessera_notice(fmt "${fmt_VERSION}" MIT https://github.com/fmtlib/fmt libfmt-dev)
tessera_notice(nlohmann_json "${nlohmann_json_VERSION}" MIT https://github.com/nlohmann/json nlohmann-json3-dev)
tessera_notice(xxhash "${xxhash_version}" BSD-2-Clause https://github.com/Cyan4973/xxHash libxxhash-dev)
tessera_notice(mbedtls "${mbedtls_version}" Apache-2.0 https://github.com/Mbed-TLS/mbedtls libmbedtls-dev)
if(TESSERA_BUILD_TOOLS)
  tessera_notice(CLI11 "${CLI11_VERSION}" BSD-3-Clause https://github.com/CLIUtils/CLI11 libcli11-dev)
endif()
if(TESSERA_BUILD_PYTHON)
  tessera_notice(pybind11 "${pybind11_version}" BSD-3-Clause https://github.com/pybind/pybind11 pybind11-dev)
endif()

list(JOIN tessera_spdx_packages ",\n" tessera_spdx_packages)
list(JOIN tessera_spdx_relations ",\n" tessera_spdx_relations)
string(TIMESTAMP now "%Y-%m-%dT%H:%M:%SZ" UTC)  # SOURCE_DATE_EPOCH, if it is set
file(CONFIGURE OUTPUT "${tessera_notices}/tessera.spdx.json" CONTENT [[
{"spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT", "name": "tessera-@PROJECT_VERSION@",
 "documentNamespace": "https://spdx.org/spdxdocs/tessera-@PROJECT_VERSION@-LibTorch-@Torch_VERSION@",
 "creationInfo": {"created": "@now@", "creators": ["Tool: CMake-@CMAKE_VERSION@"]},
 "packages": [
    {"SPDXID": "SPDXRef-tessera", "name": "tessera", "versionInfo": "@PROJECT_VERSION@", "downloadLocation": "NOASSERTION",
     "filesAnalyzed": false, "copyrightText": "NOASSERTION", "licenseConcluded": "BSD-3-Clause", "licenseDeclared": "BSD-3-Clause"},
@tessera_spdx_packages@],
 "relationships": [
    {"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": "SPDXRef-tessera"},
@tessera_spdx_relations@]}
]] @ONLY)
