# A CMake toolchain: zig's C++ compiler and libraries for another platform. build.py sets the variables.
set(CMAKE_SYSTEM_NAME ${HOTSET_SYSTEM})
set(CMAKE_SYSTEM_PROCESSOR ${HOTSET_PROCESSOR})
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES HOTSET_SYSTEM HOTSET_PROCESSOR HOTSET_ZIG HOTSET_ZIG_TARGET)
set(CMAKE_CXX_COMPILER ${HOTSET_ZIG} c++ -target ${HOTSET_ZIG_TARGET})
set(CMAKE_AR ${HOTSET_ZIG_TOOLS}/ar)
set(CMAKE_RANLIB ${HOTSET_ZIG_TOOLS}/ranlib)
set(CMAKE_OSX_SYSROOT "")
if(HOTSET_SYSTEM STREQUAL "Darwin")
  set(HOTSET_NEON_OPTIONS -mcpu=apple_m1)
else()
  set(HOTSET_NEON_OPTIONS -mcpu=generic+v8_2a+dotprod+fullfp16)
endif()
if(HOTSET_PROCESSOR MATCHES "x86_64|AMD64") # AVX2 is required there, so only tests use the reference
  set(HOTSET_SCALAR_OPTIONS -Os -fno-vectorize -fno-slp-vectorize)
endif()
# Only the module is linked; CMake's checks of the compiler link nothing. Otherwise zig would first compile a debug C++
# library, for minutes.
set(CMAKE_CXX_COMPILER_ID_RUN TRUE)
set(CMAKE_CXX_COMPILER_ID Clang)
set(CMAKE_CXX_COMPILER_VERSION 22)
set(CMAKE_CXX_COMPILER_FRONTEND_VARIANT GNU)
set(CMAKE_CXX_STANDARD_COMPUTED_DEFAULT 17)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE) # it is empty
if(HOTSET_SYSTEM STREQUAL "Linux") # libc++ is linked statically and hidden: another module may have its own
  set(CMAKE_MODULE_LINKER_FLAGS_INIT "-Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map")
elseif(HOTSET_SYSTEM STREQUAL "Windows") # nanobind does not strip there; saves 0.4 MB
  set(CMAKE_MODULE_LINKER_FLAGS_INIT -s)
endif()
