// The one matrix product that the model needs, in blocked loops over vectors that g++ and clang++
// lower to what the machine has.
#pragma once

#include <cstddef>
#include <vector>

// A view of a row-major matrix, or of its transpose: element (i, j) is data[i * row_stride + j *
// column_stride].
struct MatrixView {
  const float* data;
  ptrdiff_t row_stride;
  ptrdiff_t column_stride;
};

// c[rows, columns] += a[rows, inner] * b[inner, columns]; b and c are row-major and dense.
// Sums over `inner` in ascending order for each element, whatever the sizes: bit-identical from run
// to run. `scratch` keeps its memory between calls.
void MultiplyAdd(int rows, int columns, int inner, MatrixView a, const float* b, float* c,
                 std::vector<float>& scratch);

// target[columns, rows] = the transpose of source[rows, columns], both dense.
void Transpose(int rows, int columns, const float* source, float* target);
