// What the epilogue of triton.warp_specialized does with its staging buffers, and nothing else:
//
//   threads write shared memory           (generic proxy)
//   fence.proxy.async, barrier            their writes are seen by the async proxy
//   one thread: bulk copy to memory, commit_group, wait_group.read
//                                         the copy has read shared memory
//   barrier                               and the others know it
//   threads write the same memory again
//
// By PTX's memory model this is ordered: completion of a bulk async-group is visible to the thread
// that waits for it, and the barrier orders that wait before everybody's next write. Variants take
// one thing away each, or replace the copy by reads of the one thread, which racecheck should know.
//
//   staging COPY BARRIER FAULT      exits with 1 where what was copied is not what was written
//     COPY     plain, bulk (cp.async.bulk) or tensor (cp.async.bulk.tensor.2d)
//     BARRIER  all (bar.sync of the block) or named (bar.sync 2, 128 beside a fifth warp)
//     FAULT    none, barrier (the second is left out) or wait (wait_group.read is)

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

constexpr int kThreads = 128, kRounds = 16, kColumns = 64, kRows = 32;
enum Copy { kPlain, kBulk, kTensor };
enum Barrier { kAll, kNamed };
enum Fault { kNone, kBarrier, kWait };

#define CHECK(call)                                                      \
  do {                                                                   \
    if (auto error = (call); error != 0) {                               \
      std::fprintf(stderr, "%s: error %d\n", #call, static_cast<int>(error)); \
      return 2;                                                          \
    }                                                                    \
  } while (0)

__device__ __forceinline__ void barrier(Barrier kind) {
  if (kind == kNamed) {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 0;" ::: "memory");
  }
}

template <Copy COPY, Barrier BARRIER, Fault FAULT>
__global__ void stage(const __grid_constant__ CUtensorMap map, uint4* out) {
  __shared__ alignas(128) uint4 buffer[kThreads * 2];
  static_assert(sizeof(buffer) == kRows * kColumns * 2);
  const int thread = threadIdx.x;
  if (thread >= kThreads) return;  // the fifth warp
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(buffer));
  for (int round = 0; round < kRounds; ++round) {
    const unsigned value = round * 1000 + thread;
    buffer[thread] = make_uint4(value, value, value, value);
    buffer[thread + kThreads] = make_uint4(~value, value, ~value, value);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier(BARRIER);
    if (thread == 0) {
      uint4* target = out + round * kThreads * 2;
      if (COPY == kPlain) {
        for (int i = 0; i < 2 * kThreads; ++i) target[i] = buffer[i];
      } else if (COPY == kBulk) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     ::"l"(target), "r"(shared), "n"(sizeof(buffer)) : "memory");
      } else {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                     ::"l"(&map), "r"(0), "r"(round * kRows), "r"(shared) : "memory");
      }
      if (COPY != kPlain) {
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        if (FAULT != kWait) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      }
    }
    if (FAULT != kBarrier) barrier(BARRIER);
  }
  if (COPY != kPlain && thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

using Kernel = void (*)(CUtensorMap, uint4*);

template <Copy COPY, Barrier BARRIER>
Kernel of_fault(const std::string& fault) {
  if (fault == "none") return stage<COPY, BARRIER, kNone>;
  if (fault == "barrier") return stage<COPY, BARRIER, kBarrier>;
  if (fault == "wait" && COPY != kPlain) return stage<COPY, BARRIER, kWait>;
  return nullptr;
}

template <Copy COPY>
Kernel of_barrier(const std::string& barrier, const std::string& fault) {
  if (barrier == "all") return of_fault<COPY, kAll>(fault);
  if (barrier == "named") return of_fault<COPY, kNamed>(fault);
  return nullptr;
}

Kernel of(const std::string& copy, const std::string& barrier, const std::string& fault) {
  if (copy == "plain") return of_barrier<kPlain>(barrier, fault);
  if (copy == "bulk") return of_barrier<kBulk>(barrier, fault);
  if (copy == "tensor") return of_barrier<kTensor>(barrier, fault);
  return nullptr;
}

int main(int count, char** arguments) {
  const Kernel kernel = count == 4 ? of(arguments[1], arguments[2], arguments[3]) : nullptr;
  if (kernel == nullptr) {
    std::fprintf(stderr, "usage: staging plain|bulk|tensor all|named none|barrier|wait\n");
    return 2;
  }
  const size_t elements = static_cast<size_t>(kRounds) * kThreads * 2;
  uint4* out = nullptr;
  CHECK(cudaMalloc(&out, elements * sizeof(uint4)));
  CHECK(cudaMemset(out, 0, elements * sizeof(uint4)));
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                         cudaEnableDefault, &found));
  CUtensorMap map;
  const cuuint64_t sizes[] = {kColumns, kRounds * kRows}, strides[] = {kColumns * 2};
  const cuuint32_t box[] = {kColumns, kRows}, steps[] = {1, 1};
  CHECK(reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, out, sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  const int threads = std::strcmp(arguments[2], "named") == 0 ? kThreads + 32 : kThreads;
  kernel<<<1, threads>>>(map, out);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  std::vector<uint4> host(elements);
  CHECK(cudaMemcpy(host.data(), out, elements * sizeof(uint4), cudaMemcpyDeviceToHost));
  size_t wrong = 0;
  for (size_t i = 0; i < elements; ++i) {
    const unsigned round = i / (2 * kThreads), place = i % (2 * kThreads);
    const unsigned value = round * 1000 + place % kThreads;
    wrong += host[i].x != (place < kThreads ? value : ~value) || host[i].y != value;
  }
  std::printf("%zu of %zu wrong\n", wrong, elements);
  return wrong != 0;
}
