// All-reduce and all-gather between processes that map one segment of memory.
//
// Each rank has a slot: the number of its last call, what that call was, and two buffers
// that calls use in turn. A call writes its slot, waits until every other rank's slot has
// the same number, compares what the calls are, and reads all buffers. A rank can be one
// call ahead of another, never two: it would have waited. So two buffers are enough.
//
// The layout is also in segment.py; LAYOUT must change with it in both.

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

namespace {

constexpr uint32_t LAYOUT = 0x72784D31;
constexpr uint32_t MAX_RANKS = 64;
constexpr size_t SLOTS_AT = 1024;
constexpr size_t DATA_AT = 32768;
constexpr size_t BLOCK = 2048;                  // numbers that are added at once, in L1
constexpr uint64_t NAP_NS = 10'000'000;         // a sleeper looks at the stop word so often
constexpr uint32_t LOOKS = 32;                  // between two readings of the clock

enum Status : int { DONE = 0, STOPPED = 1, DESYNC = 2, SILENT = 3 };
// As segment.py's Why: the low byte of the stop word, below the number of who wrote it.
enum Why : uint32_t { WHY_CLOSED = 1, WHY_DESYNC = 2, WHY_SILENT = 3 };
enum Kind : uint32_t { REDUCE_F32 = 0, REDUCE_BF16 = 1, REDUCE_F16 = 2, GATHER = 3 };

struct Call {
    uint64_t digest;
    uint64_t bytes;
    uint64_t kind;
};

struct Slot {
    // Numbers of 64 bits never come round; sleepers watch the low half of this one.
    alignas(64) std::atomic<uint64_t> number;
    std::atomic<uint32_t> sleepers;
    alignas(64) Call calls[2];
};

struct Head {
    uint32_t layout;
    uint32_t ranks;
    uint64_t capacity;
    std::atomic<uint32_t> stop;
};

static_assert(sizeof(Slot) * MAX_RANKS + SLOTS_AT <= DATA_AT);
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

struct Group {
    std::byte *base;
    size_t length;
    Head *head;
    Slot *slots;
    uint32_t rank;
    uint32_t ranks;
    size_t capacity;
    uint64_t spin_ns;
    uint64_t timeout_ns;
    uint64_t number;  // of this rank's last call

    // What a call that failed found out.
    uint32_t culprit;
    Call other;

    std::byte *buffer(uint32_t rank) const {
        return base + DATA_AT + (rank * 2 + (number & 1)) * capacity;
    }
};

uint64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return uint64_t(time.tv_sec) * 1'000'000'000 + uint64_t(time.tv_nsec);
}

