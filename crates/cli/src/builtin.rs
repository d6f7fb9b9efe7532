//! The model inside this program; see `models/tiny-tales/README.md` for what it is.

use bytes::Bytes;

/// What stands for the built-in model where a verb takes a MODEL.
pub(crate) const NAME: &str = "builtin";

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_bytes!(concat!("../models/tiny-tales/", $name)).as_slice())),*]
    };
}

static FILES: [(&str, &[u8]); 5] = files![
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// The name and the bytes of the file called `name` in the folder of the built-in model.
pub(crate) fn file(name: &str) -> Option<(&'static str, Bytes)> {
    let (name, bytes) = FILES.iter().find(|file| file.0 == name)?;
    Some((name, Bytes::from_static(bytes)))
}
