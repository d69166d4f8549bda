// Everything an application needs.
#pragma once

#include "cadre/chat.h"                 // IWYU pragma: export
#include "cadre/device.h"               // IWYU pragma: export
#include "cadre/dtype.h"                // IWYU pragma: export
#include "cadre/error.h"                // IWYU pragma: export
#include "cadre/experts.h"              // IWYU pragma: export
#include "cadre/generation.h"           // IWYU pragma: export
#include "cadre/image.h"                // IWYU pragma: export
#include "cadre/image_processor.h"      // IWYU pragma: export
#include "cadre/model.h"                // IWYU pragma: export
#include "cadre/quantization.h"         // IWYU pragma: export
#include "cadre/quantize_checkpoint.h"  // IWYU pragma: export
#include "cadre/stream.h"               // IWYU pragma: export
#include "cadre/tensor.h"               // IWYU pragma: export
#include "cadre/thread_pool.h"          // IWYU pragma: export
#include "cadre/tokenizer.h"            // IWYU pragma: export
#include "cadre/version.h"              // IWYU pragma: export
