//! Kernel hints that users give: the `runtimeOptimizations` of a package, in a file or on the command line.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail};
use sterna_format::rdrr::RuntimeOptimizations;

/// No hints are longer.
const MAX_BYTES: u64 = 1 << 20;

/// Reads the hints in a file.
pub(crate) fn read_hints(path: &Path) -> Result<RuntimeOptimizations> {
    let name = || path.display().to_string();
    let file = File::open(path).with_context(|| format!("{}: cannot open", name()))?;
    let mut bytes = Vec::new();
    let read = file.take(MAX_BYTES + 1).read_to_end(&mut bytes);
    read.with_context(|| format!("{}: cannot read", name()))?;
    if bytes.len() as u64 > MAX_BYTES {
        bail!("{}: expected at most {MAX_BYTES} bytes, found more", name());
    }
    RuntimeOptimizations::parse(&bytes).with_context(name)
}

/// Parses the value of `--kernel-hints`: JSON, or the name of a file with it.
pub(crate) fn parse(text: &str) -> Result<RuntimeOptimizations, String> {
    let hints = match text.trim_start().starts_with('{') {
        true => RuntimeOptimizations::parse(text.as_bytes()).map_err(anyhow::Error::from),
        false => read_hints(Path::new(text)),
    };
    hints.map_err(|error| format!("{error:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_are_json_or_a_file_with_it() {
        let json = r#"{"preferredKernels": {"matmul": "f32"}}"#;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hints.json");
        std::fs::write(&path, json).unwrap();
        let hints = parse(json).unwrap();
        assert_eq!(hints.preferred_kernels, [("matmul".into(), "f32".into())]);
        assert_eq!(parse(path.to_str().unwrap()).unwrap(), hints);
        let error = parse(r#"{"attentionTier": 5}"#).unwrap_err();
        assert_eq!(error, "attentionTier: expected a string, found 5");
        assert!(parse("no such file").unwrap_err().contains("cannot open"));
    }
}
