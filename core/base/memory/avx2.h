#pragma once

// For loops that are compiled twice: the AVX2 version runs where the processor has AVX2. Not
// target_clones: its resolvers run before the sanitizers are ready. Not FMA: it would round
// differently.
#if defined(__x86_64__) && defined(__GNUC__)
#define TESSERA_TARGET_AVX2 __attribute__((target("avx2")))
#define TESSERA_HAS_AVX2 (__builtin_cpu_supports("avx2") != 0)
#else
#define TESSERA_TARGET_AVX2
#define TESSERA_HAS_AVX2 false
#endif
#define TESSERA_INLINE inline __attribute__((always_inline))
