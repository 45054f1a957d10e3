#define COLUMNS narrow_columns
#include "columns_code.h"
