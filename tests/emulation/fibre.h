// SPDX-License-Identifier: Apache-2.0
// Stacks that one OS thread switches between. A switch saves six registers on x86-64; elsewhere ucontext does it.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace emulation {

#ifdef __x86_64__

extern "C" void EmulationSwitch(void** save, void* load) __attribute__((visibility("hidden")));
asm(R"(
.text
.type EmulationSwitch, @function
EmulationSwitch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size EmulationSwitch, .-EmulationSwitch
)");

/// A suspended flow of control.
struct Context {
  void* stack_pointer = nullptr;

  void Start(char* stack, size_t bytes, void (*entry)()) {
    void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + bytes) / 16 * 16);
    *--top = nullptr;  // the entry does not return; this aligns its frame as a call would
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer = top;
  }
  static void Switch(Context& from, Context& to) { EmulationSwitch(&from.stack_pointer, to.stack_pointer); }
};

#else

struct Context {
  ucontext_t context;

  void Start(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    makecontext(&context, entry, 0);
  }
  static void Switch(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
};

#endif

/// Return stack number `i`, with a page below it that faults. Stacks are kept for the next block.
inline char* StackOf(int i) {
  constexpr size_t GUARD = 4096;
  constexpr int MOST = 16 * 1024;
  static char* stacks[MOST];
  if (i >= MOST) {
    std::fprintf(stderr, "emulation: a cluster, or a cooperative grid, may have %d threads\n", MOST);
    std::abort();
  }
  if (stacks[i] == nullptr) {
    constexpr size_t BYTES = 256 * 1024;
    void* p = mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p, GUARD, PROT_NONE) != 0) std::abort();
    stacks[i] = static_cast<char*>(p);
  }
  return stacks[i];
}
constexpr size_t STACK_BYTES = 256 * 1024;

}  // namespace emulation
