/* Selection without sorting. */
#ifndef STRATAGATE_SELECT_H
#define STRATAGATE_SELECT_H

/* The k-th largest of n values, which are reordered. */
static inline float kth_largest(float *values, int n, int k) {
    int low = 0, high = n - 1;
    k--;
    while (low < high) {
        float pivot = values[(low + high) / 2];
        int i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot)
                i++;
            while (values[j] < pivot)
                j--;
            if (i <= j) {
                float swap = values[i];
                values[i++] = values[j];
                values[j--] = swap;
            }
        }
        if (k <= j)
            high = j;
        else if (k >= i)
            low = i;
        else
            return values[k];
    }
    return values[low];
}

#endif
