// The model that every command uses when none is named: assets/tiny-moe.
#pragma once

#include <string>

namespace cadre::cli {

/// The folder of the bundled model. Looked for, in this order, as $CADRE_ASSETS/tiny-moe (when the
/// variable is set, only there), as ../share/cadre/tiny-moe beside the command's own folder (an
/// installation), and in the source tree that the command was built from. Throws CheckpointError
/// listing these places.
std::string bundled_model_path();

}  // namespace cadre::cli
