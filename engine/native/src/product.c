#include "product.h"

#include "columns.h"
#include "tiles.h"

#define WIDEST_FORM 4 /* panels that a tile may take together */
#define TASK_VALUES 32768 /* weights of a task: a few microseconds */
#define TILE_TASK_VALUES 65536
#define TILE_TASK_ROWS 20 /* that many rows take twice the time of one */

static int num_panels_of(const Matrix *w) { return (w->n + PANEL - 1) / PANEL; }

static void multiply(const Columns *columns, const Matrix *w, Input x, Rows y, int num_rows, int first, int end) {
    if (w->kind == KIND_TILES)
        tiles_multiply(w, x.digits, y, num_rows, first, end);
    else
        columns->multiply(w, x.rows, y, num_rows, first, end);
}

typedef struct {
    const Columns *columns;
    const Matrix *w;
    Input x;
    Rows y;
    int num_rows, panels_per_task;
} Product;

static void product_task(void *context, int task, int thread) {
    (void)thread;
    const Product *p = context;
    int first = task * p->panels_per_task, end = first + p->panels_per_task, all = num_panels_of(p->w);
    multiply(p->columns, p->w, p->x, p->y, p->num_rows, first, end < all ? end : all);
}

typedef struct {
    Input input;
    int num_rows;
} Writing;

static void write_group(void *context, int group, int thread) {
    (void)thread;
    const Writing *w = context;
    int first = group * GROUP_ROWS, end = first + GROUP_ROWS < w->num_rows ? first + GROUP_ROWS : w->num_rows;
    for (int row = first; row < end; row++)
        digits_write(w->input.digits, row, row_of(w->input.rows, row));
}

Input input_of(Pool *pool, float *buffer, Rows rows, int k, int num_rows) {
    Writing writing = {{rows, digits_of(buffer, k)}, num_rows};
    if (buffer)
        pool_run(pool, write_group, &writing, (num_rows + GROUP_ROWS - 1) / GROUP_ROWS);
    return writing.input;
}

void product_alone(const Columns *columns, const Matrix *w, Input x, Rows y, int num_rows) {
    multiply(columns, w, x, y, num_rows, 0, num_panels_of(w));
}

/* A few microseconds of work. Multiples of the widest form, so that only the last task has narrow ones. */
static int panels_per_task(const Matrix *w, int num_rows) {
    int64_t rows = w->kind == KIND_TILES ? num_rows / TILE_TASK_ROWS : num_rows / 3;
    int64_t work = (int64_t)w->k * PANEL * (rows > 1 ? rows : 1);
    int values = w->kind == KIND_TILES ? TILE_TASK_VALUES : TASK_VALUES;
    int wide = (int)((values / work + WIDEST_FORM - 1) / WIDEST_FORM * WIDEST_FORM);
    return wide >= WIDEST_FORM ? wide : w->kind == KIND_TILES || num_rows < 4 ? WIDEST_FORM : 1;
}

void product(const Machine *machine, const Matrix *w, Input x, Rows y, int num_rows) {
    int panels = num_panels_of(w), per_task = pool_num_threads(machine->pool) == 1 ? panels : panels_per_task(w, num_rows);
    Product context = {machine->columns, w, x, y, num_rows, per_task};
    pool_run(machine->pool, product_task, &context, (panels + per_task - 1) / per_task);
}
