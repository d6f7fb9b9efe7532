//! sterna-kernels.
