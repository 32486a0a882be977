// SPDX-License-Identifier: Apache-2.0
// Element types, as Python numbers them for both executors.
#pragma once

namespace pat {

// Of q, out, partials and attention sinks.
enum class DType : int { kF32 = 0, kBF16 = 1, kF16 = 2 };

// Of the K/V cache: q's type, or float8_e4m3fn, whose values k_scale and v_scale multiply.
enum class KVDType : int { kSame = 0, kE4M3 = 1 };

}  // namespace pat
