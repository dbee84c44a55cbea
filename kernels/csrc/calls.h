// What the kernels are called with: plain structures, which quire_kernels/cpu.py fills. Keep both in step.
#pragma once
#include <cstdint>

enum LinearKind : int32_t { LINEAR_BF16 = 0, LINEAR_FLOAT32 = 1, LINEAR_INT8 = 2 };

struct LinearCall {
  const void* x;                  // [rows, in_features], bfloat16, float32 or uint8; readable up to a whole group
  int64_t x_stride;               // elements between rows
  const void* weight;             // packed, see linear.inc
  const float* bias;              // [panels * 32], or null
  const float* x_scales;          // [rows], int8 only
  const float* weight_scales;     // [panels * 32], int8 only
  const int32_t* weight_offsets;  // [panels * 32], 128 times the sum of each feature's weights, int8 only
  void* out;                      // [rows, out_features], bfloat16 or float32
  int64_t out_stride;
  int64_t rows;
  int64_t in_features;
  int64_t out_features;
  int32_t kind;                   // LinearKind
  int32_t out_is_float;
  int32_t silu_and_mul;           // panels hold 16 features of the gate, then 16 of the other half; out has half as many
};
