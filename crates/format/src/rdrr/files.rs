//! Names of the files of a package.

/// The name of the file that makes a folder a package.
pub const MANIFEST_FILE: &str = "manifest.json";
/// The usual name of the external tensor map.
pub const TENSORS_FILE: &str = "tensors.json";

/// The usual name of the shard with this index.
pub fn shard_file_name(index: usize) -> String {
    format!("shard_{index:05}.bin")
}
