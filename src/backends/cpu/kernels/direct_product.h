// panel_product for the tables that multiply chunk by chunk: straight from packed panels, and from
// weight rows with consecutive k half a panel at a time, 32 rows being as many streams of memory as
// the hardware's prefetcher follows.
#pragma once

#include "backends/cpu/kernels/panel_product.h"

namespace cadre::cpu {

/// Whether direct_product takes the panel.
bool multiplies_directly(const KernelTable& kernels, const RowSet& rows, const PanelParts& parts);

/// As panel_product, bit for bit.
void direct_product(const KernelTable& kernels, const RowSet& rows, int64_t k,
                    const PanelParts& parts, const PanelScratch& scratch);

}  // namespace cadre::cpu
