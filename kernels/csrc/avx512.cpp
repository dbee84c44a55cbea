// The kernels for AVX-512, without int8 dot products and with them.
#include "kernels.h"

#define QUIRE_AVX512
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2")
namespace {
namespace avx512 {
#include "kernels.inc"
}
}  // namespace
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,avx2")
#define QUIRE_VNNI
#define QUIRE_OTHERS avx512
namespace {
namespace avx512_vnni {
#include "kernels.inc"
}
}  // namespace
#undef QUIRE_VNNI
#undef QUIRE_OTHERS
#pragma GCC pop_options

const Kernels avx512_kernels = avx512::KERNELS;
const Kernels avx512_vnni_kernels = avx512_vnni::KERNELS;
