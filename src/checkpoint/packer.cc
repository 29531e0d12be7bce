#include "checkpoint/packer.h"

#include <algorithm>
#include <cstring>

namespace outlast {

Packer::Packer(DType dtype, const Box& held, const Shape& strides, const Box& box) {
  const auto element = static_cast<uint64_t>(BitsOf(dtype)) / 8;
  const auto stride = [&](int i) { return static_cast<uint64_t>(strides[i]) * element; };
  const auto count = [&](int i) { return static_cast<uint64_t>(box.extent[i]); };
  int inner = box.extent.rank();
  run_ = element;
  while (inner > 0 && (count(inner - 1) == 1 || stride(inner - 1) == run_)) run_ *= count(--inner);
  for (int i = 0; i < box.extent.rank(); ++i) {
    first_ += static_cast<uint64_t>(box.offset[i] - held.offset[i]) * stride(i);
    if (i >= inner || count(i) == 1) continue;
    count_[static_cast<size_t>(dimensions_)] = count(i);
    stride_[static_cast<size_t>(dimensions_++)] = stride(i);
  }
}

// Calls move(place in the region, place from `at`, bytes) for each run that begins or goes on in
// [at, at + bytes). kRun: the bytes of a run where they are known to the compiler; else 0.
template <uint64_t kRun, typename Move>
void Packer::Walk(uint64_t at, uint64_t bytes, Move move) const {
  const uint64_t run = kRun != 0 ? kRun : run_;
  std::array<uint64_t, kMaxDimensions> index{};
  uint64_t place = first_;
  uint64_t number = at / run;
  for (int i = dimensions_ - 1; i >= 0; --i) {
    const auto d = static_cast<size_t>(i);
    index[d] = number % count_[d];
    number /= count_[d];
    place += index[d] * stride_[d];
  }
  uint64_t inside = at % run;  // of the run
  for (uint64_t done = 0; done < bytes;) {
    if (kRun != 0 && inside == 0 && bytes - done >= kRun) {
      move(place, done, kRun);
      done += kRun;
    } else {
      const uint64_t now = std::min(run - inside, bytes - done);
      move(place + inside, done, now);
      done += now;
      inside = 0;
    }
    for (int i = dimensions_ - 1; i >= 0; --i) {
      const auto d = static_cast<size_t>(i);
      place += stride_[d];
      if (++index[d] < count_[d]) break;
      place -= stride_[d] * count_[d];
      index[d] = 0;
    }
  }
}

template <typename Move>
void Packer::WalkAny(uint64_t at, uint64_t bytes, Move move) const {
  switch (run_) {
    case 1:
      return Walk<1>(at, bytes, move);
    case 2:
      return Walk<2>(at, bytes, move);
    case 4:
      return Walk<4>(at, bytes, move);
    case 8:
      return Walk<8>(at, bytes, move);
    default:
      return Walk<0>(at, bytes, move);
  }
}

void Packer::Gather(const std::byte* region, uint64_t at, std::span<std::byte> to) const {
  WalkAny(at, to.size(), [&](uint64_t place, uint64_t done, uint64_t bytes) {
    std::memcpy(to.data() + done, region + place, bytes);
  });
}

void Packer::Scatter(std::span<const std::byte> from, uint64_t at, std::byte* region) const {
  WalkAny(at, from.size(), [&](uint64_t place, uint64_t done, uint64_t bytes) {
    std::memcpy(region + place, from.data() + done, bytes);
  });
}

}  // namespace outlast
