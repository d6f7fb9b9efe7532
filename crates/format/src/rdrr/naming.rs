//! What quantizations are called, and the tag that tells variants of a model apart.
