// C = (scale A B^T)^2 + bias, for A (rows, depth) and B (columns, depth) bfloat16: two roles, two stages. A kernel as
// other projects write them; the emulator's tests run what nvcc -ptx -arch=sm_90a -O3 made of it (gemm.ptx).
#include <cuda.h>
#include <cuda_bf16.h>
#include <cstdint>
constexpr int M = 64, N = 16, K = 64, STAGES = 2, CONSUMERS = 128;

__device__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra PASSED;\nbra AGAIN;\nPASSED:\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}
__device__ void load(void* target, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(shared_address(target)), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y) : "memory");
}
__device__ uint64_t descriptor(const void* tile) {  // K-major, 128-byte swizzle, 8 rows every 1024 bytes
  return (uint64_t)(shared_address(tile) >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
         (uint64_t)1 << 62;
}
__device__ void multiply(float (&d)[8], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b));
}
struct Epilogue { float scale; int columns; int rows; };
__device__ float square_plus(float x, float y) { return fmaf(x, x, y); }

extern "C" __global__ void __launch_bounds__(160)
    gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, float* __restrict__ c,
         const float* bias, int depth, Epilogue epilogue) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __nv_bfloat16* tile_a = reinterpret_cast<__nv_bfloat16*>(dynamic);
  __nv_bfloat16* tile_b = tile_a + STAGES * M * K;
  __shared__ uint64_t full[STAGES], empty[STAGES];
  __shared__ float row_bias[M];
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&full[s])), "r"(1));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&empty[s])), "r"(CONSUMERS));
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  if (threadIdx.x < M) row_bias[threadIdx.x] = bias[blockIdx.y * M + threadIdx.x];
  __syncthreads();
  const int steps = (depth + K - 1) / K;
  if (threadIdx.x >= CONSUMERS) {
    if (threadIdx.x == CONSUMERS)
#pragma unroll 1
      for (int i = 0; i < steps; i++) {
        int s = i % STAGES;
        if (i >= STAGES) wait(&empty[s], (i / STAGES - 1) & 1);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&full[s])),
                     "r"((M + N) * K * 2) : "memory");
        load(tile_a + s * M * K, &a, &full[s], i * K, blockIdx.y * M);
        load(tile_b + s * N * K, &b, &full[s], i * K, blockIdx.x * N);
      }
    return;
  }
  float d[8];
#pragma unroll
  for (int i = 0; i < 8; i++) d[i] = 0;
  #pragma unroll 1
  for (int i = 0; i < steps; i++) {
    int s = i % STAGES;
    wait(&full[s], i / STAGES & 1);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < K / 16; k++)
      multiply(d, descriptor(tile_a + s * M * K) + 2 * k, descriptor(tile_b + s * N * K) + 2 * k);
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&empty[s])) : "memory");
  }
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int r = row + 8 * (i >> 1 & 1), column = blockIdx.x * N + 8 * (i >> 2) + 2 * (threadIdx.x % 4) + (i & 1);
    int global_row = blockIdx.y * M + r;
    if (global_row < epilogue.rows && column < epilogue.columns)
      c[(size_t)global_row * epilogue.columns + column] = square_plus(d[i] * epilogue.scale, row_bias[r]);
  }
}
