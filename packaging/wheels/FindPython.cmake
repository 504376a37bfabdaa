# The results of find_package(Python) in a cross build (build.py): the headers of the target's Python and, on
# Windows, its import libraries. There is no interpreter to run.
set(Python_FOUND TRUE)
set(Python_VERSION ${HOTSET_PYTHON_VERSION})
set(Python_INTERPRETER_ID Python)
set(Python_INCLUDE_DIRS ${HOTSET_PYTHON_HEADERS})
set(Python_SOABI cpython-${HOTSET_PYTHON_VERSION}-cross) # only for the name, which build.py changes
set(Python_SOSABI abi3)
add_executable(Python::Interpreter IMPORTED)
add_library(Python::Module INTERFACE IMPORTED)
target_include_directories(Python::Module INTERFACE ${HOTSET_PYTHON_HEADERS})
target_link_libraries(Python::Module INTERFACE ${HOTSET_PYTHON_LIBRARY})
if(Python_VERSION VERSION_GREATER_EQUAL 3.12) # nanobind builds for the stable ABI if this exists
  add_library(Python::SABIModule ALIAS Python::Module)
endif()
