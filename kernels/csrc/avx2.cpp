// The kernels for AVX2, without int8 dot products and with them.
#include "kernels.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace {
namespace avx2 {
#include "kernels.inc"
}
}  // namespace
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avxvnni")
#define QUIRE_VNNI
#define QUIRE_OTHERS avx2
namespace {
namespace avx_vnni {
#include "kernels.inc"
}
}  // namespace
#undef QUIRE_VNNI
#undef QUIRE_OTHERS
#pragma GCC pop_options

const Kernels avx2_kernels = avx2::KERNELS;
const Kernels avx_vnni_kernels = avx_vnni::KERNELS;
