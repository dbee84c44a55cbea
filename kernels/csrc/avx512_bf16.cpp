// The kernels for AVX-512 with bfloat16 and int8 dot products, and for AMX.
#include "kernels.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,avx2")
#define QUIRE_AVX512
#define QUIRE_VNNI
#define QUIRE_AVX512_BF16
namespace {
namespace avx512_bf16 {
#include "kernels.inc"
}
}  // namespace
#undef QUIRE_AVX512
#undef QUIRE_VNNI
#undef QUIRE_AVX512_BF16
#pragma GCC pop_options

const Kernels avx512_bf16_kernels = avx512_bf16::KERNELS;