void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: the word is in memory of several processes.
void sleep_on(std::atomic<uint64_t> &word, uint64_t seen, uint64_t nap_ns) {
    timespec nap{time_t(nap_ns / 1'000'000'000), long(nap_ns % 1'000'000'000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, uint32_t(seen), &nap, nullptr, 0);
}

void wake_all(std::atomic<uint64_t> &word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// The first reason stays: others follow from it.
void stop(Group &group, uint32_t why) {
    uint32_t running = 0;
    group.head->stop.compare_exchange_strong(running, why | (group.rank + 1) << 8);
    for (uint32_t rank = 0; rank < group.ranks; ++rank) wake_all(group.slots[rank].number);
}

bool stopped(const Group &group) {
    return group.head->stop.load(std::memory_order_acquire) != 0;
}

// A rank that was there before the stop is there: its last call ends well. `began` is when
// this call had to wait first, 0 before: the deadline is one for all ranks.
int wait_for(Group &group, uint32_t rank, uint64_t &began) {
    Slot &slot = group.slots[rank];
    auto there = [&] { return slot.number.load(std::memory_order_acquire) >= group.number; };
    if (there()) return DONE;
    uint64_t now = now_ns();
    if (!began) began = now;
    while (now - began < group.spin_ns) {
        for (uint32_t look = 0; look < LOOKS; ++look) {
            if (there()) return DONE;
            pause_core();
        }
        now = now_ns();
    }
    while (true) {
        if (there()) return DONE;
        if (stopped(group)) return there() ? DONE : STOPPED;
        if (now - began >= group.timeout_ns) {
            group.culprit = rank;
            stop(group, WHY_SILENT);
            return SILENT;
        }
        // Counted before looking once more, so that either this rank sees the number or
        // its writer sees the count (both in one total order).
        slot.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint64_t seen = slot.number.load(std::memory_order_seq_cst);
        const uint64_t left = group.timeout_ns - (now - began);
        if (seen < group.number) sleep_on(slot.number, seen, std::min(left, NAP_NS));
        slot.sleepers.fetch_sub(1, std::memory_order_relaxed);
        now = now_ns();
    }
}

// Publish this rank's slot, whose buffer is written, and meet all others.
int meet(Group &group, const Call &own) {
    const uint32_t turn = group.number & 1;
    Slot &slot = group.slots[group.rank];
    slot.calls[turn] = own;
    slot.number.store(group.number, std::memory_order_seq_cst);
    if (slot.sleepers.load(std::memory_order_seq_cst)) wake_all(slot.number);
    uint64_t began = 0;
    for (uint32_t rank = 0; rank < group.ranks; ++rank) {
        if (int status = wait_for(group, rank, began)) return status;
        const Call other = group.slots[rank].calls[turn];
        if (other.digest != own.digest || other.bytes != own.bytes || other.kind != own.kind) {
            group.culprit = rank;
            group.other = other;
            stop(group, WHY_DESYNC);
            return DESYNC;
        }
    }
    return DONE;
}

// Begin a call's next part: write it into this rank's buffer and meet.
int bring(Group &group, const Call &call, const std::byte *part, size_t bytes) {
    if (stopped(group)) return STOPPED;
    ++group.number;
    std::memcpy(group.buffer(group.rank), part, bytes);
    return meet(group, call);
}

float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// A number format: how it is widened to float32, and rounded (to even) back.
struct F32 {
    using Word = float;
    static float widen(Word word) { return word; }
    static Word narrow(float value) { return value; }
};

struct BF16 {
    using Word = uint16_t;
    static float widen(Word word) { return bits_to_float(uint32_t(word) << 16); }
    static Word narrow(float value) {
        const uint32_t bits = float_to_bits(value);
        const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        return Word(value != value ? (bits >> 16) | 0x40 : rounded);
    }
};

struct F16 {
    using Word = uint16_t;
    // The exponents differ by 112. Subnormal ones are integers times 2^-24.
    static float widen(Word word) {
        const uint32_t sign = uint32_t(word & 0x8000) << 16;
        const uint32_t exponent = (word >> 10) & 31, fraction = word & 1023;
        const float small = float(int32_t(fraction)) * 0x1p-24f;
        const uint32_t shifted = exponent == 31 ? 255 : exponent + 112;
        const uint32_t normal = shifted << 23 | fraction << 13;
        return bits_to_float(sign | (exponent ? normal : float_to_bits(small)));
    }
    static Word narrow(float value) {
        const uint32_t bits = float_to_bits(value), size = bits & 0x7FFFFFFF;
        // Adding 0.5 rounds a subnormal at the bit that it ends with.
        const uint32_t small = float_to_bits(bits_to_float(size) + 0.5f) - float_to_bits(0.5f);
        const uint32_t normal = (size - (112u << 23) + 0xFFF + ((size >> 13) & 1)) >> 13;
        uint32_t word = size < (113u << 23) ? small : normal;
        word = size >= 0x47800000 ? 0x7C00 : word;  // 65536 and more
        word = size > 0x7F800000 ? 0x7E00 : word;   // not a number
        return Word(word | ((bits >> 16) & 0x8000));
    }
};

// Every rank adds the same numbers in the same order, so all get the same bits.
template <typename Format>
void add_up(const Group &group, std::byte *out, size_t bytes) {
    using Word = typename Format::Word;
    auto *sums = reinterpret_cast<Word *>(out);
    const size_t count = bytes / sizeof(Word);
    float total[BLOCK];
    for (size_t at = 0; at < count; at += BLOCK) {
        const size_t size = std::min(BLOCK, count - at);
        const auto *first = reinterpret_cast<const Word *>(group.buffer(0)) + at;
        for (size_t i = 0; i < size; ++i) total[i] = Format::widen(first[i]);
        for (uint32_t rank = 1; rank < group.ranks; ++rank) {
            const auto *next = reinterpret_cast<const Word *>(group.buffer(rank)) + at;
            for (size_t i = 0; i < size; ++i) total[i] += Format::widen(next[i]);
        }
        for (size_t i = 0; i < size; ++i) sums[at + i] = Format::narrow(total[i]);
    }
}

}  // namespace

extern "C" {

struct Failure {
    uint64_t own_digest, other_digest;
    uint64_t own_bytes, other_bytes;
    uint32_t culprit, stop;
};

// Map the segment; null when it is none for these ranks.
void *group_open(int fd, uint32_t rank, uint32_t ranks, uint64_t spin_ns, uint64_t timeout_ns) {
    struct stat about;
    if (fstat(fd, &about) || size_t(about.st_size) < DATA_AT) return nullptr;
    const size_t length = size_t(about.st_size);
    void *base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) return nullptr;
    auto *head = static_cast<Head *>(base);
    const bool fits = head->layout == LAYOUT && head->ranks == ranks && rank < ranks &&
                      ranks <= MAX_RANKS && head->capacity && head->capacity % 64 == 0 &&
                      (length - DATA_AT) / 2 / ranks >= head->capacity;
    auto *group = fits ? new (std::nothrow) Group{} : nullptr;
    if (!group) {
        munmap(base, length);
        return nullptr;
    }
    group->base = static_cast<std::byte *>(base);
    group->length = length;
    group->head = head;
    group->slots = reinterpret_cast<Slot *>(group->base + SLOTS_AT);
    group->rank = rank;
    group->ranks = ranks;
    group->capacity = head->capacity;
    group->spin_ns = spin_ns;
    group->timeout_ns = timeout_ns;
    return group;
}

// Sum `bytes` at `data` over all ranks, in place. `kind`: 0 float32, 1 bfloat16, 2 float16.
int group_reduce(void *handle, void *data, uint64_t bytes, uint32_t kind, uint64_t digest) {
    auto &group = *static_cast<Group *>(handle);
    auto *at = static_cast<std::byte *>(data);
    const Call call{digest, bytes, kind};
    size_t left = bytes;
    do {
        const size_t part = std::min(left, group.capacity);
        if (int status = bring(group, call, at, part)) return status;
        if (kind == REDUCE_F32) add_up<F32>(group, at, part);
        else if (kind == REDUCE_BF16) add_up<BF16>(group, at, part);
        else add_up<F16>(group, at, part);
        at += part;
        left -= part;
    } while (left);
    return DONE;
}

// Write `bytes` of each rank, by rank, to `out`.
int group_gather(void *handle, const void *data, void *out, uint64_t bytes, uint64_t digest) {
    auto &group = *static_cast<Group *>(handle);
    const Call call{digest, bytes, GATHER};
    size_t at = 0;
    do {
        const size_t part = std::min(size_t(bytes) - at, group.capacity);
        const auto *own = static_cast<const std::byte *>(data) + at;
        if (int status = bring(group, call, own, part)) return status;
        for (uint32_t rank = 0; rank < group.ranks; ++rank)
            std::memcpy(static_cast<std::byte *>(out) + rank * bytes + at, group.buffer(rank), part);
        at += part;
    } while (at < bytes);
    return DONE;
}

// What the call that failed last found out.
void group_failure(void *handle, Failure *failure) {
    auto &group = *static_cast<Group *>(handle);
    const Call &own = group.slots[group.rank].calls[group.number & 1];
    *failure = {own.digest,        group.other.digest, own.bytes, group.other.bytes,
                group.culprit, group.head->stop.load()};
}

// Unmap; with `leave`, the other ranks' next calls fail at once.
void group_close(void *handle, int leave) {
    auto *group = static_cast<Group *>(handle);
    if (leave) stop(*group, WHY_CLOSED);
    munmap(group->base, group->length);
    delete group;
}
}
