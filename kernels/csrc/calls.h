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

// x, weight and out are bfloat16 or float32, all alike; rows may be strided, elements of a row not.
struct NormCall {
  const void* hidden;    // [rows, size]
  int64_t hidden_stride; // elements between rows
  void* residual;        // [rows, size], added to and written; or null
  int64_t residual_stride;
  const void* weight;    // [size]
  void* out;             // [rows, size], without gaps
  int64_t rows;
  int64_t size;
  float eps;
  int32_t is_float;
};

struct ActivationCall {
  const void* gate_up;  // [rows, 2 * size]
  int64_t gate_up_stride;
  void* out;            // [rows, size], without gaps
  int64_t rows;
  int64_t size;
  int32_t is_float;
};

struct QuantizeCall {
  const void* x;  // [rows, size]
  int64_t x_stride;
  uint8_t* out;   // [rows, size], without gaps
  float* scales;  // [rows]
  int64_t rows;
  int64_t size;
  int32_t is_float;
};

struct EmbeddingCall {
  const int64_t* token_ids;  // [rows]
  const void* weight;        // packed, see linear.inc
  const float* scales;       // int8 only, else null
  void* out;                 // [rows, size], without gaps
  int64_t rows;
  int64_t size;
  int32_t is_float;
};

struct SampleCall {
  const void* logits;        // [rows, vocab_size], bfloat16 or float32
  int64_t logits_stride;
  const float* temperature;  // [rows], 0 is greedy; null, and all that follows with it: every row is greedy
  const float* min_p;        // [rows]
  const int64_t* top_k;      // [rows]
  const float* top_p;        // [rows]
  const int64_t* seeds;      // [rows]
  const int64_t* positions;  // [rows]
  int64_t* token_ids;        // [rows], written
  int64_t rows;
  int64_t vocab_size;
  int32_t is_float;
};

struct NoiseCall {
  const int64_t* seeds;
  const int64_t* positions;
  float* out;  // [rows, vocab_size], without gaps
  int64_t rows;
  int64_t vocab_size;
};

struct BitmaskCall {
  float* logits;           // [any, vocab_size]
  int64_t logits_stride;
  const int64_t* row_ids;  // [rows], which rows of the logits
  const int32_t* bitmask;  // [rows, words]
  int64_t words;
  int64_t rows;
  int64_t vocab_size;
};
