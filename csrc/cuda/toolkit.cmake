# SPDX-License-Identifier: Apache-2.0
# Enables the CUDA language with the nvcc of the building Python's nvidia-cuda-nvcc wheel, so that a
# build is the same on every machine. A system nvcc is used only where that wheel is missing and
# CUDACXX names it.

# The wheels unpack to <site-packages>/nvidia/cu13/{bin,include,lib,nvvm}.
function(pat_find_in_wheel out package path)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "
import importlib.util, pathlib, sys
spec = importlib.util.find_spec(sys.argv[1])
roots = spec.submodule_search_locations if spec else []
print(next((p for r in roots if (p := pathlib.Path(r, sys.argv[2])).exists()), ''), end='')
" ${package} ${path}
    OUTPUT_VARIABLE found COMMAND_ERROR_IS_FATAL ANY)
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

pat_find_in_wheel(wheel_nvcc nvidia cu13/bin/nvcc)
if(wheel_nvcc)
  set(CMAKE_CUDA_COMPILER ${wheel_nvcc})
  # nvcc looks for the runtime in lib64; the wheel has it in lib.
  cmake_path(GET wheel_nvcc PARENT_PATH bin_dir)
  cmake_path(GET bin_dir PARENT_PATH cuda_root)
  set(CMAKE_CUDA_FLAGS_INIT "-L${cuda_root}/lib")
  set(nvcc_origin "the wheel nvidia-cuda-nvcc of ${Python_EXECUTABLE}")
elseif(DEFINED ENV{CUDACXX})
  set(nvcc_origin "CUDACXX, as ${Python_EXECUTABLE} has no wheel nvidia-cuda-nvcc")
else()
  message(FATAL_ERROR
    "no CUDA compiler: ${Python_EXECUTABLE} has no wheel nvidia-cuda-nvcc and CUDACXX is not set. "
    "Build with pip's build isolation, install the packages of build-system.requires "
    "(pyproject.toml), set CUDACXX=/path/to/nvcc, or build without CUDA "
    "(environment variable PAT_CUDA=OFF; -DPAT_CUDA=OFF for CMake itself).")
endif()

set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_ARCHITECTURES 80-real)  # of CMake's own compiler checks
enable_language(CUDA)
find_library(cuda_runtime cudart_static REQUIRED
  HINTS ${cuda_root}/lib ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})
message(STATUS "CUDA compiler: ${CMAKE_CUDA_COMPILER} (from ${nvcc_origin})")
# Without build isolation the wheel may be another: SGLang itself brings a newer one.
if(NOT CMAKE_CUDA_COMPILER_VERSION VERSION_EQUAL 13.0.88)
  message(WARNING "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is not tested, 13.0.88 is")
endif()
