# A CMake toolchain: zig's C++ compiler and libraries for another platform. build.py gives the variables.
set(CMAKE_SYSTEM_NAME ${HOTSET_SYSTEM})
set(CMAKE_SYSTEM_PROCESSOR ${HOTSET_PROCESSOR})
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES HOTSET_SYSTEM HOTSET_PROCESSOR HOTSET_ZIG HOTSET_ZIG_TARGET)
set(CMAKE_CXX_COMPILER ${HOTSET_ZIG} c++ -target ${HOTSET_ZIG_TARGET})
set(CMAKE_AR ${HOTSET_ZIG_TOOLS}/ar)
set(CMAKE_RANLIB ${HOTSET_ZIG_TOOLS}/ranlib)
set(CMAKE_OSX_SYSROOT "")
# CMake's own checks compile and do not link: that would need a C++ library for debugging, minutes of compiling.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
if(HOTSET_SYSTEM STREQUAL "Linux") # libc++ is linked in and stays in: another module may have its own
  set(CMAKE_MODULE_LINKER_FLAGS_INIT "-Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map")
endif()
