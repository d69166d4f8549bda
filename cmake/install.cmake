# Filled with the install rules and the package file (see docs/decisions).
