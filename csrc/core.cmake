# SPDX-License-Identifier: Apache-2.0
# Builds pat_core: both executors, which know no Python. Sets PAT_CUDA_CODE: what the kernels were
# compiled to.

file(GLOB core_sources CONFIGURE_DEPENDS *.cpp cpu/*.cpp)
add_library(pat_core STATIC ${core_sources})
target_link_libraries(pat_core PRIVATE pat_options PUBLIC Threads::Threads)

# For its `omp simd`, which let sums be reordered; no library comes with it.
set_source_files_properties(cpu/attend.cpp PROPERTIES COMPILE_OPTIONS -fopenmp-simd)

# Compiles a target's CUDA sources, to each of the codes that follow: PTX of what compute_X names,
# and machine code for what sm_X names. That of 10.0 and later is all made from the PTX of
# compute_100, which costs one run of nvcc's front end.
function(pat_compile_cuda target)
  target_compile_definitions(${target} PRIVATE $<$<BOOL:${PAT_SANITIZER}>:PAT_SANITIZER>)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v,-warn-spills -Xcompiler=-Wall,-Wextra>
    # nvcc has no option like -ffile-prefix-map, so that line tables hold this build's paths.
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${PAT_LINEINFO}>>:-lineinfo>
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${repository_map}>")
  foreach(code IN LISTS ARGN)
    string(REGEX REPLACE "^(sm|compute)_1[0-9]+$" "compute_100" ptx ${code})
    string(REGEX REPLACE "^sm_" "compute_" ptx ${ptx})
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=${ptx},code=${code}>")
  endforeach()
  set_target_properties(${target} PROPERTIES
    CUDA_ARCHITECTURES OFF  # it has no word for sm_120 from PTX of compute_100
    CUDA_VISIBILITY_PRESET hidden
    CUDA_RUNTIME_LIBRARY None)
endfunction()

if(PAT_CUDA)
  include(cuda/toolkit.cmake)
  file(GLOB cuda_sources CONFIGURE_DEPENDS cuda/*.cu)
  target_sources(pat_core PRIVATE ${cuda_sources})
  # sm_80 runs on GPUs of 8.x, sm_90a on 9.0 alone, sm_100 on 10.x and sm_120 on 12.x. The driver
  # compiles compute_100, which is PTX, for others of 10.0 and later. A wheel has all of them, in
  # twice the time.
  set(all_codes sm_80 sm_90a sm_100 sm_120 compute_100)
  string(REPLACE "," ";" cuda_codes "${PAT_ARCHS}")
  if(NOT cuda_codes)
    set(cuda_codes sm_80 sm_90a)
  elseif(cuda_codes STREQUAL "all")
    set(cuda_codes ${all_codes})
  endif()
  foreach(code IN LISTS cuda_codes)
    if(NOT code IN_LIST all_codes)
      message(FATAL_ERROR "PAT_ARCHS names ${code}: it must be all, or some of ${all_codes}, with "
        "commas between them")
    endif()
  endforeach()
  string(REPLACE ";" " " PAT_CUDA_CODE "${cuda_codes}")
  pat_compile_cuda(pat_core ${cuda_codes})
  foreach(head_dim 256 128 64)  # the longest first
    foreach(fp8 true false)
      set(forward forward_${head_dim}_${fp8})
      add_library(${forward} OBJECT cuda/forward/instantiate.cu)
      target_link_libraries(${forward} PRIVATE pat_options)
      target_compile_definitions(${forward} PRIVATE PAT_HEAD_DIM=${head_dim} PAT_FP8=${fp8})
      # A GPU of 12.x has too little shared memory for head dim 256.
      set(codes ${cuda_codes})
      if(head_dim EQUAL 256)
        list(REMOVE_ITEM codes sm_120)
      endif()
      pat_compile_cuda(${forward} ${codes})
      target_sources(pat_core PRIVATE $<TARGET_OBJECTS:${forward}>)
    endforeach()
  endforeach()
  # MLA runs on Hopper alone.
  set(has_mla 0)
  target_sources(pat_core PRIVATE cuda/mla/check.cu)
  if("sm_90a" IN_LIST cuda_codes)
    set(has_mla 1)
    add_library(mla OBJECT cuda/mla/kernel.cu)
    target_link_libraries(mla PRIVATE pat_options)
    pat_compile_cuda(mla sm_90a)
    target_sources(pat_core PRIVATE $<TARGET_OBJECTS:mla>)
  endif()
  set_source_files_properties(cuda/mla/check.cu PROPERTIES COMPILE_DEFINITIONS PAT_MLA=${has_mla})
  # Linked in, so that importing _C needs neither libcudart nor a driver.
  target_link_libraries(pat_core PUBLIC ${cuda_runtime} ${CMAKE_DL_LIBS} rt)
endif()

# For builds of _C for other Pythons: what they have to know of this library.
file(GENERATE OUTPUT ${CMAKE_BINARY_DIR}/pat_core.cmake CONTENT "\
add_library(pat_core STATIC IMPORTED)
set_target_properties(pat_core PROPERTIES
  IMPORTED_LOCATION \"$<TARGET_FILE:pat_core>\"
  INTERFACE_LINK_LIBRARIES \"$<TARGET_PROPERTY:pat_core,INTERFACE_LINK_LIBRARIES>\")
set(PAT_CUDA ${PAT_CUDA})
set(PAT_CUDA_CODE \"${PAT_CUDA_CODE}\")
")
