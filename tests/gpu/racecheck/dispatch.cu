// How Triton starts the partitions of a warp-specialised kernel, and nothing else:
//
//   the first warps write a byte for each other warp: which partition it runs
//   barrier of all warps, which the two kinds reach at different instructions
//   each other warp reads its byte, and works
//   barrier of all warps; then the first may write again
//
// By PTX's memory model a barrier orders the writes before it and the reads after it, for all its
// threads, whichever instruction of theirs it is.
//
//   dispatch BARRIER SITES FAULT    exits with 1 where a warp has not read what was written
//     BARRIER  sync (barrier.sync 1, as Triton writes it), aligned (bar.sync 1) or counted
//              (barrier.sync 1, 256)
//     SITES    one (all warps reach the same instruction), two (each kind of warp has its own) or
//              beside (two, and the first warps wait for one another at a barrier of their own)
//     FAULT    none or barrier (the first is left out)

#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

constexpr int kFirst = 128, kThreads = 256, kRounds = 16;
enum Barrier { kSync, kAligned, kCounted };
enum Sites { kOne, kTwo, kBeside };

#define CHECK(call)                                                           \
  do {                                                                        \
    if (auto error = (call); error != 0) {                                    \
      std::fprintf(stderr, "%s: error %d\n", #call, static_cast<int>(error)); \
      return 2;                                                               \
    }                                                                         \
  } while (0)

template <Barrier BARRIER>
__device__ __forceinline__ void barrier() {
  if (BARRIER == kSync) {
    asm volatile("barrier.sync 1;" ::: "memory");
  } else if (BARRIER == kAligned) {
    asm volatile("bar.sync 1;" ::: "memory");
  } else {
    asm volatile("barrier.sync 1, %0;" ::"n"(kThreads) : "memory");
  }
}

template <Barrier BARRIER, Sites SITES, bool FAULT>
__global__ void dispatch(int* out) {
  __shared__ volatile unsigned char state[kThreads / 32];
  const int warp = threadIdx.x / 32;
  int sum = 0;
  if (SITES == kOne) {
    for (int round = 1; round <= kRounds; ++round) {
      if (threadIdx.x < kFirst)
        for (int other = kFirst / 32; other < kThreads / 32; ++other) state[other] = round;
      if (!FAULT) barrier<BARRIER>();
      if (threadIdx.x >= kFirst) sum += state[warp];
      barrier<BARRIER>();
    }
  } else if (threadIdx.x < kFirst) {
    for (int round = 1; round <= kRounds; ++round) {
      for (int other = kFirst / 32; other < kThreads / 32; ++other) state[other] = round;
      if (!FAULT) barrier<BARRIER>();
      if (SITES == kBeside) asm volatile("bar.sync 0, %0;" ::"n"(kFirst) : "memory");
      barrier<BARRIER>();
    }
  } else {
    for (int round = 1; round <= kRounds; ++round) {
      if (!FAULT) barrier<BARRIER>();
      sum += state[warp];
      barrier<BARRIER>();
    }
  }
  out[threadIdx.x] = sum;
}

using Kernel = void (*)(int*);

template <Barrier BARRIER, Sites SITES>
Kernel of_sites(bool fault) {
  return fault ? dispatch<BARRIER, SITES, true> : dispatch<BARRIER, SITES, false>;
}

template <Barrier BARRIER>
Kernel of_barrier(const char* sites, bool fault) {
  if (std::strcmp(sites, "one") == 0) return of_sites<BARRIER, kOne>(fault);
  if (std::strcmp(sites, "two") == 0) return of_sites<BARRIER, kTwo>(fault);
  if (std::strcmp(sites, "beside") == 0) return of_sites<BARRIER, kBeside>(fault);
  return nullptr;
}

Kernel of(const char* barrier, const char* sites, const char* fault) {
  const bool left_out = std::strcmp(fault, "barrier") == 0;
  if (!left_out && std::strcmp(fault, "none") != 0) return nullptr;
  if (std::strcmp(barrier, "sync") == 0) return of_barrier<kSync>(sites, left_out);
  if (std::strcmp(barrier, "aligned") == 0) return of_barrier<kAligned>(sites, left_out);
  if (std::strcmp(barrier, "counted") == 0) return of_barrier<kCounted>(sites, left_out);
  return nullptr;
}

int main(int count, char** arguments) {
  const Kernel kernel = count == 4 ? of(arguments[1], arguments[2], arguments[3]) : nullptr;
  if (kernel == nullptr) {
    std::fprintf(stderr, "usage: dispatch sync|aligned|counted one|two|beside none|barrier\n");
    return 2;
  }
  int* out = nullptr;
  CHECK(cudaMalloc(&out, kThreads * sizeof(int)));
  kernel<<<1, kThreads>>>(out);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  int host[kThreads], wrong = 0;
  CHECK(cudaMemcpy(host, out, sizeof(host), cudaMemcpyDeviceToHost));
  for (int i = kFirst; i < kThreads; ++i) wrong += host[i] != kRounds * (kRounds + 1) / 2;
  std::printf("%d of %d wrong\n", wrong, kThreads - kFirst);
  return wrong != 0;
}
